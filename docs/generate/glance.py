"""Purpose: the charts of docs/explanation/at-a-glance.md, one for each of its questions."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks import report

from .benchmarks import RESULTS

_PEERS = ("ours", "celery-native", "nservicebus", "symfony")


class _Question(NamedTuple):
    """What a chart shows: a figure of some rows of a result.

    unit: what the figure is divided by, for the axis.
    """

    result: str
    figure: str
    rows: dict[str, str]
    axis: str
    log: bool = False
    unit: float = 1


def _titles(*rows: str) -> dict[str, str]:
    return {row: report.TITLES[row] for row in rows}


_QUESTIONS = {
    "cost": _Question("burst", "cpu_us", _titles("floor", *_PEERS), "broker CPU, µs a message"),
    "lateness": _Question(
        "burst", "p99", _titles(*_PEERS), "p99 lateness, ms (logarithmic)", log=True
    ),
    "rate": _Question(
        "sustained",
        "publish_rate",
        _titles("ours", "celery-native", "nservicebus"),
        "messages a second, on two cores",
    ),
    "waiting": _Question(
        "waiting-on-4.3",
        "memory",
        {
            "0": "ours, nothing waits",
            "1000000": "ours, a million wait",
            "3000000": "ours, three million wait",
            "10000000": "ours, ten million wait",
        },
        "the broker's memory, MB",
        unit=1e6,
    ),
    "program": _Question(
        "publishing",
        "cpu_us",
        {
            "celery": "Celery on Kombu's own transport",
            "celery-ours": "ours, Celery",
            "celery-native": "Celery's native delivery, delayed",
            "celery-ours-delayed": "ours, Celery, delayed",
        },
        "the publisher's CPU, µs a message",
    ),
}


def charts() -> dict[str, str]:
    """Draw the charts, and return the text of each file by its name."""
    return {f"at-a-glance-{name}.svg": _drawn(each) for name, each in _QUESTIONS.items()}


def _drawn(question: _Question) -> str:
    found = RESULTS[question.result]["found"]
    values = [_spread(found[row][question.figure], question.unit) for row in question.rows]
    return report.bars([*question.rows.values()], report.Panel(question.axis, values, question.log))


def _spread(figure: Any, unit: float) -> dict[str, float]:
    figures = figure if isinstance(figure, dict) else {"median": figure}
    of = ("median", "least", "most")
    return {name: each / unit for name, each in figures.items() if name in of}
