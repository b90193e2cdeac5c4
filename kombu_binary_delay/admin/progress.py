"""How a long operation reports to its caller."""

from __future__ import annotations

from collections.abc import Callable

#: Is called now and then with the number of messages done.
Progress = Callable[[int], object]
#: Is called with a sentence that says what goes on, where that takes a while.
Notify = Callable[[str], object]


def ignore(report: object) -> None:
    """Report to nobody."""
    del report
