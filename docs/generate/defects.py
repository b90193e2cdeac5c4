"""Purpose: the known defects of other software, from the table that the code reads."""

from __future__ import annotations

from kombu_binary_delay.ladder.defects import DEFECTS, Defect, written

from .markdown import table


def defects(_: list[str], __: str) -> str:
    """Return a table with a row for each defect."""
    rows = [
        (
            f"{defect.product} {_affected(defect)}",
            defect.what[0].upper() + defect.what[1:],
            " or ".join(map(written, defect.fixed)),
            f"[{defect.name}]({defect.source})",
        )
        for defect in DEFECTS
    ]
    return table(("Release", "What it does", "Upgrade to", "Source"), rows)


def _affected(defect: Defect) -> str:
    first, last = defect.brokers
    parts = [f"from {written(defect.since)}" if defect.since else "of all series"]
    if first:
        parts.append(f"on RabbitMQ {written(first)} and later")
    if last < (1000,):
        parts.append(f"on RabbitMQ before {written(last)}")
    return ", ".join(parts)
