"""Celery's native delayed delivery is off for our transport, and for no other."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import celery
import pytest

from tests.acceptance.app import make_app
from tests.acceptance.journal import LATE, wait_until
from tests.acceptance.local_system import LocalSystem
from tests.acceptance.worker import Worker

DIRECT = "quorum on a direct exchange"
TOPIC = "quorum on a topic exchange"
NATIVE = "celery_delayed_"
HAS_NATIVE = pytest.mark.skipif(
    celery.VERSION < (5, 5), reason="Celery has native delayed delivery since 5.5"
)
BARE = ("--without-gossip", "--without-heartbeat")


def of_delays(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return what we have logged, or Celery of its native delayed delivery."""
    return [
        record
        for record in caplog.records
        if record.name.startswith("kombu_binary_delay") or "delayed delivery" in record.getMessage()
    ]


@pytest.mark.parametrize(("shape", "options"), [(DIRECT, BARE), (TOPIC, ())], ids=["bare", "stock"])
def test_with_quorum_queues_our_ladder_delays_and_the_native_one_is_never_made(
    new_system, caplog: pytest.LogCaptureFixture, shape: str, options: tuple[str, ...]
):
    # given
    system: LocalSystem = new_system(shape)
    worker = system.worker("--pool=threads", *options, mingle=not options)
    # when
    with caplog.at_level(logging.INFO):
        tasks = [system.send_note(countdown=0.5 + n / 4) for n in range(3)]
        tasks.append(system.send("retry", 1, 0.5).id)
    # then
    system.journal.wait_for(*tasks)
    system.journal.wait_for(tasks[-1], times=2)
    system.journal.assert_on_time(tasks)
    expected = "" if shape == DIRECT else "celery"
    assert {run.exchange for run in system.journal.ran()} == {expected}
    assert {run.routing_key for run in system.journal.ran()} == {"celery"}
    # and
    assert not [name for name in system.exchanges() | system.queues() if name.startswith(NATIVE)]
    assert "delayed delivery" not in worker.log()
    assert not of_delays(caplog)


@pytest.fixture(scope="module")
def topic_system(new_system):
    return new_system(TOPIC)


@pytest.fixture(scope="module")
def topic_worker(topic_system: LocalSystem):
    return topic_system.worker("--pool=threads", "--task-events")


def test_with_quorum_queues_the_prefetch_window_is_not_filled(
    topic_system: LocalSystem, topic_worker: Worker
):
    # given
    for _ in range(6):
        topic_system.send_note(countdown=3600)
    # when
    immediate = topic_system.send_note()
    # then
    topic_system.journal.wait_for(immediate)
    inspect = topic_system.app.control.inspect([topic_worker.name], timeout=LATE)
    assert inspect.scheduled() == {topic_worker.name: []}


def test_workers_still_find_each_other_and_obey_remote_control(new_system):
    # given
    system: LocalSystem = new_system(DIRECT)
    options = ("--loglevel=DEBUG", "--pool=threads")
    first = system.worker(*options, mingle=True)
    # when: Celery gives the first a second to answer, which a busy machine may not
    for _ in range(5):
        second = system.worker(*options, mingle=True)
        if "mingle: sync with 1 nodes" in second.log():
            break
        second.stop()
    # then
    assert "mingle: sync with 1 nodes" in second.log()
    wait_until(lambda: f"{second.name} joined the party" in first.log(), "gossip")
    # and
    both = [first.name, second.name]
    pongs = system.app.control.ping(destination=both, timeout=LATE)
    assert {name: "pong" for pong in pongs for name in pong} == dict.fromkeys(both, "pong")
    assert system.app.control.add_consumer(
        "bar", destination=[first.name], reply=True, timeout=LATE
    )
    task = system.send_note(countdown=0.5, queue="bar")
    (run,) = system.journal.wait_for(task)
    assert run.worker == first.name


@pytest.mark.usefixtures("topic_worker")
def test_a_delayed_task_sends_its_events_when_it_runs(topic_system: LocalSystem):
    # given
    events: list[dict[str, Any]] = []
    sent: list[str] = []

    def note(event: dict[str, Any]) -> None:
        if event.get("uuid") in sent:
            events.append(event)
            receiver.should_stop = event["type"] == "task-succeeded"

    # when: events are heard from now on
    with topic_system.app.connection_for_read() as connection:
        receiver = topic_system.app.events.Receiver(connection, handlers={"*": note})
        receiver.on_consume_ready = lambda *_, **__: sent.append(
            topic_system.send_note(countdown=0.5)
        )
        receiver.capture(limit=None, timeout=None, wakeup=False)
    # then
    mine = [event["type"] for event in events]
    assert mine == ["task-received", "task-started", "task-succeeded"]


@HAS_NATIVE
def test_an_app_without_our_transport_in_the_same_process_is_left_alone(
    topic_system: LocalSystem, topic_worker: Worker, new_system
):
    # given
    topic_system.journal.wait_for(topic_system.send_note(countdown=0.5))
    stock: LocalSystem = new_system(TOPIC, transport=None)
    stock.worker("--pool=threads")
    # when
    task, later = stock.send_note(countdown=2), stock.send_note(countdown=3600)
    # then
    assert "celery_delayed_27" in stock.exchanges()
    native = [f"celery_delayed_{n}" for n in range(28)]
    wait_until(lambda: sum(stock.vhost.waiting(*native).values()) >= 1, "a native delay")
    stock.journal.wait_for(task)
    assert not stock.journal.received(later)
    assert not any(name.startswith("kbd.") for name in stock.exchanges() | stock.queues())


@HAS_NATIVE
def test_a_stock_app_warns_of_direct_exchanges_as_ever_beside_ours(
    new_system, caplog: pytest.LogCaptureFixture
):
    # given
    ours: LocalSystem = new_system(DIRECT)
    ours.send_note(countdown=3600)
    stock: LocalSystem = new_system(DIRECT, transport=None)
    assert not of_delays(caplog)
    # when
    stock.send_note(countdown=3600)
    # then
    assert "Direct exchanges are not supported with native delayed delivery" in caplog.text


@HAS_NATIVE
def test_what_a_stock_app_delays_is_run_and_retried_by_workers_with_and_without_our_transport(
    new_system,
):
    """As during a migration: half of the workers are new, and publishers are old."""
    # given
    system: LocalSystem = new_system(TOPIC)
    system.worker("--pool=threads", stock=True)
    system.worker("--pool=threads")
    publisher = make_app(replace(system.deployment, transport=None))
    # when: the last wait of an even number of seconds is in another level than that of an odd one
    tasks = [
        str(publisher.tasks["retry"].apply_async((1, seconds), countdown=seconds).id)
        for seconds in (1, 2, 3, 4)
        for _ in range(3)
    ]
    # then
    for task in tasks:
        assert [run.retries for run in system.journal.wait_for(task, times=2)] == [0, 1]
    assert system.parked() == 0
    publisher.close()
