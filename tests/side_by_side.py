"""Purpose: which tests pytest-xdist may run side by side, and in which order they begin.

A unit is what one worker runs, one test after the other: all tests of a file, unless the table says
otherwise. So fixtures of a module are made once. The option `--dist` changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

EACH, FILE = "each", "file"
# What starts Java is in two units. Each keeps a processor busy, so more of them side by side only
# make each other late; and one would take longer than all other tests.
PUBLISHING, PLANNING = "spark, publishing", "spark, planning"

#: How test ids begin, and their unit: of its own for EACH test, one for each FILE, or one by name.
#: For each test the first line counts that fits. What is higher up begins earlier: what is long.
TABLE = (
    # The first of its session: Java keeps the folder that it is started in, and this test has one.
    ("tests/broker/test_docs.py::test_the_code_of_a_page_runs[docs/how-to/spark.md]", PLANNING),
    ("tests/spark/test_plan.py", PLANNING),
    ("tests/spark/test_report.py", PLANNING),
    ("tests/spark/test_audit.py", PLANNING),
    ("tests/spark/test_prepare.py", PLANNING),
    ("tests/spark/test_connect.py", PLANNING),
    ("tests/spark/test_tables.py", PLANNING),
    ("tests/spark/test_formats.py", PLANNING),
    ("tests/spark/test_send.py", FILE),
    ("tests/spark/", PUBLISHING),
    # Each of their tests starts a broker or three, which should not be all at once.
    ("tests/faults/", FILE),
    ("tests/broker/test_bench.py", FILE),
    ("tests/broker/test_docs.py", EACH),
    ("tests/acceptance/", FILE),
    ("tests/broker/test_admin.py", EACH),
    ("tests/broker/test_move.py", EACH),
    ("tests/broker/test_waiting.py", EACH),
    ("tests/broker/test_cli.py", EACH),
    ("tests/broker/test_cancel.py", EACH),
    ("tests/broker/test_amendments.py", EACH),
    ("tests/broker/test_permissions.py", EACH),
    ("tests/broker/test_batch.py", EACH),
    ("tests/conformance/", EACH),
    ("tests/broker/", FILE),
    ("", FILE),
)


def line_of(nodeid: str) -> int:
    """Return the number of the line of the table that counts for a test."""
    return next(number for number, (start, _) in enumerate(TABLE) if nodeid.startswith(start))


def unit(nodeid: str) -> str:
    """Return the name of a test's unit."""
    name = TABLE[line_of(nodeid)][1]
    return {EACH: nodeid, FILE: nodeid.partition("::")[0]}.get(name, name)


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler that pytest-xdist is to use."""
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - there may be no pytest-xdist

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    config.option.loadscopereorder = False  # the order is that of the table
    return Scheduling(config, log)
