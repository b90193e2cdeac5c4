"""Purpose: recorded measurements as tables and single figures.

`make bench` recorded them. The page on performance shows some rows and figures of both releases;
the text files beside it have all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import report
from kombu_binary_delay import Ladder, Topology
from kombu_binary_delay.ladder.ladder import hops

from .markdown import table

FOLDER = Path(__file__).parents[1] / "explanation" / "performance"
#: By section, as in ``burst-on-4.3``; those in a folder, as in ``second-run/burst``, are more runs.
RESULTS: dict[str, dict[str, Any]] = {
    path.relative_to(FOLDER / "results").with_suffix("").as_posix(): json.loads(path.read_text())
    for path in sorted((FOLDER / "results").rglob("*.json"))
}


#: The releases that the page compares, the newest first, and how the names of their results end.
RELEASES = {"4.3": "-on-4.3", "3.10": ""}


def beside(arguments: list[str], _: str) -> str:
    """Return a table of medians of both releases: a section, its rows or ``*``, and its figures."""
    section, rows, figures = arguments[0], arguments[1].split(), arguments[2].split()
    rows = list(RESULTS[section]["found"]) if rows == ["*"] else rows
    titles = report.titles_of(section)
    columns = {column.figure: column for column in report.TABLES[section] if column.of == "median"}
    shown = [(columns[name], release) for name in figures for release in RELEASES]
    head = ["", *(f"{column.title}: {release}" for column, release in shown)]
    cells = [
        [
            titles.get(row, row),
            *(
                column.form.format(figure(section + RELEASES[release], row, column.figure))
                for column, release in shown
            ),
        ]
        for row in rows
    ]
    return table(head, cells, text=1)


def measured(arguments: list[str], _: str) -> str:
    """Return the table of a section that was measured on one release."""
    [section] = arguments
    return report.table(section, RESULTS[section])


def tables() -> dict[str, str]:
    """Return all tables as text, by their file's name: those of a release, and of further runs."""
    files: dict[str, list[str]] = {}
    for name, result in RESULTS.items():
        release = "4.3" if name.endswith(RELEASES["4.3"]) else "3.10"
        file = "tables-of-further-runs" if "/" in name else f"tables-on-{release}"
        files.setdefault(f"{file}.txt", []).append(f"{name}\n\n{report.table(name, result)}\n")
    return {name: "\n".join(texts) for name, texts in files.items()}


def figure(result: str, row: str, name: str, of: str = "median") -> float:
    """Return one figure of a result: its median, or the one that ``of`` names."""
    return float(RESULTS[result]["found"][row][name][of])


#: The ladders that are compared, by the row of the results.
LADDERS = {
    "ours": ("the default", Ladder.default()),
    "three-bits": ("three bits a level", Ladder.uniform(8)),
    "two-bits": ("two bits a level", Ladder.uniform(4)),
    "binary": ("one bit a level", Ladder.binary()),
    "skip": ("the default, skip", Ladder.default()),
}


def queues(ladder: Ladder) -> int:
    """Return the number of level queues."""
    return sum(len(level.queues) for level in Topology(ladder).levels)


def waits(ladder: Ladder, longest: int, step: int = 1) -> float:
    """Return the mean number of waits over delays of whole seconds up to ``longest`` s.

    :param step: from one delay to the next, in seconds; more than one for a mean over a long time.
    """
    counts = [hops(ladder.digits(1000 * second)) for second in range(1, longest + 1, step)]
    return sum(counts) / len(counts)


def to_default(result: str, row: str, name: str) -> float:
    """Return a figure as a multiple of that of the default ladder."""
    return figure(result, row, name) / figure(result, "ours", name)


def ladders(_: list[str], __: str) -> str:
    """Return a table of the ladders' costs, relative to the default one."""
    head = ["", "Queues", "Waits, 12 s", "an hour", "a day", "CPU, 12 s", "an hour", "a day"]
    rows = []
    for name, (title, ladder) in LADDERS.items():
        means = [waits(ladder, 12), waits(ladder, 3600), waits(ladder, 86_400, 7)]
        cells = [title, str(queues(ladder)), *(f"{mean:.1f}" for mean in means)]
        costs = [to_default(result, name, "cpu_us") for result in ("burst", "hour", "day")]
        rows.append([*cells, *(f"{cost:.2f}" for cost in costs)])
    return table(head, rows, text=1)
