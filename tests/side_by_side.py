"""Purpose: which tests pytest-xdist may run side by side, and in which order they begin.

All tests of a file run in one worker, one after the other, so that fixtures of a module or a class
are made once. The table below has the exceptions. `--dist` is ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

#: Files whose tests share nothing, and take long: each test is on its own.
SPREAD = (
    "tests/broker/test_admin.py",
    "tests/broker/test_bench.py",
    "tests/broker/test_docs.py",
    "tests/broker/test_move.py",
    "tests/conformance/test_conformance.py",
    "tests/faults/test_faults.py",
)

#: What shares a JVM, which takes seconds to start and much memory.
SPARK = (
    "tests/spark/",
    "tests/broker/test_docs.py::test_the_code_of_a_page_runs[docs/how-to/spark",
)

#: What takes longest, which begins first.
LONGEST = (
    *SPARK,
    "tests/faults/",
    "tests/broker/test_bench.py",
    "tests/broker/test_docs.py",
    "tests/acceptance/",
    "tests/broker/",
)


def unit(nodeid: str) -> str:
    """Return the name of the unit that a test belongs to; a unit runs in one worker."""
    if nodeid.startswith(SPARK):
        return "spark"
    return nodeid if nodeid.startswith(SPREAD) else nodeid.partition("::")[0]


def rank(nodeid: str) -> int:
    """Return the place of a test among the others: the lower, the earlier it begins."""
    return next(
        (place for place, start in enumerate(LONGEST) if nodeid.startswith(start)), len(LONGEST)
    )


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler that pytest-xdist is to use."""
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - there may be no pytest-xdist

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    config.option.loadscopereorder = False  # the order is that of `rank`
    return Scheduling(config, log)
