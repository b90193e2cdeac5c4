"""A delayed task arrives wherever it was sent to, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
from kombu import Exchange

from tests.acceptance.journal import wait_until
from tests.acceptance.scene import Scene
from tests.acceptance.stage import Stage


@pytest.fixture(scope="module")
def shape():
    return "exchanges"


@pytest.fixture(scope="module")
def worker_options():
    queues = "--queues=celery,images,pngs,png,left,right,foo"
    return ["--pool=threads", "--concurrency=1", "--without-mingle", queues]


def settle(stage: Scene, *countdowns: float) -> None:
    """Wait for a task that is due after all others: had they more runs, these would be over."""
    stage.journal.wait_for(stage.send_note(countdown=max(countdowns) + 0.5))
    wait_until(lambda: stage.waiting() == 0, "an empty ladder")


def test_a_queue_that_is_named_in_the_call_gets_the_task(stage: Scene):
    # when
    task = stage.send_note(countdown=0.5, queue="foo")
    # then
    (run,) = stage.journal.wait_for(task)
    assert (run.exchange, run.routing_key) == ("", "foo")


def test_of_two_exchanges_that_share_a_routing_key_only_the_right_one_delivers(stage: Scene):
    # when
    left = stage.send_note(exchange="left", routing_key="same", countdown=0.5)
    right = stage.send_note(exchange="right", routing_key="same", countdown=0.5)
    # then
    stage.journal.wait_for(left, right)
    settle(stage, 0.5)
    (left_run,) = stage.journal.ran(left)
    (right_run,) = stage.journal.ran(right)
    assert (left_run.exchange, left_run.routing_key) == ("left", "same")
    assert (right_run.exchange, right_run.routing_key) == ("right", "same")


@pytest.mark.parametrize("countdown", [None, 0.5])
def test_topic_patterns_choose_among_delayed_tasks_as_among_others(
    stage: Scene, countdown: float | None
):
    # given
    queues = {
        "image.jpg": ["images"],
        "image.png": ["images", "pngs"],
        "video.still.png": ["pngs"],
        "png": ["png", "pngs"],
    }
    # when
    tasks = {
        key: stage.send_note(exchange="media", routing_key=key, countdown=countdown)
        for key in queues
    }
    # then
    for key, task in tasks.items():
        stage.journal.wait_for(task, times=len(queues[key]))
    settle(stage, countdown or 0)
    runs = {key: stage.journal.ran(task) for key, task in tasks.items()}
    assert {key: len(runs[key]) for key in runs} == {key: len(queues[key]) for key in queues}
    assert all(
        (run.exchange, run.routing_key) == ("media", key) for key in runs for run in runs[key]
    )


def test_a_retry_stays_on_its_topic_exchange(stage: Scene):
    # when
    task = stage.send("retry", 2, 0.5, exchange="media", routing_key="image.jpg").id
    # then
    runs = stage.journal.wait_for(task, times=3)
    assert {(run.exchange, run.routing_key) for run in runs} == {("media", "image.jpg")}
    stage.journal.assert_on_time([task])


def test_a_task_that_no_queue_wants_any_more_is_parked_and_disturbs_no_other(stage: Scene):
    # given
    exchange = Exchange("media", "topic")
    parked = stage.parked()
    # when
    lost = stage.send_note(exchange=exchange, routing_key="sound", countdown=0.5)
    other = stage.send_note(exchange=exchange, routing_key="image.jpg", countdown=0.5)
    # then
    stage.journal.wait_for(other)
    wait_until(lambda: stage.parked() == parked + 1, "a parked task")
    assert not stage.journal.received(lost)


def test_of_a_broadcast_every_worker_gets_its_copy_once_after_the_delay(new_stage):
    # given
    stage: Stage = new_stage("broadcast")
    workers = [stage.worker("--pool=solo"), stage.worker("--pool=solo")]
    # when
    task = stage.send("note_everywhere", countdown=1).id
    # then
    stage.journal.wait_for(task, times=2)
    settle(stage, 0.5)
    runs = stage.journal.ran(task)
    assert {run.worker for run in runs} == {worker.name for worker in workers}
    assert len(runs) == 2
    assert {run.exchange for run in runs} == {"everyone"}
    stage.journal.assert_on_time([task])


def test_of_delayed_tasks_that_are_due_a_worker_gets_the_one_of_higher_priority_first(
    new_stage, tmp_path: Path
):
    # given
    stage: Stage = new_stage("priority")
    stage.worker("--pool=solo")
    signal = tmp_path / "go"
    busy = stage.send("hold", str(signal)).id
    stage.journal.wait_for(busy)
    # when
    low = stage.send_note(countdown=0.5, priority=1)
    high = stage.send_note(countdown=1, priority=9)
    wait_until(lambda: stage.vhost.waiting("celery") == {"celery": 2}, "two tasks that are due")
    signal.touch()
    # then
    stage.journal.wait_for(busy, low, high)
    received = stage.journal.received()
    assert [each.id for each in received] == [busy, high, low]
    assert [each.priority for each in received[1:]] == [9, 1]
