"""Tasks of every kind are amended: with a priority, redelivered, retried."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
from celery.exceptions import TaskRevokedError

from kombu_binary_delay import cancel, reschedule
from tests.acceptance.journal import LATE, wait_until
from tests.acceptance.local_system import LocalSystem
from tests.acceptance.revoked import assert_revoked


@pytest.mark.parametrize("shape", ["priority", "quorum on a topic exchange"])
def test_tasks_of_every_kind_are_cancelled_postponed_and_superseded(new_system, shape: str):
    system: LocalSystem = new_system(shape)
    worker = system.worker("--pool=threads")
    options = {"priority": 3} if shape == "priority" else {}
    with system.held(worker.name):
        revoked, cancelled, other = (system.send("note", countdown=1, **options) for _ in range(3))
        postponed = system.send("retry", 1, 0.5, countdown=1, **options)
        keyed = [
            system.send("note", number, countdown=1, headers={"x-delay-key": "k"}, **options)
            for number in range(3)
        ]
        key = {"x-delay-key": "r"}
        retried = system.send("retry", 2, 0.5, countdown=1, headers=key, **options)
        # when
        start = time.time()
        revoked.revoke()
        cancel(cancelled)
        reschedule(postponed, countdown=4)
    # then
    system.journal.wait_for(other.id, keyed[2].id)
    system.journal.wait_for(retried.id, times=3)
    assert_revoked(system, [revoked, cancelled, *keyed[:2]], worker.log)
    runs = system.journal.wait_for(postponed.id, times=2)
    assert runs[0].at >= start + 4
    assert [run.retries for run in runs] == [0, 1]
    if shape == "priority":
        assert {run.priority for run in runs} == {3}


def test_a_task_that_was_revoked_while_it_ran_does_not_retry_or_run_again(new_system, tmp_path):
    system: LocalSystem = new_system("careful")
    first = system.worker("--pool=threads")
    held = system.send("hold", str(tmp_path / "never"), countdown=0.5)
    system.journal.wait_for(held.id)
    first.kill()
    # It is given to the next worker, unless it was revoked.
    second = system.worker("--pool=threads", "--concurrency=2")
    system.journal.wait_for(held.id, times=2)
    retried = system.send("retry_on", str(tmp_path / "now"), 0.5, countdown=0.5)
    system.journal.wait_for(retried.id)
    # Its retry waits in the queue.
    system.hold(second.name)
    (tmp_path / "now").touch()
    wait_until(lambda: system.vhost.waiting("celery") == {"celery": 1}, "the retry")
    second.kill()
    held.revoke()
    retried.revoke()
    third = system.worker("--pool=solo")
    for result in (held, retried):
        with pytest.raises(TaskRevokedError):
            result.get(timeout=LATE)
        wait_until(partial(system.journal.revoked, result.id), "the signal")
    assert len(system.journal.ran(held.id)) == 2
    assert len(system.journal.ran(retried.id)) == 1
    assert not third.complaints()


def test_a_task_that_is_terminated_while_it_runs_does_not_come_back(new_system, tmp_path):
    system: LocalSystem = new_system("careful")
    worker = system.worker("--pool=prefork")
    held = system.send("hold", str(tmp_path / "never"), countdown=0.5)
    system.journal.wait_for(held.id)
    system.app.control.terminate(held.id, signal="SIGKILL")
    with pytest.raises(TaskRevokedError):
        held.get(timeout=LATE)
    assert not Path(tmp_path / "never").exists()
    worker.kill()
    other = system.send_note()
    system.worker("--pool=solo")
    system.journal.wait_for(other)
    assert len(system.journal.ran(held.id)) == 1
