"""Purpose: tables of the results of recorded runs of the conformance suite.

`pytest tests/conformance --record-conformance` records a run in ``docs/reference/conformance/``.
Runs with the same results share a file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from .markdown import plain, table

FOLDER = Path(__file__).parents[1] / "reference" / "conformance"
HELD, FAILED = "held", "failed"
DEFAULT_LADDER = "default"
WALK = "walk"

Run = dict[str, Any]
Rows = list[list[str]]


def load(folder: Path = FOLDER) -> list[Run]:
    """Return every recorded run with its results, oldest RabbitMQ and Celery first."""
    files = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    runs = [{**run, "results": file["results"]} for file in files for run in file["runs"]]
    return sorted(runs, key=_identity)


def keep(run: Run, folder: Path = FOLDER) -> None:
    """Record a run with its results, in place of an earlier one of the same versions."""
    others = [kept for kept in load(folder) if _identity(kept) != _identity(run)]
    files: dict[str, Run] = {}
    for kept in sorted([*others, run], key=_identity):
        results = json.dumps(kept["results"]).encode()
        name = f"{hashlib.sha256(results).hexdigest()[:8]}.json"
        file = files.setdefault(name, {"runs": [], "results": kept["results"]})
        file["runs"].append({of: value for of, value in kept.items() if of != "results"})
    for path in folder.glob("*.json"):
        path.unlink()
    for name, file in files.items():
        (folder / name).write_text(json.dumps(file, indent=1, ensure_ascii=False) + "\n")


def runs_table(runs: list[Run]) -> Rows:
    """Return a row per RabbitMQ and a column per Celery: how many cases passed, and Pythons."""
    celeries = sorted({_minor(run["celery"]) for run in runs}, key=_numbers)
    rows = [["RabbitMQ", *(f"Celery {celery}" for celery in celeries)]]
    for rabbitmq in dict.fromkeys(run["rabbitmq"] for run in runs):
        cells = defaultdict(list)
        for run in runs:
            if run["rabbitmq"] == rabbitmq:
                cells[_minor(run["celery"])].append(f"Python {run['python']}: {_count(run)}")
        rows.append([rabbitmq, *("<br>".join(cells[celery]) for celery in celeries)])
    return rows


def cases_table(runs: list[Run], *, ladders: bool) -> Rows:
    """Return a row per case and a column per place where it ran, for all recorded runs.

    :param ladders: a column per ladder, whose cells name the RabbitMQs on which the case held;
        otherwise a column per RabbitMQ, with the default ladder, after one without a broker.
    """
    cells: dict[str, dict[str, list[tuple[bool, Run]]]] = defaultdict(lambda: defaultdict(list))
    columns: dict[str, None] = {}
    for run in runs:
        for result in run["results"]:
            column = _column(run, result, ladders=ladders)
            if column is None:
                continue
            columns[column] = None
            for outcome in (HELD, FAILED):
                for case in result.get(outcome, ()):
                    cells[case][column].append((outcome == HELD, run))
    ordered = sorted(columns, key=lambda column: column != WALK.capitalize())
    rows = [["What holds", *ordered]]
    for case, row in cells.items():
        rows.append([plain(case), *(_cell(row[column], ladders=ladders) for column in ordered)])
    return rows


def _column(run: Run, result: dict[str, Any], *, ladders: bool) -> str | None:
    on_broker = result["on"] != WALK
    if ladders:
        return str(result["ladder"]).capitalize() if on_broker else None
    if on_broker and result["ladder"] != DEFAULT_LADDER:
        return None
    return _minor(run["rabbitmq"]) if on_broker else WALK.capitalize()


def _cell(outcomes: list[tuple[bool, Run]], *, ladders: bool) -> str:
    failed = dict.fromkeys(_name(run) for held, run in outcomes if not held)
    if failed:
        return f"**no**: {', '.join(failed)}"
    if ladders:
        # Not every ladder was tested on every RabbitMQ: name the versions.
        return ", ".join(dict.fromkeys(_minor(run["rabbitmq"]) for _, run in outcomes))
    return "yes" if outcomes else ""


def _count(run: Run) -> str:
    on_broker = [result for result in run["results"] if result["on"] != WALK]
    held, failed = (
        sum(len(result.get(outcome, ())) for result in on_broker) for outcome in (HELD, FAILED)
    )
    return f"all {held}" if not failed else f"**{failed} of {held + failed} failed**"


def _name(run: Run) -> str:
    return f"RabbitMQ {run['rabbitmq']}, Celery {run['celery']}, Python {run['python']}"


def _identity(run: Run) -> list[list[int]]:
    return [_numbers(run[part]) for part in ("rabbitmq", "celery", "python")]


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def conformance(_: list[str], __: str) -> str:
    """Return the table of the runs."""
    head, *rows = runs_table(load())
    return table(head, rows)


def tables() -> str:
    """Return the tables of what held on each release, and with each ladder, as text."""
    parts = []
    for ladders in (False, True):
        head, *rows = cases_table(load(), ladders=ladders)
        if ladders:
            rows = [row for row in rows if all(row)]
        parts.append(table(head, rows))
    return "\n\n".join(parts) + "\n"
