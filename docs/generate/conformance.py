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
HELD, FAILED, NOT_APPLICABLE = "held", "failed", "does not apply"
#: The table's words for each outcome.
SIGNS = {HELD: "yes", NOT_APPLICABLE: "does not apply"}
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
    others = [each for each in load(folder) if _identity(each) != _identity(run)]
    files: dict[str, Run] = {}
    for each in sorted([*others, run], key=_identity):
        results = json.dumps(each["results"]).encode()
        name = f"{hashlib.sha256(results).hexdigest()[:8]}.json"
        file = files.setdefault(name, {"runs": [], "results": each["results"]})
        file["runs"].append({of: value for of, value in each.items() if of != "results"})
    for path in folder.glob("*.json"):
        path.unlink()
    for name, file in files.items():
        (folder / name).write_text(json.dumps(file, indent=1, ensure_ascii=False) + "\n")


def tried(what: str) -> list[str]:
    """Return the versions of ``"rabbitmq"``, ``"celery"`` or ``"python"`` in the recorded runs."""
    return [run[what] for run in load()]


def runs_table(runs: list[Run]) -> Rows:
    """Return a row per RabbitMQ and a column per Celery: how many cases passed, and Pythons."""
    celeries = sorted({_minor(run["celery"]) for run in runs}, key=_numbers)
    rows = [["RabbitMQ", *(f"Celery {each}" for each in celeries)]]
    for rabbitmq in dict.fromkeys(run["rabbitmq"] for run in runs):
        cells = defaultdict(list)
        for run in runs:
            if run["rabbitmq"] == rabbitmq:
                cells[_minor(run["celery"])].append(f"Python {run['python']}: {_count(run)}")
        rows.append([rabbitmq, *("<br>".join(cells[each]) for each in celeries)])
    return rows


def cases_table(runs: list[Run], *, ladders: bool) -> Rows:
    """Return a row per case and a column per place where it ran, for all recorded runs.

    :param ladders: a column per ladder; otherwise per RabbitMQ. Then, a cell names the type of the
        ladder's queues only if the types differ.
    """
    found: dict[str, dict[str, list[tuple[str, Run]]]] = defaultdict(lambda: defaultdict(list))
    columns: dict[str, None] = {} if ladders else {WALK: None}
    for run in runs:
        for result in run["results"]:
            column = _column(run, result, ladders=ladders)
            if column is None:
                continue
            columns[column] = None
            for outcome in (HELD, FAILED, NOT_APPLICABLE):
                for case in result.get(outcome, ()):
                    found[case][column].append((outcome, run))
    used = [each for each in columns if any(_says(cells[each]) for cells in found.values())]
    heads = [each[0].upper() + each[1:] if ladders or each == WALK else each for each in used]
    rows = [["What holds", *heads]]
    rows += [
        [plain(case), *(_cell(cells[each], ladders=ladders) for each in used)]
        for case, cells in found.items()
    ]
    rows = [row for row in rows if any(row[1:])]
    return rows if ladders else _by_release(rows)


def _by_release(rows: Rows) -> Rows:
    """Return rows with one column per release for all queue types: seven would be too narrow."""
    head, *body = rows
    columns: dict[str, dict[str, int]] = defaultdict(dict)
    for number, title in enumerate(head):
        release, _, queue_type = title.partition(", ")
        columns[release][queue_type] = number

    def cell(row: list[str], types: dict[str, int]) -> str:
        said = {each: row[number] for each, number in types.items()}
        if len(set(said.values())) == 1:
            return next(iter(said.values()))
        return "<br>".join(f"{each}: {text}" for each, text in said.items() if text)

    return [[*columns], *([cell(row, types) for types in columns.values()] for row in body)]


def _column(run: Run, result: dict[str, Any], *, ladders: bool) -> str | None:
    if ladders:
        return None if result["on"] == WALK else str(result["ladder"])
    if result["on"] == WALK:
        return WALK
    if result["ladder"] != DEFAULT_LADDER:
        return None
    return f"{_minor(run['rabbitmq'])}, {result['queue_type']}"


def _cell(outcomes: list[tuple[str, Run]], *, ladders: bool) -> str:
    failed = [_name(run) for outcome, run in outcomes if outcome == FAILED]
    if failed:
        return f"**no**: {', '.join(failed)}"
    if ladders:
        # Not every ladder was tested on every RabbitMQ: name the versions.
        held = [_minor(run["rabbitmq"]) for outcome, run in outcomes if outcome == HELD]
        return ", ".join(dict.fromkeys(held))
    said = {SIGNS[outcome] for outcome, _ in outcomes}
    return SIGNS[HELD] if SIGNS[HELD] in said else "".join(said)


def _says(outcomes: list[tuple[str, Run]]) -> bool:
    """Return whether a column has an outcome other than "does not apply"."""
    return any(outcome != NOT_APPLICABLE for outcome, _ in outcomes)


def _count(run: Run) -> str:
    on_broker = [result for result in run["results"] if result["on"] != WALK]
    held, failed = (
        sum(len(result.get(outcome, ())) for result in on_broker) for outcome in (HELD, FAILED)
    )
    return f"all {held}" if not failed else f"**{failed} of {held + failed} failed**"


def _name(run: Run) -> str:
    return f"RabbitMQ {run['rabbitmq']}, Celery {run['celery']}, Python {run['python']}"


def _identity(run: Run) -> list[list[int]]:
    return [_numbers(run[each]) for each in ("rabbitmq", "celery", "python")]


def _numbers(version: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", version)]


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
