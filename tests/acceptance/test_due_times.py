"""Every way by which Celery puts a task off: none early, none lost, in the order of their times."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path

import pytest
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError

from tests.acceptance.journal import LATE, PATIENCE, Entry, wait_until
from tests.acceptance.scene import Scene
from tests.acceptance.stage import Stage

UTC = timezone.utc
NEW_YORK_OR_SO = timezone(timedelta(hours=-5))


@pytest.fixture(scope="module")
def worker_options():
    return ["--concurrency=2", "--without-mingle"]


def test_a_countdown_is_kept(stage: Scene):
    # given
    start = time.time()
    # when
    task = stage.send_note(countdown=1)
    # then
    (run,) = stage.journal.wait_for(task)
    assert start + 1 <= run.at < start + 1 + LATE
    stage.journal.assert_on_time([task])


def test_a_countdown_of_a_fraction_of_a_second_is_kept(stage: Scene):
    # given
    start = time.time()
    # when
    half, third = stage.send_note(countdown=0.5), stage.send_note(countdown=1 / 3)
    # then
    (half_run,), (third_run,) = stage.journal.wait_for(half), stage.journal.wait_for(third)
    assert half_run.at >= start + 0.5
    assert third_run.at >= start + 1 / 3
    stage.journal.assert_on_time([half, third])


@pytest.mark.parametrize("zone", [UTC, NEW_YORK_OR_SO], ids=str)
def test_an_eta_is_kept_whatever_its_timezone(stage: Scene, zone: timezone):
    # given
    eta = datetime.now(zone) + timedelta(seconds=1)
    # when
    task = stage.send_note(eta=eta)
    # then
    (run,) = stage.journal.wait_for(task)
    assert eta.timestamp() <= run.at < eta.timestamp() + LATE
    stage.journal.assert_on_time([task])


def test_a_naive_eta_is_read_as_utc(stage: Scene):
    # given
    eta = datetime.now(UTC) + timedelta(seconds=1)
    # when
    task = stage.send_note(eta=eta.replace(tzinfo=None))
    # then
    (run,) = stage.journal.wait_for(task)
    assert eta.timestamp() <= run.at < eta.timestamp() + LATE
    stage.journal.assert_on_time([task])


@pytest.mark.parametrize("countdown", [0, -5, None])
def test_what_is_due_already_runs_at_once(stage: Scene, countdown: float | None):
    # when
    task = stage.send_note(countdown=countdown)
    # then
    (run,) = stage.journal.wait_for(task)
    assert (run.exchange, run.routing_key) == ("", "celery")


def test_tasks_run_in_the_order_of_their_times_not_of_their_sending(stage: Scene):
    # given
    first = datetime.now(UTC) + timedelta(seconds=0.5)
    # when
    tasks = {n: stage.send_note(eta=first + timedelta(seconds=n / 2)) for n in (4, 2, 0, 3, 1)}
    # then
    stage.journal.wait_for(*tasks.values())
    received = [entry.id for entry in stage.journal.received() if entry.id in tasks.values()]
    assert received == [tasks[n] for n in sorted(tasks)]
    stage.journal.assert_on_time(tasks.values())


def test_a_task_looks_as_if_it_had_never_been_delayed(stage: Scene):
    # given
    prompt = stage.send_note()
    # when
    delayed = stage.send_note(countdown=0.5)
    # then
    prompt_run, delayed_run = stage.journal.wait_for(prompt, delayed)
    assert (delayed_run.exchange, delayed_run.routing_key) == ("", "celery")
    assert delayed_run.priority == prompt_run.priority
    (prompt_receipt,) = stage.journal.received(prompt)
    (delayed_receipt,) = stage.journal.received(delayed)
    assert delayed_receipt.header_names == prompt_receipt.header_names
    assert delayed_receipt.expiration is None


def test_the_argument_and_the_result_of_a_delayed_task_arrive(stage: Scene):
    # when
    result = stage.send("note", {"größe": [1, 2]}, countdown=0.5)
    # then
    assert result.get(timeout=LATE) == {"größe": [1, 2]}


def test_a_task_may_delay_another(stage: Scene):
    # given
    start = time.time()
    # when
    other = stage.send("delegate", 0.75, countdown=0.5).get(timeout=LATE)
    # then
    (run,) = stage.journal.wait_for(other)
    assert run.at >= start + 0.5 + 0.75
    stage.journal.assert_on_time([other])


def test_a_retry_waits_for_its_countdown(stage: Scene):
    # when
    result = stage.send("retry", 3, 0.5)
    # then
    assert result.get(timeout=PATIENCE) == 3
    runs = stage.journal.ran(result.id)
    assert [run.retries for run in runs] == [0, 1, 2, 3]
    assert all(later.at - run.at >= 0.5 for run, later in pairwise(runs))
    stage.journal.assert_on_time([result.id])


def test_an_automatic_retry_waits_for_its_countdown(stage: Scene):
    # when
    result = stage.send("stumble", 2, countdown=0.5)
    # then
    assert result.get(timeout=PATIENCE) == 2
    runs = stage.journal.ran(result.id)
    assert [run.retries for run in runs] == [0, 1, 2]
    assert all(later.at - run.at >= 0.5 for run, later in pairwise(runs))
    stage.journal.assert_on_time([result.id])


def test_what_expires_after_it_is_due_runs(stage: Scene):
    # when
    task = stage.send_note(countdown=1, expires=60)
    # then
    stage.journal.wait_for(task)
    stage.journal.assert_on_time([task])
    (receipt,) = stage.journal.received(task)
    assert receipt.expiration == "60000"


def test_what_expires_before_it_is_due_is_revoked_then_and_never_runs(stage: Scene):
    # given
    start = time.time()
    # when
    result = stage.send("note", countdown=1.5, expires=0.5)
    # then
    with pytest.raises(TaskRevokedError, match="expired"):
        result.get(timeout=PATIENCE)
    assert time.time() >= start + 1.5
    assert not stage.journal.ran(result.id)


def test_a_task_revoked_before_it_is_due_never_runs(stage: Scene):
    # given
    result = stage.send("note", countdown=1.5)
    # when
    result.revoke()
    # then
    with pytest.raises(TaskRevokedError, match="revoked"):
        result.get(timeout=PATIENCE)
    assert not stage.journal.ran(result.id)


def test_each_link_of_a_chain_waits_for_its_own_countdown(stage: Scene):
    # given
    start = time.time()
    first = stage.task("note", 1).set(countdown=0.5)
    second = stage.task("note").set(countdown=0.75)
    # when
    result = chain(first, second, app=stage.app).apply_async()
    # then
    assert result.get(timeout=PATIENCE) == 1
    (one,) = stage.journal.ran(result.parent.id)
    (two,) = stage.journal.ran(result.id)
    assert one.at >= start + 0.5
    assert two.at >= one.at + 0.75
    stage.journal.assert_on_time([result.parent.id, result.id])


def test_a_group_waits_as_a_whole(stage: Scene):
    # given
    start = time.time()
    # when
    result = group(stage.task("note", n) for n in range(4)).apply_async(countdown=1)
    # then
    assert result.get(timeout=PATIENCE) == [0, 1, 2, 3]
    ids = [each.id for each in result]
    assert all(run.at >= start + 1 for run in stage.journal.wait_for(*ids))
    stage.journal.assert_on_time(ids)


def test_a_skewed_group_runs_one_after_the_other(stage: Scene):
    # given
    tasks = group(stage.task("note", n) for n in range(4)).skew(start=0.5, stop=2.5, step=0.5)
    # when
    result = tasks.apply_async()
    # then
    ids = [each.id for each in result]
    stage.journal.wait_for(*ids)
    assert [entry.id for entry in stage.journal.received() if entry.id in ids] == ids
    stage.journal.assert_on_time(ids)


def test_a_chord_whose_parts_all_wait_comes_to_its_end(stage: Scene):
    # given
    start = time.time()
    header = [stage.task("note", n).set(countdown=0.5 + n / 4) for n in range(3)]
    body = stage.task("add_up").set(countdown=0.5)
    # when
    result = chord(header, app=stage.app)(body)
    # then
    assert result.get(timeout=PATIENCE) == 0 + 1 + 2
    (run,) = stage.journal.ran(result.id)
    assert run.at >= start + 1 + 0.5
    ids = [each.id for each in result.parent]
    stage.journal.assert_on_time([result.id, *ids])


def test_celery_polls_a_chord_by_delayed_retries(stage: Scene, tmp_path: Path):
    # given
    signal = tmp_path / "go"
    before = {each.id for each in stage.journal.received()}

    def polls() -> list[Entry]:
        received = [each for each in stage.journal.received() if each.id not in before]
        return [each for each in received if each.task == "celery.chord_unlock"]

    # when
    result = chord([stage.task("hold", str(signal))], app=stage.app)(stage.task("note"))
    wait_until(lambda: len(polls()) >= 2, "a second poll")
    signal.touch()
    # then
    result.get(timeout=PATIENCE)
    assert [each.retries for each in polls()] == list(range(len(polls())))
    stage.journal.assert_on_time({each.id for each in polls()})


def test_in_an_app_of_another_timezone_all_times_are_kept(new_stage):
    # given
    stage = new_stage("abroad")
    stage.worker("--pool=threads")
    start = time.time()
    eta = datetime.now(UTC) + timedelta(seconds=1)
    # when
    tasks = [
        stage.send_note(countdown=1),
        stage.send_note(eta=eta),
        stage.send_note(eta=eta.replace(tzinfo=None)),
    ]
    # then
    runs = stage.journal.wait_for(*tasks)
    assert all(start + 1 <= run.at < start + 1 + LATE for run in runs)
    stage.journal.assert_on_time(tasks)
    wait_until(lambda: stage.waiting() == 0, "an empty ladder")


def test_in_an_app_of_task_protocol_1_tasks_wait_in_the_broker_too(new_stage):
    # given
    stage: Stage = new_stage("protocol 1")
    stage.worker("--pool=threads")
    # when
    later = stage.send_note(countdown=3600)
    task = stage.send("retry", 2, 0.5, countdown=0.5).id
    # then
    stage.journal.wait_for(task, times=3)
    stage.journal.assert_on_time([task])
    assert not stage.journal.received(later)
    assert stage.waiting() == 1
