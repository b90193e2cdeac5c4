"""A stock Celery app changes one line, and its worker is never again full of tasks not yet due."""

from __future__ import annotations

import time

import pytest

from tests.acceptance.app import OURS
from tests.acceptance.journal import LATE, wait_until
from tests.acceptance.local_system import LocalSystem

HOUR = 3600
#: Celery's default: a worker with one process takes four messages that it has not acknowledged.
PREFETCH_MULTIPLIER = 4


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_immediate_tasks_run_at_once_however_many_wait_for_an_hour(new_system, pool: str):
    # given
    system: LocalSystem = new_system()
    worker = system.worker(f"--pool={pool}", mingle=True)
    assert system.app.conf.worker_prefetch_multiplier == PREFETCH_MULTIPLIER
    for _ in range(PREFETCH_MULTIPLIER + 2):
        system.send_note(countdown=HOUR)
    start = time.time()
    # when
    immediate = [system.send_note() for _ in range(3)]
    # then
    runs = system.journal.wait_for(*immediate)
    assert all(run.at < start + LATE for run in runs)
    assert len(system.journal.received()) == len(immediate)
    # and
    system.wait_for_waiting(PREFETCH_MULTIPLIER + 2)
    inspect = system.app.control.inspect([worker.name], timeout=LATE)
    assert inspect.scheduled() == {worker.name: []}
    # The main process may not have heard yet that the last has begun.
    wait_until(lambda: inspect.reserved() == {worker.name: []}, "a worker that holds nothing")


def test_what_waits_is_not_seen_by_a_worker_that_starts_or_stops_meanwhile(new_system):
    # given
    system: LocalSystem = new_system()
    task = system.send_note(countdown=HOUR)
    # when
    system.worker("--pool=solo").stop()
    # then
    assert not system.journal.received(task)
    system.wait_for_waiting(1)


def test_a_publisher_that_starts_before_any_worker_still_delivers(new_system):
    # given
    system: LocalSystem = new_system()
    task = system.send_note(countdown=0.5)
    wait_until(lambda: system.vhost.waiting("celery").get("celery"), "the task in its queue")
    # when
    system.worker("--pool=solo")
    # then
    system.journal.wait_for(task)
    assert system.parked() == 0


def test_no_level_is_made_before_the_first_task_that_waits(new_system):
    # given
    system: LocalSystem = new_system()
    system.worker("--pool=solo")
    # when
    system.journal.wait_for(system.send_note())
    # then
    assert not system.queues().intersection(system.levels)


NOBODY = "guest:guest@127.0.0.1:1//"


@pytest.mark.parametrize(
    ("transport", "url"),
    [
        (None, "binary-delay://{broker}"),
        (OURS, f"amqp://{NOBODY};amqp://{{broker}}"),
        (None, f"binary-delay://{NOBODY};binary-delay://{{broker}}"),
    ],
    ids=["by URL", "by transport, second URL", "by URL, second URL"],
)
def test_the_one_line_may_be_the_url_and_holds_for_every_url_of_a_failover(
    new_system, transport: str | None, url: str
):
    # given
    system: LocalSystem = new_system(transport=transport, url=url)
    worker = system.worker("--pool=solo")
    # when
    later, task = system.send_note(countdown=HOUR), system.send("retry", 1, 0.5, countdown=0.5).id
    # then
    system.journal.wait_for(task, times=2)
    system.journal.assert_on_time([task])
    assert not system.journal.received(later)
    system.wait_for_waiting(1)
    stats = system.app.control.inspect([worker.name], timeout=LATE).stats()
    assert stats, "the worker could not send what it knows of its connection"
    assert stats[worker.name]["broker"]["virtual_host"] == system.vhost.name
    assert worker.log().count("kombu-binary-delay is on: delayed tasks wait on RabbitMQ") == 1
    # Its log names the broker that was not there.
    worker.kill()
