"""Purpose: which tests pytest-xdist may run side by side, and in which order they begin.

A unit is what one worker runs, one test after the other: all tests of a file, unless the table says
otherwise. So fixtures of a module are made once. The option `--dist` changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

EACH, FILE = "each", "file"
# All that take the Spark session of a run. A Java process keeps all processors busy, so more of
# them side by side only make each other late: those that start one themselves wait for each other.
SPARK, JAVA = "Spark", "Java"
# A worker keeps the broker that a test takes by `own_broker`, so only this unit takes one. What
# starts brokers itself is in it too: not all should start at once.
OWNER = "own broker"

#: How test ids begin, and their unit: of its own for EACH test, one for each FILE, or one by name.
#: For each test the first line counts that fits. What is higher up begins earlier: what is long.
TABLE = (
    # The first of its session: Java keeps the folder that it is started in, and this test has one.
    ("tests/broker/test_docs.py::test_the_code_of_a_page_runs[docs/how-to/spark.md]", SPARK),
    ("tests/spark/test_connect.py", JAVA),
    ("tests/spark/test_killed.py", JAVA),
    ("tests/spark/test_notebook.py", JAVA),
    ("tests/spark/test_subcommands.py::test_the_pipeline_proves_itself", JAVA),
    ("tests/spark/test_send.py::test_a_broker_that_confirms_nothing", OWNER),
    ("tests/spark/test_send.py::test_a_broker_that_is_killed", OWNER),
    ("tests/spark/test_send.py", FILE),
    ("tests/spark/", SPARK),
    # The first on its broker, which it measures.
    ("tests/broker/test_monitoring.py", OWNER),
    ("tests/broker/test_bench.py::test_a_section", OWNER),
    ("tests/faults/", OWNER),
    ("tests/acceptance/test_broker_restarts.py", OWNER),
    ("tests/acceptance/test_production.py", OWNER),
    ("tests/broker/test_tls.py", OWNER),
    ("tests/broker/test_schedules.py::test_workers_are_killed", OWNER),
    ("tests/broker/test_web_browser.py", OWNER),
    ("tests/broker/test_waiting.py::test_any_node_of_a_cluster", OWNER),
    ("tests/broker/test_waiting.py::test_what_moves_meanwhile", OWNER),
    ("tests/broker/test_waiting.py::test_a_reading_that_has_its_task", OWNER),
    ("tests/broker/test_cli.py::test_what_a_node_that_is_down", OWNER),
    ("tests/broker/test_move.py::test_a_broker_that_confirms_nothing", OWNER),
    ("tests/broker/test_move.py::test_what_is_parked_again_stops_no_question", OWNER),
    ("tests/broker/test_cancel.py::test_status_is_shown_in_an_alarm", OWNER),
    ("tests/broker/test_cancel.py::test_a_cancellation_that_a_broker_in_an_alarm", OWNER),
    ("tests/broker/test_delivery.py::test_in_an_alarm_a_publish", OWNER),
    ("tests/broker/test_delivery.py::test_a_publish_waits_for_what_the_delay", OWNER),
    ("tests/broker/test_amendments.py::test_what_comes_without_acks_is_not_lost", OWNER),
    ("tests/broker/test_amendments.py::test_what_is_postponed_is_not_early_while", OWNER),
    ("tests/broker/test_amendments.py::test_where_nothing_can_be_held_while", OWNER),
    ("tests/broker/test_amendments.py::test_consumers_go_on_where_a_broker_has_lost", OWNER),
    ("tests/broker/test_plugin_drop_in.py::test_a_delay_survives_a_restart", OWNER),
    ("tests/broker/test_journal.py::test_a_consumer_with_a_journal_goes_on", OWNER),
    ("tests/broker/test_journal.py::test_a_program_that_publishes_hides", OWNER),
    ("tests/broker/test_journal.py::test_the_limit_of_a_publish_counts", OWNER),
    ("tests/broker/test_journal.py::test_of_the_tasks_that_end_in_an_alarm", OWNER),
    ("tests/broker/test_batch.py::test_a_lost_connection_tells", OWNER),
    ("tests/broker/test_batch.py::test_a_broker_that_does_not_answer", OWNER),
    ("tests/broker/test_batch.py::test_of_messages_sent_at_once", OWNER),
    ("tests/broker/test_admin.py::test_messages_are_counted_as_they_are_now", OWNER),
    *(
        (f"tests/conformance/test_conformance.py::test_it_holds[broker default {name}: a re", OWNER)
        for name in ("quorum", "classic")
    ),
    ("tests/acceptance/", FILE),
    ("tests/broker/test_docs.py", EACH),
    ("tests/broker/test_admin.py", EACH),
    ("tests/broker/test_amendments.py", EACH),
    ("tests/broker/test_batch.py", EACH),
    ("tests/broker/test_cancel.py", EACH),
    ("tests/broker/test_cli.py", EACH),
    ("tests/broker/test_move.py", EACH),
    ("tests/broker/test_permissions.py", EACH),
    ("tests/broker/test_waiting.py", EACH),
    ("tests/conformance/", EACH),
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
