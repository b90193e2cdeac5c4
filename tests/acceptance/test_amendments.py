"""What waits for a real worker is cancelled, postponed and replaced."""

from __future__ import annotations

import time
import uuid
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from celery import chain, current_app, group
from celery.exceptions import TaskRevokedError
from kombu import Connection

from kombu_binary_delay import AmendmentError, cancel, replace, reschedule
from tests.acceptance.journal import LATE, wait_until
from tests.acceptance.local_system import LocalSystem
from tests.acceptance.revoked import skip_without_streams
from tests.acceptance.worker import Worker

if TYPE_CHECKING:
    from celery.result import AsyncResult

WAIT = 2


@pytest.fixture(scope="module")
def system(broker, new_system) -> LocalSystem:
    skip_without_streams(broker)
    system: LocalSystem = new_system("fan out")
    return system


@pytest.fixture(scope="module", autouse=True)
def worker(system: LocalSystem) -> Worker:
    return system.worker("--pool=threads", "--concurrency=4")


def soon(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


def arguments_of_runs(system: LocalSystem, task_id: str) -> list[list[object]]:
    return [run.args for run in system.journal.ran(task_id)]


# -- cancel ----------------------------------------------------------------------------------------


def test_what_was_cancelled_is_discarded_as_a_revoked_task(system: LocalSystem):
    one, of_two, timed, by_id, other = (system.send("note", countdown=WAIT) for _ in range(5))
    grouped = group(
        system.task("note", each).set(countdown=WAIT) for each in range(2)
    ).apply_async()
    # when
    cancel(one)
    with system.app.connection_for_write() as connection:
        cancel([of_two, by_id.id, str(uuid.uuid4())], connection=connection)
    cancel(timed, eta=soon(WAIT))
    cancel(grouped)
    # then
    for result in (one, of_two, by_id, timed, *grouped.results):
        with pytest.raises(TaskRevokedError):
            result.get(timeout=WAIT + LATE)
        assert result.state == "REVOKED"
        assert not system.journal.ran(result.id)
        wait_until(partial(system.journal.revoked, result.id), "the signal")
    system.journal.wait_for(other.id)


# -- reschedule ------------------------------------------------------------------------------------


def test_a_rescheduled_task_arrives_once_at_its_new_time_and_retries_from_there(
    system: LocalSystem,
):
    # given
    start = time.time()
    result = system.send("retry", 2, 0.5, countdown=1)
    # when
    reschedule(result, countdown=3)
    # then
    runs = system.journal.wait_for(result.id, times=3)
    assert [run.retries for run in runs] == [0, 1, 2]
    assert runs[0].due
    assert start + 3 <= runs[0].due < start + 4
    system.journal.assert_on_time([result.id])
    assert {(run.exchange, run.routing_key) for run in runs} == {("", "celery")}
    assert result.get(timeout=LATE) == 2


def test_a_task_that_is_postponed_twice_goes_by_the_last_time(system: LocalSystem):
    further, nearer = (system.send("note", countdown=1) for _ in range(2))
    start = time.time()
    reschedule(further, countdown=2)
    reschedule(further, eta=soon(3))
    reschedule(nearer, countdown=60)
    reschedule(nearer, countdown=2)
    (late,), (early,) = (system.journal.wait_for(each.id) for each in (further, nearer))
    assert late.at >= start + 3
    assert start + 2 <= early.at < start + 2 + LATE


def test_each_copy_of_a_task_in_several_queues_is_postponed_and_runs_once(system: LocalSystem):
    start = time.time()
    twins = [
        system.send("note", countdown=1, exchange=exchange, routing_key=key)
        for exchange, key in (("media", "image.png"), ("everywhere", "ignored"))
    ]
    for each in twins:
        reschedule(each, countdown=3)
    runs = system.journal.wait_for(*(each.id for each in twins), times=2)
    time.sleep(0.5)
    for each in twins:
        assert len(system.journal.ran(each.id)) == 2
    assert all(run.at >= start + 3 for run in runs)


def test_what_was_postponed_can_still_be_cancelled_and_replaced(system: LocalSystem):
    cancelled, replaced = (system.send("note", "old", countdown=1) for _ in range(2))
    reschedule(cancelled, countdown=3)
    reschedule(replaced, countdown=3)
    time.sleep(1.5)
    cancel(cancelled)
    replace(system.task("note", "new"), replaced.id, countdown=1)
    with pytest.raises(TaskRevokedError):
        cancelled.get(timeout=LATE)
    time.sleep(1)
    assert arguments_of_runs(system, replaced.id) == [["new"]]


# -- replace ---------------------------------------------------------------------------------------


def test_of_a_task_and_what_replaces_it_only_the_latter_runs(system: LocalSystem):
    """Later, earlier, at once, twice, and with what its signature says besides."""
    new = system.task("note", "new")
    results: dict[str, AsyncResult] = {}
    for name, old, options in (
        ("later", 1, {"countdown": 2}),
        ("earlier", 3, {"countdown": 1}),
        ("by its time", 1, {"eta": soon(2)}),
        ("at once", 2, {}),
    ):
        results[name] = system.send("note", "old", countdown=old)
        replace(new, results[name].id, **options)
    twice = results["twice"] = system.send("note", "old", countdown=1)
    replace(system.task("note", "newer"), twice.id, countdown=1)
    replace(new.set(headers={"mine": "kept"}, countdown=2), twice.id)
    # then
    time.sleep(3.5)
    for name, result in results.items():
        assert arguments_of_runs(system, result.id) == [["new"]], name
        assert result.state == "SUCCESS", name
        assert not system.journal.revoked(result.id), name
    assert "mine" in system.journal.received(twice.id)[0].header_names


def test_what_replaces_a_task_can_retry_as_any(system: LocalSystem):
    asked = system.send("retry", 9, 1, countdown=2)
    automatic = system.send("stumble", 9, countdown=2)
    replace(system.task("retry", 2, 0.5), asked.id, countdown=1)
    replace(system.task("stumble", 2), automatic.id, countdown=1)
    for result in (asked, automatic):
        assert result.get(timeout=LATE) == 2
        runs = system.journal.ran(result.id)
        assert [run.retries for run in runs] == [0, 1, 2]


@pytest.mark.parametrize("how", ["revoke", "cancel"])
@pytest.mark.parametrize("countdown", [None, 2], ids=["at once", "with a countdown"])
def test_what_replaces_a_cancelled_task_runs(
    system: LocalSystem, worker: Worker, how: str, countdown: float | None
):
    result = system.send("note", "old", countdown=1)
    if how == "cancel":
        cancel(result)
    else:
        result.revoke()
        wait_until(lambda: result.id in worker.log(), "the broadcast")
    # when
    replace(system.task("note", "new"), result.id, countdown=countdown)
    # then
    system.journal.wait_for(result.id)
    time.sleep(1)
    assert arguments_of_runs(system, result.id) == [["new"]]
    assert result.get(timeout=LATE) == "new"


def test_what_replaces_a_task_can_be_cancelled_as_any(system: LocalSystem):
    results = [system.send("note", "old", countdown=1) for _ in range(3)]
    for result in results:
        replace(system.task("note", "new"), result.id, countdown=WAIT)
    results[0].revoke()
    cancel(results[1])
    # and one that was cancelled, replaced, and cancelled again
    results[2].revoke()
    replace(system.task("note", "newer"), results[2].id, countdown=WAIT)
    results[2].revoke()
    time.sleep(WAIT + 1)
    assert not [run for result in results for run in system.journal.ran(result.id)]


@pytest.mark.usefixtures("worker")
def test_what_was_amended_stays_so_for_a_worker_that_starts_later(new_system):
    # given
    system: LocalSystem = new_system()
    names = ("cancelled", "replaced", "rescheduled", "revived", "other")
    sent = {name: system.send("note", "old", countdown=3) for name in names}
    start = time.time()
    # when
    cancel(sent["cancelled"])
    replace(system.task("note", "new"), sent["replaced"].id, countdown=3)
    reschedule(sent["rescheduled"], countdown=6)
    sent["revived"].revoke()
    replace(system.task("note", "new"), sent["revived"].id, countdown=3)
    system.worker("--pool=solo")
    # then
    runs = system.journal.wait_for(*(sent[name].id for name in names[1:]))
    assert len(runs) == 4
    assert {name: arguments_of_runs(system, sent[name].id) for name in names} == {
        "cancelled": [],
        "replaced": [["new"]],
        "rescheduled": [["old"]],
        "revived": [["new"]],
        "other": [["old"]],
    }
    assert system.journal.ran(sent["rescheduled"].id)[0].at >= start + 6


# -- bad input -------------------------------------------------------------------------------------

LONG = "a" * 256
NONSENSE: Any = object()


def with_plain_connection(system: LocalSystem) -> None:
    with Connection(system.vhost.url) as connection:
        cancel("a", connection=connection)


@pytest.fixture
def _current(system: LocalSystem):
    before = current_app._get_current_object()  # noqa: SLF001
    system.app.set_current()
    yield
    before.set_current()


@pytest.mark.usefixtures("_current")
@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda s: cancel(None), "non-empty string, got None"),
        (lambda s: cancel(7), "non-empty string, got 7"),
        (lambda s: cancel(""), "non-empty string, got ''"),
        (lambda s: cancel(b"id"), "non-empty string, got b'id'"),
        (lambda s: cancel({"a": 1}), "non-empty string, got {'a': 1}"),
        (lambda s: cancel([]), "got no task; give at least one id"),
        (lambda s: cancel(["a", None]), "non-empty string, got None"),
        (lambda s: cancel(LONG), "at most 255 bytes, got 256: 'aaa"),
        (lambda s: cancel("\ud800"), r"UTF-8 can encode, got '\\ud800'"),
        (lambda s: cancel("a", eta=soon(-1)), "has passed; give a time in the future"),
        (lambda s: cancel("a", eta=soon(1).replace(tzinfo=None)), "datetime with a time zone"),
        (lambda s: cancel("a", eta=NONSENSE), "datetime with a time zone, got <object"),
        (lambda s: cancel("a", connection="amqp://"), "kombu.Connection, got 'amqp://'"),
        (with_plain_connection, "connection without the transport kombu_binary_delay:Transport"),
        (
            lambda s: reschedule("a"),
            "exactly one of eta and countdown, got eta None",
        ),
        (
            lambda s: reschedule("a", eta=soon(1), countdown=1),
            "exactly one of eta and",
        ),
        (lambda s: reschedule([], countdown=1), "got no task; give at least one id"),
        (lambda s: reschedule("a", countdown=NONSENSE), "a number of seconds, got <object"),
        (lambda s: reschedule("a", countdown=True), "a number of seconds, got True"),
        (lambda s: reschedule("a", countdown=float("nan")), "a number of seconds, got nan"),
        (lambda s: reschedule("a", countdown=-1), "has passed"),
        (lambda s: replace(s.task("note"), ""), "non-empty string, got ''"),
        (lambda s: replace("note", "a"), "signature of one task, got 'note'; use task"),
        (
            lambda s: replace(group(s.task("note"), s.task("note")), "a"),
            "signature of one task, got group",
        ),
        (
            lambda s: replace(chain(s.task("note"), s.task("note")), "a"),
            "signature of one task",
        ),
        (lambda s: replace(s.task("note"), "a", headers=5), "headers must be a mapping, got 5"),
        (
            lambda s: replace(s.task("note"), "a", headers={"x-delay-key-max-wait": 5}),
            "x-delay-key-max-wait needs x-delay-key, which this message does not have",
        ),
        *[
            (lambda s, given=given: s.send("note", countdown=1, headers=given), complaint)
            for given, complaint in [
                ({"x-delay-key": None}, "x-delay-key must be a non-empty string, got None"),
                ({"x-delay-key": 7}, "x-delay-key must be a non-empty string, got 7"),
                ({"x-delay-key": LONG}, "x-delay-key must have at most 255 bytes, got 256"),
                (
                    {"x-delay-key": "k", "x-delay-key-max-wait": "5"},
                    "milliseconds above 0, got '5'",
                ),
                ({"x-delay-key": "k", "x-delay-key-max-wait": 0}, "milliseconds above 0, got 0"),
            ]
        ],
        (
            lambda s: s.send("note", countdown=50_000, headers={"x-delay-key": "k"}),
            "at most 43200 s, got 50000 s; give it an id",
        ),
    ],
)
def test_bad_input_is_refused_with_a_clear_error_and_nothing_half_done(
    system: LocalSystem, call: Any, complaint: str
):
    waiting, exchanges = system.waiting(), system.exchanges()
    with pytest.raises(AmendmentError, match=complaint):
        call(system)
    assert system.waiting() == waiting
    assert system.exchanges() == exchanges
