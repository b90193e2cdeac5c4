"""What a run of the suite found, kept for the table in the documentation.

It is written only by a run of every case that could run.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from importlib.metadata import version
from itertools import product
from typing import TYPE_CHECKING, Any

from docs.generate.conformance import FAILED, FOLDER, HELD, WALK, keep
from kombu_binary_delay.ladder.topology import QUEUE_TYPES
from tests.conformance.cases import CASES
from tests.conformance.table import LADDERS, Case

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

BROKER = "broker"
#: What a test of the suite reports of itself, see pytest's `record_property`.
PROPERTY = "conformance"

#: What it ran on, the ladder, and the type of the ladder's queues.
Column = tuple[str, str, str]


def expected() -> Iterator[tuple[Column, Case]]:
    """List every case of every column, as the suite runs them."""
    default = next(iter(LADDERS))
    for on, ladder, queue_type in product((WALK, BROKER), LADDERS, QUEUE_TYPES):
        for case in CASES:
            runs = ladder == default or case.levels if on == BROKER else not case.broker
            if runs:
                yield (on, ladder, queue_type), case


class Recorder:
    """A plugin of pytest that listens to the tests of the suite."""

    def __init__(self) -> None:
        self._found: dict[Column, dict[str, str]] = defaultdict(dict)
        self._rabbitmq = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reported: dict[str, Any] = dict(report.user_properties)
        if PROPERTY not in reported:
            return
        on, ladder, queue_type, case = reported[PROPERTY]
        self._rabbitmq = reported.get(BROKER, self._rabbitmq)
        cases = self._found[on, ladder, queue_type]
        if report.failed:
            cases[case] = FAILED
        elif report.passed and report.when == "call":
            cases[case] = HELD

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if all(case.name in self._found[column] for column, case in expected()):
            keep(self._run())
            terminalreporter.line(f"conformance: recorded in {FOLDER}", green=True)
        else:
            terminalreporter.line("conformance: NOT recorded, since not every case ran", red=True)

    def _run(self) -> dict[str, Any]:
        return {
            "rabbitmq": self._rabbitmq,
            "celery": version("celery"),
            "kombu": version("kombu"),
            "python": ".".join(platform.python_version_tuple()[:2]),
            "results": [
                {"on": on, "ladder": ladder, "queue_type": queue_type, **_by_outcome(cases)}
                for (on, ladder, queue_type), cases in sorted(self._found.items())
            ],
        }


def _by_outcome(cases: dict[str, str]) -> dict[str, list[str]]:
    outcomes: dict[str, list[str]] = defaultdict(list)
    # In the order of the table, and not in that in which several workers ran them.
    for case in dict.fromkeys(expected_case.name for _, expected_case in expected()):
        if case in cases:
            outcomes[cases[case]].append(case)
    return dict(sorted(outcomes.items()))
