"""What beat sends with a countdown waits in the broker."""

from __future__ import annotations

from tests.acceptance.journal import wait_until
from tests.acceptance.stage import Stage


def test_a_periodic_task_with_a_countdown_waits_for_it(new_stage):
    # given
    stage: Stage = new_stage("beat")
    stage.worker("--pool=solo")
    # when
    beat = stage.beat()
    # then
    wait_until(lambda: len(stage.journal.ran()) >= 2, "two runs of a periodic task")
    beat.stop()
    received = stage.journal.received()
    assert all(each.args == ["from beat"] for each in stage.journal.ran())
    assert all(each.due is not None for each in received)
    stage.journal.assert_on_time()
