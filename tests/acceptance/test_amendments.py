"""What waits for a real worker is cancelled, postponed and replaced."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from celery import group
from celery.exceptions import TaskRevokedError

from kombu_binary_delay import cancel, replace, reschedule
from tests.acceptance.journal import LATE, wait_until
from tests.acceptance.local_system import LocalSystem
from tests.acceptance.revoked import assert_revoked
from tests.acceptance.worker import Worker

if TYPE_CHECKING:
    from celery.result import AsyncResult

#: The countdown of what is amended while the worker is held, in seconds.
SHORT = 0.5
#: For how long to postpone what the worker is to delay again, in seconds: it does not where it
#: takes the task later than that. The second is for a machine that has stalled.
ROOMS = (3, 30)


@pytest.fixture(scope="module")
def system(new_system) -> LocalSystem:
    system: LocalSystem = new_system("fan out")
    return system


@pytest.fixture(scope="module", autouse=True)
def worker(system: LocalSystem) -> Worker:
    return system.worker("--pool=threads", "--concurrency=4")


def soon(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def arguments_of_runs(system: LocalSystem, task_id: str) -> list[list[object]]:
    return [run.args for run in system.journal.ran(task_id)]


# -- cancel ----------------------------------------------------------------------------------------


def test_what_was_cancelled_is_discarded_as_a_revoked_task(system: LocalSystem, worker: Worker):
    with system.held(worker.name):
        one, of_two, timed, by_id, other = (system.send("note", countdown=SHORT) for _ in range(5))
        grouped = group(
            system.task("note", number).set(countdown=SHORT) for number in range(2)
        ).apply_async()
        # when
        cancel(one)
        with system.app.connection_for_write() as connection:
            cancel([of_two, by_id.id, str(uuid.uuid4())], connection=connection)
        cancel(timed, eta=soon(60))
        cancel(grouped)
    # then
    assert_revoked(system, [one, of_two, by_id, timed, *grouped.results], worker.log)
    system.journal.wait_for(other.id)


# -- reschedule ------------------------------------------------------------------------------------


def test_a_rescheduled_task_arrives_once_at_its_new_time_and_retries_from_there(
    system: LocalSystem, worker: Worker
):
    for room in ROOMS:
        # given
        with system.held(worker.name):
            result = system.send("retry", 2, 0.5, countdown=SHORT)
            # when
            before = time.time() - 0.001  # a new time is in whole milliseconds
            reschedule(result, countdown=room)
            after = time.time() + 0.001
        # then
        runs = system.journal.wait_for(result.id, times=3)
        assert [run.retries for run in runs] == [0, 1, 2]
        assert runs[0].at >= before + room
        due = runs[0].due or 0
        if due >= before + room:
            break
    assert before + room <= due <= after + room
    system.journal.assert_on_time([result.id])
    assert {(run.exchange, run.routing_key) for run in runs} == {("", "celery")}
    assert result.get(timeout=LATE) == 2


def test_a_task_that_is_postponed_twice_goes_by_the_last_time(system: LocalSystem, worker: Worker):
    with system.held(worker.name):
        further, nearer = (system.send("note", countdown=SHORT) for _ in range(2))
        start = time.time()
        reschedule(further, countdown=1)
        reschedule(further, eta=soon(2))
        reschedule(nearer, countdown=3600)
        reschedule(nearer, countdown=1)
    (late,), (early,) = (system.journal.wait_for(result.id) for result in (further, nearer))
    assert late.at >= start + 2
    assert early.at >= start + 1


def test_what_expires_before_its_new_time_does_not_run(system: LocalSystem, worker: Worker):
    with system.held(worker.name):
        expired, kept = (
            system.send("note", countdown=0.5, expires=expires) for expires in (2, 600)
        )
        reschedule([expired, kept], countdown=4)
    system.journal.wait_for(kept.id)
    wait_until(lambda: system.journal.revoked(expired.id), "the signal")
    assert not system.journal.ran(expired.id)


def test_each_copy_of_a_task_in_several_queues_is_postponed_and_runs_once(
    system: LocalSystem, worker: Worker
):
    with system.held(worker.name):
        start = time.time()
        twins = [
            system.send("note", countdown=SHORT, exchange=exchange, routing_key=key)
            for exchange, key in (("media", "image.png"), ("everywhere", "ignored"))
        ]
        for twin in twins:
            reschedule(twin, countdown=2)
    runs = system.journal.wait_for(*(twin.id for twin in twins), times=2)
    system.wait_until_idle()
    for twin in twins:
        assert len(system.journal.ran(twin.id)) == 2
    assert all(run.at >= start + 2 for run in runs)


def test_what_was_postponed_can_still_be_cancelled_and_replaced(
    system: LocalSystem, worker: Worker
):
    for room in ROOMS:
        # given: the worker has delayed both again, and they wait for their new time
        system.hold(worker.name)
        cancelled, replaced = both = [system.send("note", "old", countdown=SHORT) for _ in range(2)]
        wait_until(lambda: system.vhost.waiting("celery") == {"celery": 2}, "both in their queue")
        reschedule([*both], countdown=room)
        system.release(worker.name)
        wait_until(
            lambda: (
                system.waiting() == 2 or any(system.journal.received(result.id) for result in both)  # noqa: B023
            ),
            "both on the ladder again",
        )
        system.hold(worker.name)
        is_in_time = not any(system.journal.received(result.id) for result in both)
        # when
        cancel(cancelled)
        replace(system.task("note", "new"), replaced.id, countdown=SHORT)
        system.release(worker.name)
        if is_in_time:
            break
        # What this try has sent is not to be in the queue when the next one counts.
        system.wait_until_idle()
    # then
    assert is_in_time
    with pytest.raises(TaskRevokedError):
        cancelled.get(timeout=LATE)
    system.journal.wait_for(replaced.id)
    system.wait_until_idle()
    assert arguments_of_runs(system, replaced.id) == [["new"]]


# -- replace ---------------------------------------------------------------------------------------


def test_of_a_task_and_what_replaces_it_only_the_latter_runs(system: LocalSystem, worker: Worker):
    """Later, earlier, at once, twice, and with what its signature says besides."""
    new = system.task("note", "new")
    results: dict[str, AsyncResult] = {}
    with system.held(worker.name):
        for name, old, options in (
            ("later", 0.5, {"countdown": 1}),
            ("earlier", 2, {"countdown": 1}),
            ("by its time", 0.5, {"eta": soon(1)}),
            ("at once", 1, {}),
        ):
            results[name] = system.send("note", "old", countdown=old)
            replace(new, results[name].id, **options)
        twice = results["twice"] = system.send("note", "old", countdown=SHORT)
        replace(system.task("note", "newer"), twice.id, countdown=SHORT)
        replace(new.set(headers={"mine": "kept"}, countdown=1), twice.id)
    # then
    system.journal.wait_for(*(result.id for result in results.values()))
    system.wait_until_idle()
    for name, result in results.items():
        assert result.get(timeout=LATE) == "new", name
        assert arguments_of_runs(system, result.id) == [["new"]], name
        assert not system.journal.revoked(result.id), name
    assert "mine" in system.journal.received(twice.id)[0].header_names


@pytest.mark.parametrize(
    "headers",
    # Tools that trace tasks nest the headers of a retry; some copy the caller's there.
    [{}, {"headers": {"trace": "1", "x-delay": 3_600_000}}],
    ids=["plain", "with nested headers"],
)
def test_what_replaces_a_task_can_retry_as_any(
    system: LocalSystem, worker: Worker, headers: dict[str, object]
):
    with system.held(worker.name):
        results = [system.send("note", "old", countdown=1) for _ in range(3)]
        for result, new in zip(
            results,
            (
                system.task("retry", 2, 0.5),
                system.task("retry", 2, 0.5, {"attempt": "next"}),
                system.task("stumble", 2),
            ),
            strict=True,
        ):
            replace(new, result.id, countdown=SHORT, headers=headers)
    for result in results:
        assert result.get(timeout=LATE) == 2
        runs = system.journal.ran(result.id)
        assert [run.retries for run in runs] == [0, 1, 2]


@pytest.mark.parametrize("how", ["revoke", "cancel"])
@pytest.mark.parametrize("countdown", [None, 1], ids=["at once", "with a countdown"])
def test_what_replaces_a_cancelled_task_runs(
    system: LocalSystem, worker: Worker, how: str, countdown: float | None
):
    with system.held(worker.name):
        result = system.send("note", "old", countdown=SHORT)
        if how == "cancel":
            cancel(result)
        else:
            result.revoke()
            system.hears_of(worker.name, result.id)
        # when
        replace(system.task("note", "new"), result.id, countdown=countdown)
    # then
    system.journal.wait_for(result.id)
    system.wait_until_idle()
    assert arguments_of_runs(system, result.id) == [["new"]]
    assert result.get(timeout=LATE) == "new"


def test_what_replaces_a_task_can_be_cancelled_as_any(system: LocalSystem, worker: Worker):
    with system.held(worker.name):
        results = [system.send("note", "old", countdown=SHORT) for _ in range(3)]
        for result in results:
            replace(system.task("note", "new"), result.id, countdown=1)
        results[0].revoke()
        cancel(results[1])
        # and one that was cancelled, replaced, and cancelled again
        results[2].revoke()
        replace(system.task("note", "newer"), results[2].id, countdown=1)
        results[2].revoke()
    for result in results:
        wait_until(lambda: system.journal.revoked(result.id), "the discarding")  # noqa: B023
    system.wait_until_idle()
    assert not [run for result in results for run in system.journal.ran(result.id)]
