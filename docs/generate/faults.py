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

#: The columns of the summary, by title.
SUMS = {"Confirmed": "confirmed", "Lost": "lost", "Early": "early", "Twice": "duplicates"}
#: The releases that the summary compares.
SHOWN = ("4.3", "3.10")
#: The scenarios that have tables of their own.
APART = ("bad destination", "amended")
AMENDED = (
    *("What breaks", "RabbitMQ", "Confirmed", "Amended", "Ran yet", "Dropped wrongly"),
    *("Lost", "Twice"),
)


def runs() -> list[dict[str, Any]]:
    """Return every recorded run."""
    rows: list[dict[str, Any]] = json.loads(FIGURES.read_text())
    return rows


def faults(_: list[str], __: str) -> str:
    """Return a table with a row for each scenario: the sums of its runs, and the latest arrival."""
    rows = [row for row in runs() if row["scenario"] != "bad destination"]
    releases = sorted({_minor(row) for row in rows}, key=_numbers, reverse=True)
    latest = [release for release in releases if release in SHOWN]
    head = ("What breaks", *SUMS, *(f"Latest, s: {release}" for release in latest))
    cells = []
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        runs_of = [row for row in rows if row["scenario"] == scenario]
        sums = [f"{sum(row[name] for row in runs_of):,}" for name in SUMS.values()]
        late = [
            max((row["late"][-1] for row in runs_of if _minor(row) == release), default=None)
            for release in latest
        ]
        cells.append([scenario, *sums, *("" if most is None else f"{most:.1f}" for most in late)])
    return table(head, cells, text=1)


def tables() -> str:
    """Return the tables of all runs, as text."""
    rows = [row for row in runs() if row["scenario"] not in APART]
    parts = {
        "every message": table(HEAD, [_row(row) for row in rows], text=2) + _source(rows),
        "a good destination: its worst lateness alone → beside a bad one": bad_destinations(),
        "amended messages": amended(),
    }
    return "\n\n".join(f"{title}\n\n{part}" for title, part in parts.items()) + "\n"


def bad_destinations() -> str:
    """Return a table of what bad destinations cost a good one."""
    rows = [row for row in runs() if row["scenario"] == "bad destination"]
    by_case: dict[str, dict[str, str]] = {}
    for row in rows:
        notes = row["notes"]
        stuck = notes["good not there in time"]
        cell = f"{stuck} of 150 stuck" if stuck else f"{notes['worst among bad']:.2f} s"
        by_case.setdefault(row["case"], {})[row["broker"]] = (
            f"{notes['worst alone']:.2f} s → {cell}"
        )
    brokers = sorted({row["broker"] for row in rows}, key=_numbers)
    head = ("Bad destination", *(f"RabbitMQ {broker}" for broker in brokers))
    cells = [[case, *(by.get(broker, "") for broker in brokers)] for case, by in by_case.items()]
    return table(head, cells) + _source(rows)


def amended() -> str:
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
    late = " / ".join(f"{share:.1f}" for share in row["late"])
    counts = [str(row[name]) for name in ("confirmed", "lost", "early", "duplicates")]
    return [f"{row['scenario']}: {row['case']}", row["broker"], *counts, late]


def _minor(row: dict[str, Any]) -> str:
    return str(row["broker"]).rpartition(".")[0]


def _numbers(release: str) -> list[int]:
    return [int(number) for number in release.split(".")]
