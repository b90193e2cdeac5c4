"""Of all tasks that wait with the same key, only the latest runs."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from celery import chord
from celery.exceptions import TaskRevokedError

from kombu_binary_delay import cancel, replace
from tests.acceptance.journal import LATE, Entry, wait_until
from tests.acceptance.local_system import LocalSystem
from tests.acceptance.worker import Worker
from tests.waits import PATIENCE


@pytest.fixture(scope="module")
def system(new_system) -> LocalSystem:
    system: LocalSystem = new_system("careful")
    return system


@pytest.fixture(scope="module", autouse=True)
def worker(system: LocalSystem) -> Worker:
    return system.worker("--pool=threads", "--concurrency=4")


def keyed(key: str, longest_wait: int | None = None) -> dict[str, Any]:
    headers: dict[str, Any] = {"x-delay-key": key}
    if longest_wait is not None:
        headers["x-delay-key-max-wait"] = longest_wait
    return {"headers": headers}


def runs_of(system: LocalSystem, ids: list[str]) -> list[Entry]:
    return [run for run in system.journal.ran() if run.id in ids]


def test_of_twenty_with_one_key_the_last_runs_at_its_time_and_no_other(
    system: LocalSystem, worker: Worker
):
    with system.held(worker.name):
        # when
        results = [system.send("note", number, countdown=2, **keyed("doc")) for number in range(19)]
        last = time.time()
        results.append(system.send("note", 19, countdown=2, **keyed("doc")))
    # then
    ids = [result.id for result in results]
    (run,) = system.journal.wait_for(ids[-1])
    assert last + 2 <= run.at < last + 2 + LATE
    for result in results[:-1]:
        with pytest.raises(TaskRevokedError):
            result.get(timeout=LATE)
    assert runs_of(system, ids) == [run]
    assert run.args == [19]


def any_is_put_off(sent: list[tuple[float, float]]) -> bool:
    """Return whether an event has come while the one before it waited for its second."""
    return any(after - before < 0.9 for (before, _), (_, after) in pairwise(sent))


def test_a_steady_stream_of_events_starves_nobody_with_a_longest_wait(
    system: LocalSystem, worker: Worker
):
    """One each 0.3 s, each to wait for 1 s, and none to be put off by more than 2 s."""
    sent, ids = list[tuple[float, float]](), list[str]()
    with system.held(worker.name):
        start = time.time()
        # All of it: where each takes long, they would be few, and none would be put off.
        while time.time() < start + 5 or len(ids) < 15 or not any_is_put_off(sent):
            assert time.time() < start + PATIENCE
            before = time.time()
            ids.append(system.send_note(countdown=1, **keyed("steady", 2000)))
            sent.append((before, time.time()))
            time.sleep(0.3)
    system.journal.wait_for(ids[-1])
    system.wait_until_idle()
    runs = runs_of(system, ids)
    # Each is followed by one that was due in time, as whole milliseconds tell.
    for before, after in sent:
        assert any(before + 1 <= (run.due or 0) + 0.002 <= after + 2.004 for run in runs)
    assert len(runs) < len(ids)


@pytest.mark.parametrize(
    "headers",
    [None, {"attempt": "next", "x-delay-key": "other"}],
    ids=["plain", "own headers"],
)
def test_the_retries_of_the_latest_run_and_those_of_what_it_superseded_do_not(
    system: LocalSystem, worker: Worker, tmp_path: Path, headers: dict[str, str] | None
):
    args = (str(tmp_path / "now"), 0.5, headers)
    first = system.send("retry_on", *args, countdown=0.5, **keyed("retried"))
    system.journal.wait_for(first.id)
    with system.held(worker.name):
        (tmp_path / "now").touch()
        wait_until(lambda: system.vhost.waiting("celery") == {"celery": 1}, "the retry")
        last = system.send("stumble", 2, countdown=0.5, **keyed("retried"))
    assert last.get(timeout=LATE) == 2
    assert [run.retries for run in system.journal.ran(last.id)] == [0, 1, 2]
    with pytest.raises(TaskRevokedError):
        first.get(timeout=LATE)
    assert len(system.journal.ran(first.id)) == 1


def test_those_with_one_key_may_have_one_id_too(system: LocalSystem, worker: Worker):
    with system.held(worker.name):
        for number in range(3):
            system.send("note", number, countdown=0.5, task_id="reindex", **keyed("reindexed"))
    system.journal.wait_for("reindex")
    system.wait_until_idle()
    assert [run.args for run in system.journal.ran("reindex")] == [[2]]
    # And another time.
    system.send("note", "again", countdown=0.5, task_id="reindex", **keyed("reindexed"))
    system.journal.wait_for("reindex", times=2)


def test_a_task_with_a_key_is_cancelled_and_replaced_by_its_id_and_is_no_task_with_its_key_as_id(
    system: LocalSystem, worker: Worker
):
    with system.held(worker.name):
        replaced, cancelled = (system.send("note", countdown=0.5, **keyed(key)) for key in "ab")
        system.send("note", "has no key", countdown=0.5, task_id="a")
        replace(system.task("note", "new"), replaced.id, countdown=1)
        cancelled.revoke()
    system.journal.wait_for(replaced.id, "a")
    with pytest.raises(TaskRevokedError):
        cancelled.get(timeout=LATE)
    assert [run.args for run in system.journal.ran(replaced.id)] == [["new"]]


def test_chords_and_links_of_tasks_with_keys_work_as_of_others(system: LocalSystem, worker: Worker):
    note, add_up = system.app.tasks["note"], system.app.tasks["add_up"]
    with system.held(worker.name):
        old, new = (
            note.apply_async(
                (number,), countdown=0.5, link=note.si(f"after {number}"), **keyed("linked")
            )
            for number in range(2)
        )
    header = [note.s(number).set(countdown=1, **keyed(f"part {number}")) for number in range(3)]
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


def test_what_polls_a_chord_has_not_the_key_of_its_body(system: LocalSystem, tmp_path: Path):
    signal = tmp_path / "go"
    body = system.task("note", "total").set(countdown=0.5, **keyed("sum"))
    total = chord([system.task("hold", str(signal))], app=system.app)(body)
    # when: another has the key meanwhile
    other = system.send("note", "other", countdown=0.5, **keyed("sum"))
    # then
    assert other.get(timeout=LATE) == "other"
    signal.touch()
    assert total.get(timeout=LATE) == "total"


def test_one_that_goes_at_once_supersedes_those_that_wait(system: LocalSystem, worker: Worker):
    with system.held(worker.name):
        waits = system.send("note", countdown=0.5, **keyed("at once"))
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
    with pytest.raises(TaskRevokedError):
        cancelled.get(timeout=LATE)
    assert [run.args for run in runs_of(system, ids)] == [[4]]
    assert not runs_of(system, [cancelled.id, before])
