"""How a long operation reports to its caller."""

from __future__ import annotations

from collections.abc import Callable

#: Called now and then with the number of messages done.
Progress = Callable[[int], object]
#: Called with a sentence about a step that takes a while.
Notify = Callable[[str], object]


def ignore(report: object) -> None:
    """Ignore a report."""
    del report
