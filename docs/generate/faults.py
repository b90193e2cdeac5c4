"""Purpose: the results of runs of the fault scenarios.

`python -m dev.faults --json docs/explanation/faults.json` recorded the figures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .markdown import table

FIGURES = Path(__file__).parents[1] / "explanation" / "faults.json"
HEAD = ("Scenario", "RabbitMQ", "Confirmed", "Lost", "Early", "Twice", "Late, s: p50 / p99 / max")

AMENDED = (
    *("What breaks", "RabbitMQ", "Confirmed", "Amended", "Ran yet", "Dropped wrongly"),
    *("Lost", "Twice"),
)


def runs() -> list[dict[str, Any]]:
    """Return every recorded run."""
    rows: list[dict[str, Any]] = json.loads(FIGURES.read_text())
    return rows


def faults(scenarios: list[str], _: str) -> str:
    """Return a table with a row for each run of the scenarios that the arguments name.

    :raises ValueError: if a scenario has no recorded run.
    """
    rows = [row for row in runs() if row["scenario"] in scenarios]
    missing = set(scenarios) - {row["scenario"] for row in rows}
    if missing:
        raise ValueError(f"no figures of {sorted(missing)} in {FIGURES.name}")
    return table(HEAD, [_row(row) for row in rows], text=2) + _source(rows)


def bad_destinations(_: list[str], __: str) -> str:
    """Return a table of what bad destinations cost a good one."""
    rows = [row for row in runs() if row["scenario"] == "bad destination"]
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        notes = row["notes"]
        stuck = notes["good not there in time"]
        cell = f"{stuck} of 150 stuck" if stuck else f"{notes['worst among bad']:.2f} s"
        found.setdefault(row["case"], {})[row["broker"]] = f"{notes['worst alone']:.2f} s → {cell}"
    brokers = sorted({row["broker"] for row in rows}, key=lambda each: [*map(int, each.split("."))])
    head = ("Bad destination", *(f"RabbitMQ {broker}" for broker in brokers))
    cells = [[case, *(by.get(each, "") for each in brokers)] for case, by in found.items()]
    return table(head, cells) + _source(rows)


def amended(_: list[str], __: str) -> str:
    """Return a table of the outcomes of amended messages."""
    names = ("broker", "confirmed", "amended", "ran", "dropped", "lost", "duplicates")
    rows = [row for row in runs() if row["scenario"] == "amended"]
    cells = [[row["case"], *(str(row[name]) for name in names)] for row in rows]
    return table(AMENDED, cells) + _source(rows)


def _source(rows: list[dict[str, Any]]) -> str:
    """Return the line below a table: where and when its rows were recorded, and of what commit."""
    sources: dict[str, dict[str, None]] = {}
    for row in rows:
        commits = sources.setdefault(f"{row['processor']}, {row['cores']} cores", {})
        commits[f"commit {row['commit']}, {row['date']}"] = None
    lines = ("; ".join((machine, *commits)) for machine, commits in sources.items())
    return "\n\n" + " ".join(f"{line}." for line in lines)


def _row(row: dict[str, Any]) -> list[str]:
    late = " / ".join(f"{each:.1f}" for each in row["late"])
    counts = [str(row[name]) for name in ("confirmed", "lost", "early", "duplicates")]
    return [f"{row['scenario']}: {row['case']}", row["broker"], *counts, late]
