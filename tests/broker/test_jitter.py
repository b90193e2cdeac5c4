"""Jitter: messages that are due at one moment arrive one after the other, and none before it."""

from __future__ import annotations

import time
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from unittest.mock import patch

import pytest
from celery import Celery
from kombu import Connection, Queue

from kombu_binary_delay import Ladder, Settings, Topology, cancel, reschedule
from kombu_binary_delay.amendments.way_in import WayIn
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.delay import spread
from kombu_binary_delay.operate import Management, explain, migrate
from tests.waits import PATIENCE, drain_until

JITTER = 3000  # milliseconds
OURS = "kombu_binary_delay:Transport"
SOME = {"x-delay-jitter": JITTER}


@pytest.fixture
def arrive(vhost):
    """Consume without the transport, so that the ladder's header is seen, until all are there."""

    def arrive(count):
        arrivals = {}

        def take(message):
            headers = message.properties["application_headers"]
            name = message.properties.get("message_id") or headers["id"]
            arrivals[name] = (time.time() * 1000, headers)

        with vhost.connect() as connection:
            channel = connection.channel()
            channel.basic_consume("inbox", callback=take, no_ack=True)
            drain_until(connection, lambda: len(arrivals) >= count)
        return arrivals

    return arrive


@pytest.mark.parametrize(
    ("setting", "header", "jitter", "batch"),
    [
        (JITTER, None, JITTER, True),
        (0, JITTER, JITTER, False),
        (JITTER, 0, 0, True),
        (JITTER, "1000.5", 1000.5, False),
    ],
)
def test_each_message_arrives_at_its_own_time_after_it_is_due(  # noqa: PLR0913, PLR0917
    connect, arrive, setting, header, jitter, batch
):
    options = {"binary_delay": {"jitter": setting}} if setting else {}
    connection = connect(**options)
    Queue("inbox")(connection.default_channel).declare()
    headers = {"x-delay": 200, **({} if header is None else {"x-delay-jitter": header})}
    names = [f"order-{number}" for number in range(20)]
    channel = connection.default_channel
    began = time.time_ns() // 1_000_000
    with channel.create_publish_batch(100) if batch else nullcontext(channel) as publisher:
        send = publisher.publish if batch else publisher.basic_publish
        for name in names:
            properties = {"message_id": name}
            message = channel.prepare_message("x", 0, "text/plain", "utf-8", headers, properties)
            send(message, routing_key="inbox")
    ended = -(-time.time_ns() // 1_000_000)
    arrivals = arrive(20)
    for name in names:
        at, seen = arrivals[name]
        later = spread(name, round(jitter * 1000)) / 1000
        assert began + 200 + later <= at
        # Without this header, it was due before it was sent.
        if packed := seen.get("x-binary-delay"):
            assert began + 200 + later <= packed["due"] <= ended + 200 + later + 1
            assert packed["due"] <= at
        # Nothing in a message shows that this exists, where nobody asks for it.
        assert ("x-delay-jitter" in seen) == bool(setting or header is not None)


@pytest.mark.parametrize("setting", [JITTER, 0], ids=["setting", "header"])
def test_a_task_keeps_its_eta_and_arrives_after_it(vhost, connect, arrive, setting):
    app = Celery(broker=vhost.url, set_as_current=False)
    app.conf.update(broker_transport=OURS, task_default_queue="inbox")
    app.conf.broker_transport_options = {"binary_delay": {"jitter": setting}}
    headers = {} if setting else {"headers": SOME}
    eta = datetime.now(UTC) + timedelta(seconds=1)
    ids = [app.send_task("remind", eta=eta, **headers).id for _ in range(5)]
    # The same task published again is due at the same time again.
    app.send_task("remind", task_id=ids[0], eta=eta, **headers)
    micros = (eta - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    arrivals = arrive(5)
    for name in ids:
        at, seen = arrivals[name]
        assert seen["eta"] == eta.isoformat()
        assert seen["x-delay-jitter"] == JITTER
        due = micros + spread(name, JITTER * 1000)
        assert due <= at * 1000
        # Without this header, it was due before it was sent.
        if packed := seen.get("x-binary-delay"):
            assert packed["due"] == -(-due // 1000)


def test_what_polls_a_chord_has_neither_jitter_nor_the_delay_of_the_body(vhost, arrive):
    """Celery 5.7 gives it the headers of the chord's body."""
    app = Celery(broker=vhost.url, set_as_current=False)
    app.conf.update(broker_transport=OURS, task_default_queue="inbox")
    app.conf.broker_transport_options = {"binary_delay": {"jitter": 3_600_000}}
    headers = {"mine": 1, "x-delay": 3_600_000, "x-delay-jitter": 3_600_000, "x-delay-key": "k"}
    name = app.send_task("celery.chord_unlock", countdown=0.2, headers=headers).id
    # If one of them counted, it would not arrive in this hour.
    _, seen = arrive(1)[name]
    assert [name for name in seen if name in headers] == ["mine"]


def test_a_rescheduled_message_arrives_at_the_time_that_was_named(connect, collect):
    # If its jitter counted, it would not arrive in this hour.
    publisher, queue = connect(), Queue("inbox")
    queue(publisher.default_channel).declare()
    headers = {"x-delay": 200, "x-delay-jitter": 200}
    cancel("another", connection=publisher)  # makes the streams, which takes long
    delay_again = WayIn._delay_again  # noqa: SLF001 - to see its calls
    for countdown in (10, 60):
        consumer = connect(binary_delay={"jitter": 3_600_000})
        publisher.Producer().publish("x", routing_key="inbox", headers=headers, message_id="moved")
        began = time.time()
        reschedule("moved", countdown=countdown, connection=publisher)
        with patch.object(WayIn, "_delay_again", autospec=True, side_effect=delay_again) as again:
            [arrival] = collect(consumer, [queue], 1, timeout=PATIENCE)
        if again.called:
            break
        # It was due before it could be delayed again.
    assert arrival.at - began >= countdown
    assert "x-delay-jitter" not in arrival.headers


@pytest.mark.parametrize("ladder", ["celery", "nservicebus"])
def test_another_systems_ladder_keeps_it_too(connect, collect, ladder):
    connection = connect(binary_delay={"foreign_ladder": ladder, "jitter": 2000})
    queue = Queue("inbox")
    queue(connection.default_channel).declare()
    names = ["a", "b", "c"]
    began = time.time()
    for name in names:
        connection.Producer().publish(
            name, routing_key="inbox", headers={"x-delay": 1000}, message_id=name
        )
    for arrival in collect(connection, [queue], 3):
        assert arrival.at >= began + 1 + spread(arrival.body, 2_000_000) / 1e6


def test_a_message_that_is_moved_keeps_its_due_time(vhost, broker, connect):
    old, new = Topology(), Topology(Ladder.binary(20, 1000))
    app = Celery(broker=vhost.url, set_as_current=False)
    app.conf.update(broker_transport=OURS, task_default_queue="inbox")
    eta = datetime.now(UTC) + timedelta(hours=10)
    name = app.send_task("remind", eta=eta, headers={"x-delay-jitter": 36_000_000}).id
    plain = partial(Connection, vhost.url, transport_options={"confirm_publish": True})
    settings = {"tick": 1000, "radix": 2, "levels": 20}
    there = partial(connect, binary_delay=settings)
    with plain() as connection:
        management = Management.of(connection, broker.management_url)
    moved = migrate(plain, there, management, old, new)
    assert moved.moved == 1
    with vhost.connect() as connection:
        channel = connection.channel()
        levels = [row["name"] for row in vhost.queues() if row["name"].startswith(new.prefix)]
        (message,) = filter(None, (channel.basic_get(level, no_ack=True) for level in levels))
    headers = message.headers
    micros = (eta - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    due = -(-(micros + spread(name, 36_000_000_000)) // 1000)
    # The move itself takes time; adding the jitter again would be hours.
    assert due <= headers["x-binary-delay"]["due"] <= due + 60_000
    # And so it is for those who read nothing but these.
    assert "x-delay-jitter" not in headers
    assert headers["eta"] == datetime.fromtimestamp(due / 1000, UTC).isoformat()


def test_explain_says_that_there_is_jitter():
    told = explain(
        Topology(), 10_000, Destination("", "inbox"), 0, settings=Settings(jitter=60_000)
    )
    assert any("up to 60 s later" in note for note in told.notes)
