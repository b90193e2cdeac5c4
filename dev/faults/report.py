"""Purpose: what came out, as a table for people and as JSON for the documentation."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dev.provenance import provenance

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from dev.faults.environment import Outcome

Row = dict[str, Any]


def to_row(outcome: Outcome) -> Row:
    """Write an outcome as plain data; times in seconds, what never came is null."""
    verdict = outcome.verdict
    return {
        "scenario": outcome.case.scenario,
        "case": outcome.case.name,
        "broker": outcome.broker,
        "holds": outcome.holds,
        "confirmed": verdict.confirmed,
        "refused": verdict.refused,
        "lost": len(verdict.lost),
        "early": len(verdict.early),
        "misdelivered": len(verdict.misdelivered),
        "duplicates": verdict.duplicates,
        "amended": verdict.amended,
        "ran": len(verdict.ran),
        "dropped": len(verdict.dropped),
        "late": [round(verdict.late(share), 3) for share in (0.5, 0.99, 1)],
        "checks": [
            {
                "what": check.what,
                "value": _finite(check.value),
                "limit": check.limit,
                "holds": check.holds,
            }
            for check in outcome.checks
        ],
        "notes": {name: _finite(value) for name, value in outcome.notes.items()},
        **provenance(),
    }


def table(rows: Iterable[Row]) -> Table:
    """Lay rows out for a terminal."""
    drawn = Table(title="Faults", header_style="bold")
    for name in ("scenario", "case", "RabbitMQ", "confirmed", "lost", "early", "wrong", "twice"):
        drawn.add_column(name, justify="right" if name in ("lost", "early") else "left")
    drawn.add_column("amended / ran yet / dropped wrongly")
    drawn.add_column("late, s: p50 / p99 / max")
    drawn.add_column("holds")
    for row in rows:
        failed = [
            f"{check['what']}: {check['value']}, limit {check['limit']}"
            for check in row["checks"]
            if not check["holds"]
        ]
        drawn.add_row(
            row["scenario"],
            row["case"],
            row["broker"],
            *(
                str(row[name])
                for name in ("confirmed", "lost", "early", "misdelivered", "duplicates")
            ),
            " / ".join(str(row[name]) for name in ("amended", "ran", "dropped")),
            " / ".join(f"{late:.2f}" for late in row["late"]),
            "yes" if row["holds"] else f"[bold red]NO[/] {'; '.join(failed)}",
        )
    return drawn


def merge(path: Path, rows: Iterable[Row]) -> None:
    """Put rows into a file of figures, in place of those of the same case and broker."""
    known = json.loads(path.read_text()) if path.exists() else []
    merged = {_key(row): row for row in known}
    merged.update((_key(row), row) for row in rows)
    lines = ",\n".join(json.dumps(row) for row in merged.values())
    path.write_text(f"[\n{lines}\n]\n")


def _key(row: Row) -> tuple[str, str, str]:
    return row["scenario"], row["case"], row["broker"]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else None
    return value
