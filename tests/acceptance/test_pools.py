"""Delays and amendments hold in every pool; a crowd that waits hinders no remote control."""

from __future__ import annotations

import time

import pytest

from kombu_binary_delay import cancel, replace, reschedule
from tests.acceptance.journal import LATE, wait_until
from tests.acceptance.local_system import LocalSystem
from tests.acceptance.revoked import assert_revoked

CROWD = 2000


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_delays_and_amendments_hold_in_every_pool(new_system, pool: str):
    # given: what is amended before any worker runs
    system: LocalSystem = new_system("careful")
    revoked, cancelled, old, postponed = (system.send("note", countdown=1) for _ in range(4))
    revoked.revoke()
    cancel(cancelled)
    start = time.time()
    reschedule(postponed, countdown=4)
    replaced = replace(system.task("retry", 1, 0.5), old.id)
    worker = system.worker(f"--pool={pool}")
    # when
    later = system.send_note(countdown=3600)
    tasks = [system.send_note(countdown=0.5 + n / 4) for n in range(4)]
    retried = system.send("retry", 2, 0.5, countdown=0.5).id
    now = system.send_note()
    # then
    system.journal.wait_for(now, *tasks)
    system.journal.wait_for(retried, times=3)
    system.journal.assert_on_time([*tasks, retried])
    system.journal.wait_for(replaced.id, times=2)
    assert_revoked(system, [revoked, cancelled], worker.log)
    (run,) = system.journal.wait_for(postponed.id)
    assert run.at >= start + 4
    # And what is revoked while it runs.
    with system.held(worker.name):
        late = system.send("note", countdown=0.5)
        late.revoke()
    assert_revoked(system, [late], worker.log)
    assert not system.journal.received(later)
    system.wait_for_waiting(1)
    worker.end_if_it_may_not_stop()


def test_remote_control_works_while_thousands_wait(new_system):
    # given
    system: LocalSystem = new_system()
    worker = system.worker("--pool=threads")
    with system.app.producer_pool.acquire() as producer:
        for _ in range(CROWD):
            system.send("note", countdown=3600, producer=producer)
    # when
    control, me = system.app.control, [worker.name]
    assert control.ping(destination=me, timeout=LATE) == [{worker.name: {"ok": "pong"}}]
    inspect = control.inspect(me, timeout=LATE)
    assert inspect.scheduled() == {worker.name: []}
    assert inspect.reserved() == {worker.name: []}
    assert control.rate_limit("note", "100/s", destination=me, reply=True, timeout=LATE)
    with system.held(worker.name):
        revoked, other = (system.send("note", countdown=0.5) for _ in range(2))
        assert control.revoke(revoked.id, destination=me, reply=True, timeout=LATE)
        assert inspect.revoked() == {worker.name: [revoked.id]}
    # then
    system.journal.wait_for(other.id)
    wait_until(lambda: system.journal.revoked(revoked.id), "the discarding")
    assert not system.journal.ran(revoked.id)
    system.wait_for_waiting(CROWD)
