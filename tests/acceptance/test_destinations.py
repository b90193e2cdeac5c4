"""A delayed task arrives wherever it was sent to, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
from celery import Celery
from kombu import Exchange

from tests.acceptance.app import OURS
from tests.acceptance.journal import wait_until
from tests.acceptance.local_system import LocalSystem
from tests.acceptance.system import System


@pytest.fixture(scope="module")
def shape():
    return "exchanges"


@pytest.fixture(scope="module")
def worker_options():
    queues = "--queues=celery,images,pngs,png,left,right,foo"
    return ["--pool=threads", "--concurrency=1", "--without-mingle", queues]


def wait_for_copies(system: System, *countdowns: float) -> None:
    """Wait for a task that is due after all others: had they more runs, these would be over."""
    system.journal.wait_for(system.send_note(countdown=max(countdowns) + 0.5))
    wait_until(lambda: system.waiting() == 0, "an empty ladder")


def test_a_queue_that_is_named_in_the_call_gets_the_task(system: System):
    # when
    task = system.send_note(countdown=0.5, queue="foo")
    # then
    (run,) = system.journal.wait_for(task)
    assert (run.exchange, run.routing_key) == ("", "foo")


def test_of_two_exchanges_that_share_a_routing_key_only_the_right_one_delivers(system: System):
    # when
    left = system.send_note(exchange="left", routing_key="same", countdown=0.5)
    right = system.send_note(exchange="right", routing_key="same", countdown=0.5)
    # then
    system.journal.wait_for(left, right)
    wait_for_copies(system, 0.5)
    (left_run,) = system.journal.ran(left)
    (right_run,) = system.journal.ran(right)
    assert (left_run.exchange, left_run.routing_key) == ("left", "same")
    assert (right_run.exchange, right_run.routing_key) == ("right", "same")


@pytest.mark.parametrize("countdown", [None, 0.5])
def test_topic_patterns_choose_among_delayed_tasks_as_among_others(
    system: System, countdown: float | None
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
        key: system.send_note(exchange="media", routing_key=key, countdown=countdown)
        for key in queues
    }
    # then
    for key, task in tasks.items():
        system.journal.wait_for(task, times=len(queues[key]))
    wait_for_copies(system, countdown or 0)
    runs = {key: system.journal.ran(task) for key, task in tasks.items()}
    assert {key: len(runs[key]) for key in runs} == {key: len(queues[key]) for key in queues}
    assert all(
        (run.exchange, run.routing_key) == ("media", key) for key in runs for run in runs[key]
    )


def test_a_retry_stays_on_its_topic_exchange(system: System):
    # when
    task = system.send("retry", 2, 0.5, exchange="media", routing_key="image.jpg").id
    # then
    runs = system.journal.wait_for(task, times=3)
    assert {(run.exchange, run.routing_key) for run in runs} == {("media", "image.jpg")}
    system.journal.assert_on_time([task])


def test_routes_of_the_settings_of_a_stranger_lead_delayed_tasks_as_others(system: System):
    # given: an app that knows no task and no queue
    app = Celery("stranger", broker=system.vhost.url, set_as_current=False)
    app.conf.broker_transport = OURS
    app.conf.task_routes = {
        "note": {"exchange": "media", "exchange_type": "topic", "routing_key": "image.new"},
        "add_up": {"queue": "foo"},
    }
    # when
    image = app.send_task("note", countdown=0.5).id
    foo = app.send_task("add_up", ([1, 2],), countdown=0.5).id
    # then
    places = {
        run.id: (run.exchange, run.routing_key) for run in system.journal.wait_for(image, foo)
    }
    assert places == {image: ("media", "image.new"), foo: ("", "foo")}
    system.journal.assert_on_time([image, foo])
    app.close()


def test_a_task_that_no_queue_wants_any_more_is_parked_and_disturbs_no_other(system: System):
    # given
    exchange = Exchange("media", "topic")
    parked = system.parked()
    # when
    lost = system.send_note(exchange=exchange, routing_key="sound", countdown=0.5)
    other = system.send_note(exchange=exchange, routing_key="image.jpg", countdown=0.5)
    # then
    system.journal.wait_for(other)
    wait_until(lambda: system.parked() == parked + 1, "a parked task")
    assert not system.journal.received(lost)


def test_of_a_broadcast_every_worker_gets_its_copy_once_after_the_delay(new_system):
    # given
    system: LocalSystem = new_system("broadcast")
    workers = [system.worker("--pool=solo"), system.worker("--pool=solo")]
    # when
    task = system.send("note_everywhere", countdown=1).id
    # then
    system.journal.wait_for(task, times=2)
    wait_for_copies(system, 0.5)
    runs = system.journal.ran(task)
    assert {run.worker for run in runs} == {worker.name for worker in workers}
    assert len(runs) == 2
    assert {run.exchange for run in runs} == {"everyone"}
    system.journal.assert_on_time([task])


def test_of_delayed_tasks_that_are_due_a_worker_gets_the_one_of_higher_priority_first(
    new_system, tmp_path: Path
):
    # given
    system: LocalSystem = new_system("priority")
    system.worker("--pool=solo")
    signal = tmp_path / "go"
    busy = system.send("hold", str(signal)).id
    system.journal.wait_for(busy)
    # when
    low = system.send_note(countdown=0.5, priority=1)
    high = system.send_note(countdown=1, priority=9)
    wait_until(lambda: system.vhost.waiting("celery") == {"celery": 2}, "two tasks that are due")
    signal.touch()
    # then
    system.journal.wait_for(busy, low, high)
    received = system.journal.received()
    assert [task.id for task in received] == [busy, high, low]
    assert [task.priority for task in received[1:]] == [9, 1]
