"""What waits is amended in every pool of Celery's."""

from __future__ import annotations

import time

import pytest

from kombu_binary_delay import cancel, replace, reschedule
from tests.acceptance.local_system import LocalSystem
from tests.acceptance.revoked import assert_revoked


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_what_was_cancelled_before_it_started_runs_in_no_pool(new_system, pool: str):
    system: LocalSystem = new_system("careful")
    revoked, cancelled, old, other = (system.send("note", countdown=1) for _ in range(4))
    postponed = system.send("note", countdown=1)
    revoked.revoke()
    cancel(cancelled)
    start = time.time()
    reschedule(postponed, countdown=4)
    replaced = replace(system.task("retry", 1, 0.5), old.id)
    worker = system.worker(f"--pool={pool}")
    system.journal.wait_for(other.id)
    system.journal.wait_for(replaced.id, times=2)
    assert_revoked(system, [revoked, cancelled], worker.log)
    (run,) = system.journal.wait_for(postponed.id)
    assert run.at >= start + 4
    # And what is revoked while it runs.
    with system.held(worker.name):
        late = system.send("note", countdown=0.5)
        late.revoke()
    assert_revoked(system, [late], worker.log)
    worker.end_if_it_may_not_stop()
