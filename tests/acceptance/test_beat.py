"""What beat sends with a countdown waits in the broker."""

from __future__ import annotations

from tests.acceptance.journal import wait_until
from tests.acceptance.local_system import LocalSystem


def test_a_periodic_task_with_a_countdown_waits_for_it(new_system):
    # given
    system: LocalSystem = new_system("beat")
    system.worker("--pool=solo")
    # when
    beat = system.beat()
    # then
    wait_until(lambda: len(system.journal.ran()) >= 2, "two runs of a periodic task")
    beat.stop()
    received = system.journal.received()
    assert all(task.args == ["from beat"] for task in system.journal.ran())
    assert all(task.due is not None for task in received)
    system.journal.assert_on_time()
