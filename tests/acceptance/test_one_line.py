"""A stock Celery app changes one line, and its worker is never again full of tasks not yet due."""

from __future__ import annotations

import time

import pytest
from celery import Celery

from tests.acceptance.app import OURS
from tests.acceptance.journal import LATE, wait_until
from tests.acceptance.local_system import LocalSystem

HOUR = 3600
#: Celery's default: a worker with one process takes four messages that it has not acknowledged.
PREFETCH_MULTIPLIER = 4


def test_immediate_tasks_run_at_once_however_many_wait_for_an_hour(new_system):
    # given
    system: LocalSystem = new_system("stock")
    worker = system.worker(mingle=True)
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


def test_what_waits_is_not_seen_by_a_worker_and_no_level_is_made_before(new_system):
    # given
    system: LocalSystem = new_system("stock")
    worker = system.worker("--pool=solo")
    system.journal.wait_for(system.send_note())
    assert not system.queues().intersection(system.levels)
    # when
    task = system.send_note(countdown=HOUR)
    worker.stop()
    # then
    assert not system.journal.received(task)
    system.wait_for_waiting(1)


def test_a_task_sent_by_its_name_arrives_before_any_worker_ran_and_after(new_system):
    # given: an app that knows the broker and our transport, and no task and no queue
    system: LocalSystem = new_system("stock")
    app = Celery("stranger", broker=system.vhost.url, set_as_current=False)
    app.conf.broker_transport = OURS
    early = app.send_task("note", countdown=0.5).id
    wait_until(lambda: system.vhost.waiting("celery").get("celery"), "the task in its queue")
    # when
    system.worker("--pool=threads")
    late = app.send_task("note", countdown=0.5).id
    # then
    system.journal.wait_for(early, late)
    system.journal.assert_on_time([late])
    assert system.parked() == 0
    app.close()


NOBODY = "guest:guest@127.0.0.1:1//"


@pytest.mark.parametrize(
    ("transport", "url"),
    [
        (OURS, f"amqp://{NOBODY};amqp://{{broker}}"),
        (None, f"binary-delay://{NOBODY};binary-delay://{{broker}}"),
    ],
    ids=["by transport", "by URL"],
)
def test_the_one_line_may_be_the_url_and_holds_for_every_url_of_a_failover(
    new_system, transport: str | None, url: str
):
    # given
    system: LocalSystem = new_system("stock", transport=transport, url=url)
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
