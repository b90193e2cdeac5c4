"""The tables and charts of the documentation are those of the results beside them."""

from __future__ import annotations

import shutil
from pathlib import Path
from xml.etree import ElementTree as ET

from benchmarks.report import write

PUBLISHED = Path(__file__).parents[2] / "docs" / "explanation" / "performance"


def test_what_is_published_is_what_the_results_say(tmp_path):
    shutil.copytree(PUBLISHED / "results", tmp_path / "results")

    write(tmp_path)

    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.glob("**/*.*")}
    assert made == {path: (PUBLISHED / path).read_text() for path in made}
    charts = [text for path, text in made.items() if path.suffix == ".svg"]
    assert len(charts) >= 4
    for chart in charts:
        ET.fromstring(chart)  # noqa: S314 - our own
