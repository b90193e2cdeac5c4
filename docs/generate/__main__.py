"""Purpose: write all that is generated in README and docs, as Markdown and SVG files to commit.

    python -m docs.generate

So a code host shows the same as the site that Sphinx builds. It needs no broker. A test fails where
what is committed is not what this writes.
"""

from __future__ import annotations

from pathlib import Path

from . import sentences
from .api import api
from .benchmarks import FOLDER, RESULTS, benchmark, ladders, report
from .cli import cli_help
from .conformance import conformance
from .faults import bad_destinations, faults
from .ladder import in_short, ten_seconds
from .pages import Maker, fill
from .pipeline import pipeline_table
from .settings import settings

ROOT = Path(__file__).parents[2]

MAKERS: dict[str, Maker] = {
    "api": api,
    "bad-destinations": bad_destinations,
    "benchmark": benchmark,
    "cli-help": cli_help,
    "conformance": conformance,
    "faults": faults,
    "ladders": ladders,
    "pipeline-table": pipeline_table,
    "settings": settings,
}


def pages() -> list[Path]:
    """Return README and every page."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def generated() -> dict[Path, str]:
    """Return the text of every page, and of every figure, as it should be."""
    texts = {
        page: sentences.write(fill(page.read_text(), MAKERS), page.relative_to(ROOT).as_posix())
        for page in pages()
    }
    texts |= {FOLDER / name: text for name, text in report.charts(RESULTS).items()}
    texts[FOLDER.parent / "ladder.svg"] = ten_seconds()
    texts[FOLDER.parent / "ladder-in-short.svg"] = in_short()
    return texts


def main() -> None:
    for path, text in generated().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
