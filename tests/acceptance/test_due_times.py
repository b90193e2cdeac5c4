"""Every way by which Celery puts a task off: none early, none lost."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path

import pytest
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError

from tests.acceptance.journal import LATE, Entry, wait_until
from tests.acceptance.setup import Setup
from tests.acceptance.system import System
from tests.waits import PATIENCE

NEW_YORK_OR_SO = timezone(timedelta(hours=-5))


@pytest.fixture(scope="module")
def shape():
    return "stock"


@pytest.fixture(scope="module")
def worker_options():
    return ["--concurrency=2", "--without-mingle"]


def test_a_countdown_is_kept(system: System):
    # given
    start = time.time()
    # when
    task = system.send_note(countdown=1)
    # then
    (run,) = system.journal.wait_for(task)
    assert start + 1 <= run.at < start + 1 + LATE
    system.journal.assert_on_time([task])


def test_a_countdown_of_a_fraction_of_a_second_is_kept(system: System):
    # given
    start = time.time()
    # when
    half, third = system.send_note(countdown=0.5), system.send_note(countdown=1 / 3)
    # then
    (half_run,), (third_run,) = system.journal.wait_for(half), system.journal.wait_for(third)
    assert half_run.at >= start + 0.5
    assert third_run.at >= start + 1 / 3
    system.journal.assert_on_time([half, third])


@pytest.mark.parametrize("zone", [UTC, NEW_YORK_OR_SO], ids=str)
def test_an_eta_is_kept_whatever_its_timezone(system: System, zone: timezone):
    # given
    eta = datetime.now(zone) + timedelta(seconds=1)
    # when
    task = system.send_note(eta=eta)
    # then
    (run,) = system.journal.wait_for(task)
    assert eta.timestamp() <= run.at < eta.timestamp() + LATE
    system.journal.assert_on_time([task])


def test_a_naive_eta_is_read_as_utc(system: System):
    # given
    eta = datetime.now(UTC) + timedelta(seconds=1)
    # when
    task = system.send_note(eta=eta.replace(tzinfo=None))
    # then
    (run,) = system.journal.wait_for(task)
    assert eta.timestamp() <= run.at < eta.timestamp() + LATE
    system.journal.assert_on_time([task])


@pytest.mark.parametrize("countdown", [0, -5, None])
def test_what_is_due_already_runs_at_once(system: System, countdown: float | None):
    # when
    task = system.send_note(countdown=countdown)
    # then
    (run,) = system.journal.wait_for(task)
    assert (run.exchange, run.routing_key) == ("", "celery")


def test_tasks_run_at_their_times_whatever_was_sent_before_them(system: System):
    # given
    first = datetime.now(UTC) + timedelta(seconds=0.5)
    # when
    last = system.send_note(countdown=3600)
    tasks = [system.send_note(eta=first + timedelta(seconds=n / 2)) for n in (4, 2, 0, 3, 1)]
    # then
    system.journal.wait_for(*tasks)
    system.journal.assert_on_time(tasks)
    assert not system.journal.received(last)


def test_a_task_looks_as_if_it_had_never_been_delayed(system: System):
    # given
    prompt = system.send_note()
    # when
    delayed = system.send_note(countdown=0.5)
    # then
    prompt_run, delayed_run = system.journal.wait_for(prompt, delayed)
    assert (delayed_run.exchange, delayed_run.routing_key) == ("", "celery")
    assert delayed_run.priority == prompt_run.priority
    (prompt_receipt,) = system.journal.received(prompt)
    (delayed_receipt,) = system.journal.received(delayed)
    assert delayed_receipt.header_names == prompt_receipt.header_names
    assert delayed_receipt.expiration is None


def test_the_argument_and_the_result_of_a_delayed_task_arrive(system: System):
    # when
    result = system.send("note", {"größe": [1, 2]}, countdown=0.5)
    # then
    assert result.get(timeout=LATE) == {"größe": [1, 2]}


def test_a_task_may_delay_another(system: System):
    # given
    start = time.time()
    # when
    other = system.send("delegate", 0.75, countdown=0.5).get(timeout=LATE)
    # then
    (run,) = system.journal.wait_for(other)
    assert run.at >= start + 0.5 + 0.75
    system.journal.assert_on_time([other])


def test_a_retry_waits_for_its_countdown(system: System):
    # when
    result = system.send("retry", 3, 0.5)
    # then
    assert result.get(timeout=PATIENCE) == 3
    runs = system.journal.ran(result.id)
    assert [run.retries for run in runs] == [0, 1, 2, 3]
    assert all(later.at - run.at >= 0.5 for run, later in pairwise(runs))
    system.journal.assert_on_time([result.id])


def test_an_automatic_retry_waits_for_its_countdown(system: System):
    # when
    result = system.send("stumble", 2, countdown=0.5)
    # then
    assert result.get(timeout=PATIENCE) == 2
    runs = system.journal.ran(result.id)
    assert [run.retries for run in runs] == [0, 1, 2]
    assert all(later.at - run.at >= 0.5 for run, later in pairwise(runs))
    system.journal.assert_on_time([result.id])


def test_what_expires_after_it_is_due_runs(system: System):
    # when
    task = system.send_note(countdown=1, expires=600)
    # then
    system.journal.wait_for(task)
    system.journal.assert_on_time([task])
    (receipt,) = system.journal.received(task)
    assert receipt.expiration == "600000"


def test_what_expires_before_it_is_due_is_revoked_then_and_never_runs(system: System):
    # given
    start = time.time()
    # when
    result = system.send("note", countdown=1.5, expires=0.5)
    # then
    with pytest.raises(TaskRevokedError, match="expired"):
        result.get(timeout=PATIENCE)
    assert time.time() >= start + 1.5
    assert not system.journal.ran(result.id)


def test_a_task_revoked_before_it_is_due_never_runs(celery_setup: Setup):
    # given
    system, worker = celery_setup, celery_setup.worker.hostname()
    with system.held(worker):
        result = system.send("note", countdown=0.5)
        # when
        result.revoke()
        system.hears_of(worker, result.id)
    # then
    with pytest.raises(TaskRevokedError, match="revoked"):
        result.get(timeout=PATIENCE)
    assert not system.journal.ran(result.id)


def test_each_link_of_a_chain_waits_for_its_own_countdown(system: System):
    # given
    start = time.time()
    first = system.task("note", 1).set(countdown=0.5)
    second = system.task("note").set(countdown=0.75)
    # when
    result = chain(first, second, app=system.app).apply_async()
    # then
    assert result.get(timeout=PATIENCE) == 1
    (one,) = system.journal.ran(result.parent.id)
    (two,) = system.journal.ran(result.id)
    assert one.at >= start + 0.5
    assert two.at >= one.at + 0.75
    system.journal.assert_on_time([result.parent.id, result.id])


def test_a_group_waits_as_a_whole(system: System):
    # given
    start = time.time()
    # when
    result = group(system.task("note", n) for n in range(4)).apply_async(countdown=1)
    # then
    assert result.get(timeout=PATIENCE) == [0, 1, 2, 3]
    ids = [part.id for part in result]
    assert all(run.at >= start + 1 for run in system.journal.wait_for(*ids))
    system.journal.assert_on_time(ids)


def test_the_tasks_of_a_skewed_group_are_due_one_after_the_other(system: System):
    # given
    tasks = group(system.task("note", n) for n in range(4)).skew(start=0.5, stop=2.5, step=0.5)
    # when
    result = tasks.apply_async()
    # then
    ids = [part.id for part in result]
    system.journal.wait_for(*ids)
    due = [system.journal.received(id_)[0].due or 0 for id_ in ids]
    assert all(later - sooner > 0.499 for sooner, later in pairwise(due))
    system.journal.assert_on_time(ids)


def test_a_chord_whose_parts_all_wait_comes_to_its_end(system: System):
    # given
    start = time.time()
    header = [system.task("note", n).set(countdown=0.5 + n / 4) for n in range(3)]
    body = system.task("add_up").set(countdown=0.5)
    # when
    result = chord(header, app=system.app)(body)
    # then
    assert result.get(timeout=PATIENCE) == 0 + 1 + 2
    (run,) = system.journal.ran(result.id)
    assert run.at >= start + 1 + 0.5
    ids = [part.id for part in result.parent]
    system.journal.assert_on_time([result.id, *ids])


def test_celery_polls_a_chord_by_delayed_retries(system: System, tmp_path: Path):
    # given
    signal = tmp_path / "go"
    before = {task.id for task in system.journal.received()}

    def polls() -> list[Entry]:
        received = [task for task in system.journal.received() if task.id not in before]
        return [task for task in received if task.task == "celery.chord_unlock"]

    # when
    result = chord([system.task("hold", str(signal))], app=system.app)(system.task("note"))
    wait_until(lambda: len(polls()) >= 2, "a second poll")
    signal.touch()
    # then
    result.get(timeout=PATIENCE)
    assert [poll.retries for poll in polls()] == list(range(len(polls())))
    system.journal.assert_on_time({poll.id for poll in polls()})


def test_a_canvas_in_a_canvas_keeps_every_countdown(system: System):
    # given
    def note(value: int) -> object:
        return system.task("note", value).set(countdown=0.5)

    start = time.time()
    # when
    inner = group(chain(note(1), system.task("note", 2).set(countdown=0.25)), note(3))
    result = chain(
        note(0),
        chord(inner, system.task("add_up").set(countdown=0.5), app=system.app),
        system.task("note").set(countdown=0.5),
        app=system.app,
    ).apply_async(countdown=0.5)
    # then
    assert result.get(timeout=PATIENCE) is not None
    (last,) = system.journal.ran(result.id)
    assert last.at >= start + 0.5 + 0.5 + 0.5
    system.journal.assert_on_time({run.id for run in system.journal.ran() if run.at >= start})
