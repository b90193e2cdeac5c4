"""A Celery worker discards what was cancelled, whatever its own set of revoked ids keeps."""

from __future__ import annotations

import math
import threading
import time

import pytest
from celery.utils.collections import LimitedSet

from kombu_binary_delay.celery_side.tasks import discard

HOURS = 10_800


@pytest.fixture(params=["of this host", "of a host that is up for longer", "about to expire"])
def revoked(request) -> LimitedSet:
    """A set that is full, and that had the id before."""
    begin = {"of this host": 0, "about to expire": -HOURS}.get(request.param, math.pi * 1e7)
    ids = LimitedSet(maxlen=3, expires=HOURS)
    ids.add("task", now=time.monotonic() + begin + 0.2)
    ids.discard("task")
    for number in range(3):
        ids.add(f"other-{number}", now=time.monotonic() + begin + number + 1)
    return ids


def test_a_task_is_revoked_while_it_is_received_and_the_set_stays_as_it_is(revoked):
    before, seen = revoked.as_dict(), list[bool]()

    def receive() -> None:
        seen.append("task" in revoked)
        # Another greenlet hears that the same task is revoked, and others.
        for id_ in ("task", *map(str, range(5))):
            revoked.add(id_)
        seen.append("task" in revoked)
        revoked.discard("task")
        thread = threading.Thread(target=lambda: seen.append("task" in revoked))
        thread.start()
        thread.join()
        seen.append("task" in revoked)

    assert discard("task", lambda: seen.append("task" in revoked))
    assert revoked.as_dict() == before
    assert discard("task", receive)
    # In the other thread, the next task with the id may be on its way.
    assert seen == [True, True, True, False, True]
    assert "task" not in revoked


def test_a_failure_to_receive_a_task_revokes_no_other_and_no_question_is_told(revoked):
    with pytest.raises(ZeroDivisionError):
        discard("task", lambda: 1 // 0)
    assert "task" not in revoked
    assert not discard("task", lambda: "another" in revoked)
