"""Of all tasks that wait with the same key, only the latest runs."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
from celery import chord
from celery.exceptions import TaskRevokedError

from kombu_binary_delay import cancel, replace
from tests.acceptance.journal import LATE, Entry
from tests.acceptance.local_system import LocalSystem
from tests.acceptance.revoked import skip_without_streams


@pytest.fixture(scope="module")
def system(broker, new_system) -> LocalSystem:
    skip_without_streams(broker)
    system: LocalSystem = new_system("careful")
    return system


@pytest.fixture(scope="module", autouse=True)
def _worker(system: LocalSystem) -> None:
    system.worker("--pool=threads", "--concurrency=4")


def keyed(key: str, longest_wait: int | None = None) -> dict[str, Any]:
    headers: dict[str, Any] = {"x-delay-key": key}
    if longest_wait is not None:
        headers["x-delay-key-max-wait"] = longest_wait
    return {"headers": headers}


def runs_of(system: LocalSystem, ids: list[str]) -> list[Entry]:
    return [run for run in system.journal.ran() if run.id in ids]


def test_twenty_with_one_key_within_five_seconds_run_once_five_seconds_after_the_last(
    system: LocalSystem,
):
    # when
    results = []
    for number in range(20):
        results.append(system.send("note", number, countdown=5, **keyed("doc")))
        time.sleep(0.23)
    last, ids = time.time() - 0.23, [each.id for each in results]
    # then
    (run,) = system.journal.wait_for(ids[-1])
    assert last + 4.9 <= run.at < last + 5 + LATE
    time.sleep(0.5)
    assert runs_of(system, ids) == [run]
    assert run.args == [19]
    for each in results[:-1]:
        with pytest.raises(TaskRevokedError):
            each.get(timeout=LATE)


def test_a_steady_stream_of_events_starves_nobody_with_a_longest_wait(system: LocalSystem):
    """One each 0.3 s for 6 s, each to wait for 1 s, and none to be put off by more than 2 s."""
    start, ids = time.time(), []
    while time.time() < start + 6:
        ids.append(system.send_note(countdown=1, **keyed("steady", 2000)))
        time.sleep(0.3)
    system.journal.wait_for(ids[-1])
    times = [start, *(run.at for run in runs_of(system, ids))]
    assert 3 <= len(times) - 1 <= 6
    assert all(later - sooner < 3 for sooner, later in pairwise(times))


def test_the_retries_of_the_latest_run_and_those_of_what_it_superseded_do_not(
    system: LocalSystem,
):
    first = system.send("retry", 9, 3, countdown=0.5, **keyed("retried"))
    system.journal.wait_for(first.id)
    last = system.send("stumble", 2, countdown=1, **keyed("retried"))
    assert last.get(timeout=LATE) == 2
    assert [run.retries for run in system.journal.ran(last.id)] == [0, 1, 2]
    with pytest.raises(TaskRevokedError):
        first.get(timeout=LATE)
    assert len(system.journal.ran(first.id)) == 1


def test_those_with_one_key_may_have_one_id_too(system: LocalSystem):
    for number in range(3):
        system.send("note", number, countdown=1, task_id="reindex", **keyed("reindexed"))
    system.journal.wait_for("reindex")
    time.sleep(0.5)
    assert [run.args for run in system.journal.ran("reindex")] == [[2]]
    # And another time.
    system.send("note", "again", countdown=0.5, task_id="reindex", **keyed("reindexed"))
    system.journal.wait_for("reindex", times=2)


def test_a_task_with_a_key_is_cancelled_and_replaced_by_its_id_and_is_no_task_with_its_key_as_id(
    system: LocalSystem,
):
    replaced, cancelled = (system.send("note", countdown=1, **keyed(each)) for each in "ab")
    system.send("note", "has no key", countdown=1, task_id="a")
    replace(system.task("note", "new"), replaced.id, countdown=1.5)
    cancelled.revoke()
    system.journal.wait_for(replaced.id, "a")
    with pytest.raises(TaskRevokedError):
        cancelled.get(timeout=LATE)
    assert [run.args for run in system.journal.ran(replaced.id)] == [["new"]]


def test_chords_and_links_of_tasks_with_keys_work_as_of_others(system: LocalSystem):
    note, add_up = system.app.tasks["note"], system.app.tasks["add_up"]
    old, new = (
        note.apply_async((number,), countdown=1, link=note.si(f"after {number}"), **keyed("linked"))
        for number in range(2)
    )
    header = [note.s(each).set(countdown=1, **keyed(f"part {each}")) for each in range(3)]
    total = chord(header)(add_up.s())
    total_later = chord([note.s(4), note.s(5)])(add_up.s().set(countdown=1, **keyed("total")))
    assert total.get(timeout=LATE) == 3
    assert total_later.get(timeout=LATE) == 9
    assert new.get(timeout=LATE) == 1
    (after,) = new.children
    assert after.get(timeout=LATE) == "after 1"
    with pytest.raises(TaskRevokedError):
        old.get(timeout=LATE)
    assert not old.children


def test_one_that_goes_at_once_supersedes_those_that_wait(system: LocalSystem):
    waits = system.send("note", countdown=1, **keyed("at once"))
    now = system.send("note", "now", **keyed("at once"))
    assert now.get(timeout=LATE) == "now"
    with pytest.raises(TaskRevokedError):
        waits.get(timeout=LATE)


def test_a_worker_that_starts_late_runs_the_latest_only(new_system):
    system: LocalSystem = new_system()
    ids = [system.send_note(number, countdown=2, **keyed("doc")) for number in range(5)]
    cancelled = system.send("note", countdown=2, **keyed("cancelled"))
    with system.app.connection_for_write() as connection:
        cancel("cancelled", connection=connection)
        before = system.send_note(countdown=2, **keyed("cancelled, and sent again"))
        cancel("cancelled, and sent again", connection=connection)
        again = system.send_note(countdown=2, **keyed("cancelled, and sent again"))
    system.worker("--pool=solo")
    system.journal.wait_for(ids[-1], again)
    other = system.send_note()
    system.journal.wait_for(other)
    assert [run.args for run in runs_of(system, ids)] == [[4]]
    assert not runs_of(system, [cancelled.id, before])
    assert cancelled.state == "REVOKED"
