"""Purpose: write all generated parts of README and docs, as Markdown and SVG files to commit.

    python -m docs.generate [--check]

So a code host shows the same as the site that Sphinx builds. It needs no broker. It prints the
names of the files that it has changed. With --check, which a test runs, it changes no file, and
exits with 1 if it would change any.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kombu_binary_delay import Ladder, Topology
from kombu_binary_delay.export import svg

from .api import api
from .benchmarks import FOLDER, beside, ladders, measured, tables
from .charts import charts
from .cli import cli_commands
from .conformance import FOLDER as CONFORMANCE
from .conformance import conformance
from .conformance import tables as tables_of_conformance
from .defects import defects
from .faults import FIGURES, faults
from .faults import tables as tables_of_faults
from .pages import Maker, fill
from .pipeline import pipeline_table
from .settings import settings

ROOT = Path(__file__).parents[2]

#: The pictures of a ladder, and of the way of a message with a delay in milliseconds.
LADDERS = {
    "ladder.svg": (Topology(Ladder.uniform(4, 4)), 10_000),
    "ladder-default.svg": (Topology(), 3_600_000),
}

MAKERS: dict[str, Maker] = {
    "api": api,
    "beside": beside,
    "cli-commands": cli_commands,
    "conformance": conformance,
    "faults": faults,
    "known-defects": defects,
    "ladders": ladders,
    "measured": measured,
    "pipeline-table": pipeline_table,
    "settings": settings,
}


def pages() -> list[Path]:
    """Return the paths of README and every page."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def generated() -> dict[Path, str]:
    """Return the up-to-date text of every page and figure, by path."""
    texts = {page: fill(page.read_text(), MAKERS) for page in pages()}
    texts |= {FOLDER / name: text for name, text in (charts() | tables()).items()}
    for name, (topology, delay) in LADDERS.items():
        texts[FOLDER.parent / name] = svg(topology, delay, "mail") + "\n"
    texts[CONFORMANCE.with_suffix(".txt")] = tables_of_conformance()
    texts[FIGURES.with_suffix(".txt")] = tables_of_faults()
    return texts


def main(*, check: bool = False) -> int:
    stale = {
        path: text
        for path, text in generated().items()
        if not path.exists() or path.read_text() != text
    }
    for path, text in stale.items():
        if not check:
            path.write_text(text)
        print(path.relative_to(ROOT))
    return int(check and bool(stale))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m docs.generate")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it would")
    sys.exit(main(check=parser.parse_args().check))
