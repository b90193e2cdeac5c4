"""Redrive, migrate and transfer on a real broker: nothing lost, nothing early."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from struct import pack
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import amqp
import pytest
from kombu import Connection, Exchange, Queue
from kombu.transport import native_delayed_delivery as native

from dev.faults.proxy import Proxy
from kombu_binary_delay import Ladder, Topology
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.envelope import HEADER, HEADERS
from kombu_binary_delay.ladder.foreign import FOREIGN_LADDERS, celery
from kombu_binary_delay.operate import (
    Management,
    OperationError,
    Snapshot,
    UnreachableError,
    create,
    migrate,
    mover,
    plan,
    redrive,
)
from kombu_binary_delay.operate import parked as count_parked
from kombu_binary_delay.operate.migrate import _requeue
from kombu_binary_delay.operate.mover import max_deliveries
from kombu_binary_delay.operate.raw import split
from kombu_binary_delay.operate.reading import Source, put_back, read
from kombu_binary_delay.publishing.batch import PublishBatch
from kombu_binary_delay.wire.undecodable import take_undecodable, undecodable
from tests.raw_messages import RAW, RawMessage, table
from tests.waits import PATIENCE, attempts, wait_until

#: In milliseconds, of which no test sees the end.
HOUR = 3_600_000
#: For how long what is moved waits, in milliseconds: longer where it was due before.
RESTS = 12_000, 40_000, 120_000


@pytest.fixture
def plain(vhost):
    return partial(Connection, vhost.url, transport_options={"confirm_publish": True})


@pytest.fixture
def management(broker, plain):
    with plain() as connection:
        return Management.of(connection, broker.management_url)


@pytest.fixture
def small(topology):
    return Topology(Ladder.binary(4, 1000), queue_type=topology.queue_type)


@pytest.fixture
def tall(topology):
    """One with room for an hour; see `TALL`."""
    return Topology(Ladder.binary(12, 1000), queue_type=topology.queue_type)


@dataclass(frozen=True)
class Operator:
    vhost: Any
    plain: Any
    management: Any

    def migrate(self, source, to, exchange=None, **settings):
        there = ours(self.vhost, **(settings or SETTINGS))
        return migrate(self.plain, there, self.management, source, to, exchange=exchange)


@pytest.fixture
def operator(vhost, plain, management):
    return Operator(vhost, plain, management)


SETTINGS = {"tick": 1000, "radix": 2, "levels": 4}
TALL = {**SETTINGS, "levels": 12}


def ours(vhost, **settings):
    return partial(
        Connection,
        vhost.url,
        transport="kombu_binary_delay:Transport",
        transport_options={"binary_delay": settings},
    )


def publish(connection, queue, *delays, exchange="", **more):
    for delay in delays:
        connection.Producer().publish(
            f"{delay}", exchange=exchange, routing_key=queue, headers={"x-delay": delay, **more}
        )


@pytest.fixture
def allow(broker, vhost):
    """Let messages come back to quorum queues so many times, and no more."""

    def allow(times):
        policy = {"pattern": ".*", "definition": {"delivery-limit": times}}
        broker.api("PUT", f"policies/{vhost.name}/limit", policy)

        def is_told():
            rows = vhost.queues()
            return all(row.get("policy") == "limit" for row in rows if row["type"] == "quorum")

        wait_until(is_told)

    return allow


def waiting(vhost, topology):
    """Count what waits in a ladder, by the queues that hold any."""
    counts = vhost.waiting(*(queue.name for queue in topology.whole.queues))
    return {name: count for name, count in counts.items() if count}


# -- redrive -------------------------------------------------------------------------------------


@pytest.fixture
def parked(connect, vhost, small):
    """Three messages whose queue is gone, and one for a key that nobody has bound."""
    connection = connect(confirm_publish=True, binary_delay=SETTINGS)
    Queue("x", Exchange("events", "topic"), "other.#")(connection.channel()).declare()
    publish(connection, "gone", 1000, 1000, 1000, mine=1)
    publish(connection, "order.paid", 1000, exchange="events")
    wait_until(lambda: vhost.waiting(small.parking) == {small.parking: 4})
    return connection


def by_destination(redriven):
    return {
        (row.destination.exchange, row.destination.routing_key): (row.sent, row.stays)
        for row in redriven.parked
    }


def test_a_dry_run_counts_what_is_parked_and_takes_nothing(parked, plain, vhost, small):
    assert parked
    with plain() as connection:
        counted = [count_parked(connection, small) for _ in range(3)]
        message = connection.default_channel.basic_get(small.parking)

    assert {parked_now.queues for parked_now in counted} == {((small.parking, 4),)}
    # A quorum queue counts what was taken and came back.
    assert not message.delivery_info["redelivered"]
    assert message.headers.get("x-delivery-count", 0) == 0


@pytest.mark.parametrize(
    ("how", "with_management"),
    [("elsewhere", False), ("nobody there", True), ("nobody there", False)],
)
def test_what_stays_parked_is_not_dropped_at_a_low_delivery_limit(  # noqa: PLR0913, PLR0917
    parked, operator, small, allow, how, with_management
):
    assert parked
    allow(3)
    management = operator.management if with_management else None
    for _ in range(6):
        wait_until(lambda: operator.vhost.waiting(small.parking) == {small.parking: 4})
        only = Destination("", "other") if how == "elsewhere" else None
        redriven = redrive(operator.plain, small, management, only=only)

    assert by_destination(redriven) == {("", "gone"): (0, 3), ("events", "order.paid"): (0, 1)}
    wait_until(lambda: operator.vhost.waiting(small.parking) == {small.parking: 4})


def test_what_cannot_be_decoded_stays_parked_as_it_came_and_holds_up_no_other(
    operator, small, allow
):
    vhost, plain = operator.vhost, operator.plain
    park(plain, small, *["@..mail"] * 3)
    allow(3)
    with plain() as connection:
        channel = connection.default_channel
        Queue("mail")(channel).declare()
        for raw in RAW.values():
            channel.basic_publish(RawMessage(b"odd", raw), small.parking, "@..mail")
        channel.basic_publish(amqp.Message(b"key"), small.parking, b"@..\xff")
    park(plain, small, *["@..mail"] * 3)
    odd = len(RAW) + 1
    wait_until(lambda: vhost.waiting(small.parking) == {small.parking: odd + 6})

    runs = []
    for _ in range(6):
        runs.append(redrive(plain, small, operator.management))
        wait_until(lambda: vhost.waiting(small.parking) == {small.parking: odd})

    assert [(run.sent, run.unreadable) for run in runs] == [(6, odd), *[(0, odd)] * 5]
    assert all("cannot be decoded: " in reason for run in runs for reason in run.reasons)
    assert vhost.waiting("mail") == {"mail": 6}
    nobody = Destination("", "")
    away = redrive(plain, small, operator.management, only=nobody, to=Destination("", "mail"))
    assert (away.sent, vhost.waiting(small.parking)) == (odd, {small.parking: 0})
    moved_bodies = raw_messages(vhost, "mail")[6:]
    assert {body for body, _ in moved_bodies} == {b"odd", b"key"}
    # RabbitMQ adds headers.
    for raw in RAW.values():
        values = [value[4:] if name == HEADERS else value for name, value in split(raw).items()]
        assert any(all(value in came for value in values) for _, came in moved_bodies)


def raw_messages(vhost, queue):
    """Take all messages of a queue, and return their bodies and properties as bytes."""
    with vhost.connect() as connection:
        channel = connection.channel()
        take_undecodable(channel)
        taken = iter(lambda: channel.basic_get(queue, no_ack=True), None)
        odd = [(message, undecodable(message)) for message in taken]
        return [
            (message.body, known.properties if known else message._serialize_properties())  # noqa: SLF001 - as it was sent
            for message, known in odd
        ]


def test_parked_messages_go_to_their_destination_and_stay_where_there_is_none(
    parked, plain, vhost, small, collect
):
    queue = Queue("gone")(parked.channel())
    queue.declare()

    redriven = redrive(plain, small)

    assert by_destination(redriven) == {("", "gone"): (3, 0), ("events", "order.paid"): (0, 1)}
    assert redriven.reasons == ("1 stays: returned: NO_ROUTE",)
    arrivals = collect(parked, [queue], 3)
    assert [
        (arrival.body, arrival.exchange, arrival.key, arrival.headers) for arrival in arrivals
    ] == [("1000", "", "gone", {"mine": 1})] * 3
    wait_until(lambda: vhost.waiting(small.parking) == {small.parking: 1})


def test_what_is_parked_before_it_is_due_stays_until_then(parked, plain, vhost, small):
    Queue("gone")(parked.channel()).declare()
    with plain() as connection:
        connection.Producer().publish(
            "early",
            exchange=small.parking,
            routing_key=small.address(("1", "0"), Destination("", "gone")),
            headers={"x-binary-delay": {"due": (time.time_ns() // 1_000_000) + 3_600_000}},
        )

    def are_there(count):
        # What was put back is there again a moment later.
        wait_until(lambda: vhost.waiting(small.parking) == {small.parking: count})

    are_there(5)
    redriven = redrive(plain, small, only=Destination("", "gone"))
    are_there(2)
    again = redrive(plain, small, only=Destination("", "gone"))
    are_there(2)
    Queue("elsewhere")(parked.channel()).declare()
    away = redrive(plain, small, only=Destination("", "gone"), to=Destination("", "elsewhere"))

    assert all("not due yet" in result.reasons[0] for result in (redriven, again, away))
    assert by_destination(redriven)["", "gone"] == (3, 1)
    assert by_destination(again)["", "gone"] == (0, 1)
    assert vhost.waiting("gone", "elsewhere") == {"gone": 3, "elsewhere": 0}


@contextmanager
def impatient(monkeypatch):
    """Wait two seconds for confirms, within."""
    with monkeypatch.context() as patched:
        patched.setattr(mover, "PATIENCE", 2.0)
        yield


def test_a_broker_that_confirms_nothing_ends_it_and_is_named(
    parked, operator, small, own_broker, monkeypatch
):
    vhost = operator.vhost
    with operator.plain() as connection:
        Queue("gone")(connection.default_channel).declare()

    with (
        impatient(monkeypatch),
        own_broker.alarm(),
        pytest.raises(UnreachableError, match="alarm"),
    ):
        redrive(operator.plain, small)

    # Nothing was taken, so that nothing has to come back.
    assert vhost.waiting("gone", small.parking) == {"gone": 0, small.parking: 4}
    redrive(operator.plain, small)
    wait_until(lambda: vhost.waiting("gone") == {"gone": 3})


def test_messages_for_one_destination_go_elsewhere(parked, plain, vhost, small):
    Queue("elsewhere")(parked.channel()).declare()

    redriven = redrive(
        plain, small, only=Destination("events", "order.paid"), to=Destination("", "elsewhere")
    )

    assert by_destination(redriven) == {("", "gone"): (0, 3), ("events", "order.paid"): (1, 0)}
    assert vhost.waiting("elsewhere") == {"elsewhere": 1}


#: The header of a message that was delayed again for its own queue; others have their own copies.
FOR_ONE_QUEUE = {HEADER: {"due": 1, "as": ["events", "user.created"], "cc": ["other"]}}


def test_what_is_for_one_queue_only_is_sent_on_to_no_other_and_blind_copies_are_sent_on(
    parked, plain, vhost, small
):
    names = "gone", "other", "audit"
    for name in names:
        Queue(name)(parked.channel()).declare()
    key, _, audit = (small.address(("1",), Destination("", name)) for name in names)
    blind = {HEADER: {"due": 1, "bcc": ["audit"]}, "CC": [audit]}
    with plain() as client:
        for headers in (FOR_ONE_QUEUE, blind):
            client.Producer().publish(
                "copy", exchange=small.parking, routing_key=key, headers=headers
            )

    done = redrive(plain, small, only=Destination("", "gone"))

    assert (done.sent, done.stays) == (5, 1), done
    assert vhost.waiting(*names) == {"gone": 5, "other": 0, "audit": 1}


def test_what_is_for_one_queue_only_is_moved_to_no_other():
    topology = Topology(Ladder.binary(4, 1000))
    key = topology.address(tuple("1011"), Destination("", "mail"))
    properties = {"application_headers": FOR_ONE_QUEUE}

    reading = read(Source("q", topology, 8000, 3), key, properties, 1_000_000)

    assert reading is not None
    assert (reading.destination, reading.properties) == (
        Destination("", "mail"),
        {"application_headers": {}},
    )


def test_messages_for_several_destinations_are_sent_on_in_one_run(parked, plain, vhost, small):
    for name in ("gone", "away"):
        Queue(name)(parked.channel()).declare()
    publish(parked, "away", 1)
    publish(parked, "nowhere", 1)
    wait_until(lambda: vhost.waiting("away", small.parking) == {"away": 1, small.parking: 5})
    only = {Destination("", "gone"), Destination("", "nowhere")}

    redriven = redrive(plain, small, only=only)

    assert by_destination(redriven) == {
        ("", "gone"): (3, 0),
        ("", "nowhere"): (0, 1),
        ("events", "order.paid"): (0, 1),
    }
    assert len(redriven.reasons) == 1


def park(plain, small, *keys, **headers):
    """Put messages into parking, each with a key, be it an address or not."""
    with plain() as connection:
        create(connection, small, small.base)
        for key in keys:
            connection.Producer().publish(
                "m", exchange=small.parking, routing_key=key, headers=headers
            )


def test_what_has_no_address_has_a_way_out_to_a_queue(plain, vhost, small):
    """Given: parked messages without an address, and one that has one."""
    with plain() as connection:
        for name in ("mail", "elsewhere"):
            Queue(name)(connection.channel()).declare()
    park(plain, small, "mail", "mail", "", "@..mail", mine=1)
    parked = partial(vhost.waiting, small.parking)

    wait_until(lambda: parked() == {small.parking: 4})
    by_itself = redrive(plain, small)
    wait_until(lambda: parked() == {small.parking: 3})
    sent = redrive(plain, small, only=Destination("", ""), to=Destination("", "elsewhere"))

    assert by_destination(by_itself) == {("", ""): (0, 3), ("", "mail"): (1, 0)}
    assert (by_itself.unreadable, "without an address" in by_itself.reasons[0]) == (3, True)
    assert (sent.sent, parked()) == (3, {small.parking: 0})
    assert vhost.waiting("mail", "elsewhere") == {"mail": 1, "elsewhere": 3}


def test_no_message_is_sent_on_to_where_it_would_be_parked_again(connect, plain, vhost, small):
    """Given: a task that came by one namespace's ladder, and is delayed again by another's."""
    theirs = Topology(Ladder.binary(4, 1000), namespace="other", queue_type=small.queue_type)
    there = connect(binary_delay={**SETTINGS, "namespace": "other"}, confirm_publish=True)
    queue = Queue("mail")(there.channel())
    queue.declare()
    publish(there, "mail", 1000)
    wait_until(lambda: vhost.waiting("mail") == {"mail": 1})
    there.default_channel.queue_purge("mail")
    # As a consumer without the transport, and one of another namespace, would send it again.
    keys = [theirs.address(("1", "0"), Destination("", "mail")), "mail"]
    exchange = theirs.delivery
    park(plain, small, *(small.address((), Destination(exchange, key)) for key in keys))

    redriven = redrive(plain, small)
    for to_exchange in (exchange, theirs.to_queues):
        with pytest.raises(OperationError, match="is a part of a ladder"):
            redrive(plain, small, to=Destination(to_exchange, "mail"))

    assert by_destination(redriven) == {("", "mail"): (1, 0), (exchange, "mail"): (0, 1)}
    assert "is a part of another ladder" in redriven.reasons[0]
    assert vhost.waiting(theirs.parking, "mail") == {theirs.parking: 0, "mail": 1}
    wait_until(lambda: vhost.waiting(small.parking) == {small.parking: 1})
    rest = redrive(plain, small, only=Destination(exchange, "mail"), to=Destination("", "mail"))
    assert (rest.sent, vhost.waiting(small.parking)) == (1, {small.parking: 0})


def test_a_destination_that_this_user_may_not_ask_about_holds_up_no_other(
    plain, vhost, small, user
):
    """Given: an operator who may send to queues by their names, and no more."""
    ladder = r"^kbd\."
    rights = {"configure": ladder, "write": r"^kbd\.|^amq\.default$", "read": ladder}
    places = [("", "gone"), ("events", "k"), ("other.v2.delivery", "mail"), ("", "mail")]
    with plain() as connection:
        create(connection, small, small.base)
        Queue("mail")(connection.channel()).declare()
    park(plain, small, *(small.address((), Destination(*place)) for place in places))

    redriven = redrive(partial(Connection, user(**rights)), small)

    stay = dict.fromkeys(places[:3], (0, 1))
    assert by_destination(redriven) == {**stay, ("", "mail"): (1, 0)}, redriven.reasons
    assert vhost.waiting("mail") == {"mail": 1}


def test_a_long_name_that_the_broker_cannot_repeat_in_an_error_blocks_no_other(plain, vhost, small):
    """Given: names whose error RabbitMQ cuts within a character, or ends the connection for."""
    names = "\u00e9" * 120, "x" + "\u00e9" * 119
    with plain() as connection:
        create(connection, small, small.base)
        for name in ("mail", names[0]):
            Queue(name)(connection.channel()).declare()
        for destination in (
            *(Destination("", key) for key in (*names, "mail")),
            *(Destination(name, "mail") for name in names),
        ):
            connection.Producer().publish(
                "m",
                exchange=small.parking,
                routing_key=small.address((), destination),
                headers={HEADER: {"due": 1, "to": list(destination)}},
            )

    redriven = redrive(plain, small)

    assert by_destination(redriven) == {
        ("", names[0]): (1, 0),
        ("", names[1]): (0, 1),
        ("", "mail"): (1, 0),
        (names[0], "mail"): (0, 1),
        (names[1], "mail"): (0, 1),
    }
    assert sum("too long for RabbitMQ to report" in reason for reason in redriven.reasons) == 2


def test_the_whole_of_a_parking_queue_is_seen_a_few_messages_at_a_time(plain, vhost, small):
    most = 0
    with plain() as connection:
        Queue("mail")(connection.channel()).declare()
    park(plain, small, *["@..gone"] * 45, *["@..mail"] * 5, *["@..gone"] * 10)
    wait_until(lambda: vhost.waiting(small.parking) == {small.parking: 60})

    class Counted(mover._Consumer):  # noqa: SLF001 - to see how much it holds
        def wait(self):
            nonlocal most
            most = max(most, len(self.taken))
            return super().wait()

    with (
        patch.multiple(mover, PREFETCH=8, WINDOW=2, _Consumer=Counted),
        plain() as connection,
    ):
        redriven = redrive(plain, small)

    assert by_destination(redriven) == {("", "gone"): (0, 55), ("", "mail"): (5, 0)}
    assert 0 < most <= 16
    wait_until(lambda: vhost.waiting(small.parking, "mail") == {small.parking: 55, "mail": 5})


# -- migrate -------------------------------------------------------------------------------------


def test_what_waits_in_an_old_ladder_waits_the_rest_in_a_new_one(connect, collect, tall, operator):
    vhost = operator.vhost
    plain = operator.plain
    old = Topology(Ladder.binary(10, 500), queue_type=tall.queue_type)
    connection = connect(confirm_publish=True, binary_delay={"tick": 500, "radix": 2, "levels": 10})
    queue = Queue("mail", Exchange("events", "topic"), "order.*")(connection.channel())
    queue.declare()
    for attempt in attempts(*RESTS):
        delay = attempt.delay
        delays = delay, delay + 1000, delay + 500
        publish(connection, "order.paid", *delays, exchange="events", mine=1)
        publish(connection, "mail", delay + 2000)

        with plain() as client:
            planned = plan(client, Snapshot.read(operator.management), old)
        done = operator.migrate(old, tall, **TALL)
        still = waiting(vhost, old)
        attempt.end()

        there = connect(confirm_publish=True, binary_delay=TALL)
        arrivals = collect(there, [queue], 4, timeout=attempt.limit)

    assert planned.messages == 4
    assert (done.moved, done.left, done.poison) == (4, 0, 0)
    assert not still
    for arrival in arrivals:
        assert arrival.at - attempt.began >= float(arrival.body) / 1000
        assert arrival.headers == ({} if arrival.key == "mail" else {"mine": 1})
    assert sorted((arrival.exchange, arrival.key) for arrival in arrivals) == [
        ("", "mail"),
        *[("events", "order.paid")] * 3,
    ]


def test_celerys_native_ladder_is_emptied_into_ours(connect, collect, tall, operator):
    plain = operator.plain
    # Kombu has it since 5.7.
    prefix = {"prefix": "shop"} if hasattr(native, "_celery_delayed_delivery_exchange") else {}
    ladder = celery(**prefix)
    with plain() as client:
        native.declare_native_delayed_delivery_exchanges_and_queues(client, "quorum", **prefix)
        queue = Queue("tasks", Exchange("tasks", "topic"), "tasks.new")(client.channel())
        queue.declare()
        native.bind_queue_to_native_delayed_delivery_exchange(client, queue, **prefix)
        # The exchange of tasks leads to it by our ladder as well, from the first look at it on.
        reader = connect(confirm_publish=True, binary_delay=TALL)
        bound = queue(reader.default_channel)
        bound.declare()
        assert bound.get() is None
    for attempt in attempts(*RESTS):
        due = datetime.fromtimestamp(attempt.due, UTC)
        with plain() as client:
            client.Producer().publish(
                "task",
                exchange=native.level_name(27, **prefix),
                routing_key=native.calculate_routing_key(attempt.delay // 1000, "tasks.new"),
                headers={"task": "t", "id": "1", "eta": due.isoformat()},
            )

        done = operator.migrate(ladder, tall, **TALL)
        attempt.end()

        (arrival,) = collect(reader, [queue], 1, timeout=attempt.limit)

    assert done.moved == 1
    assert (arrival.exchange, arrival.key) == ("tasks", "tasks.new")
    assert arrival.at >= due.timestamp()
    assert "x-death" not in arrival.headers


@pytest.fixture
def celerys(operator, small):
    """Celery's native ladder, and a way to publish to it as its programs do."""
    ladder = FOREIGN_LADDERS["celery"]
    with operator.plain() as client:
        create(client, ladder, ladder.whole)

    def delay(*keys):
        with operator.plain() as client:
            for key in keys:
                client.Producer().publish(
                    key,
                    exchange="celery_delayed_27",
                    routing_key=native.calculate_routing_key(HOUR // 1000, key),
                )

    return delay


def lead(url, exchange, *keys):
    """Bind an exchange to Celery's ladder, as a worker does."""
    with Connection(url) as connection:
        channel = connection.default_channel
        Exchange(exchange, "topic")(channel).declare()
        for key in keys:
            channel.exchange_bind(exchange, "celery_delayed_delivery", f"#.{key}")


def came_back(vhost, topology, expected):
    return waiting(vhost, topology) == expected


def destinations(vhost, topology):
    """Consume what waits in a ladder, and return where it goes."""
    ways = []
    with vhost.connect() as reader:
        for name in waiting(vhost, topology):
            channel = reader.channel()
            while (message := channel.basic_get(name, no_ack=True)) is not None:
                ways.append(topology.parse(message.delivery_info["routing_key"])[1])
            channel.close()
    return sorted(ways)


def test_the_exchange_that_is_said_is_for_what_the_bindings_do_not_tell(
    vhost, tall, operator, celerys
):
    lead(vhost.url, "a", "one", "two")
    lead(vhost.url, "b", "two")
    celerys("one", "two", "none")

    with pytest.raises(OperationError, match="exchanges 'a', 'b'; name the right"):
        operator.migrate(FOREIGN_LADDERS["celery"], tall, **TALL)
    operator.migrate(FOREIGN_LADDERS["celery"], tall, exchange="b", **TALL)

    wait_until(lambda: sum(waiting(vhost, tall).values()) == 3)
    assert destinations(vhost, tall) == [("a", "one"), ("b", "none"), ("b", "two")]


def test_a_run_that_ends_with_an_error_brings_no_message_nearer_to_its_delivery_limit(
    vhost, tall, operator, celerys, allow
):
    """Given: messages that are taken at once, of which none can be moved."""
    lead(vhost.url, "a", "two")
    lead(vhost.url, "b", "two")
    celerys(*["two"] * 20)
    allow(3)
    before = waiting(vhost, FOREIGN_LADDERS["celery"])

    for _ in range(6):
        with pytest.raises(OperationError, match="exchanges 'a', 'b'; name the right"):
            operator.migrate(FOREIGN_LADDERS["celery"], tall, **TALL)
        wait_until(lambda: waiting(vhost, FOREIGN_LADDERS["celery"]) == before)


def test_a_messages_own_expiration_makes_it_no_earlier_on_another_systems_ladder(
    connect, collect, tall, operator, celerys
):
    assert celerys
    connection = connect(confirm_publish=True, binary_delay=TALL)
    queue = Queue("mail")(connection.channel())
    queue.declare()
    for attempt in attempts(*RESTS):
        connection.Producer().publish(
            "m", routing_key="mail", headers={"x-delay": attempt.delay}, expiration=7
        )

        done = migrate(
            operator.plain, operator.plain, operator.management, tall, FOREIGN_LADDERS["celery"]
        )
        attempt.end()

        (arrival,) = collect(connect(), [queue], 1, timeout=attempt.limit)

    assert done.moved == 1
    assert arrival.at - attempt.began >= attempt.delay / 1000
    assert (arrival.properties["expiration"], arrival.headers) == ("7000", {})


def test_whether_another_brokers_ladder_leads_on_is_asked_there(broker, vhost, operator, celerys):
    ladder = FOREIGN_LADDERS["celery"]
    lead(vhost.url, "tasks", "new")
    celerys("new")
    other = broker.vhost()
    try:
        there = partial(Connection, other.url)
        with there() as client:
            create(client, ladder, ladder.whole)
            api = Management.of(client, broker.management_url)
        left = migrate(operator.plain, there, operator.management, ladder, ladder, there=api)
        lead(other.url, "tasks", "new")
        moved = migrate(operator.plain, there, operator.management, ladder, ladder, there=api)
    finally:
        other.delete()

    assert (left.moved, left.left, moved.moved) == (0, 1, 1)


def test_what_another_systems_ladder_would_drop_stays(connect, vhost, tall, operator):
    ladder = FOREIGN_LADDERS["celery"]
    connection = connect(confirm_publish=True, binary_delay=TALL)
    exchange = Exchange("events", "direct")
    Queue("mail", exchange, "mail")(connection.channel()).declare()
    Queue("here")(connection.channel()).declare()
    publish(connection, "here", HOUR)
    publish(connection, "gone", HOUR)
    publish(connection, "mail", HOUR, exchange="events")
    with operator.plain() as client:
        create(client, ladder, ladder.whole)
        done = migrate(operator.plain, operator.plain, operator.management, tall, ladder)

    assert (done.moved, done.left) == (1, 2)
    assert any("leads to no queue for 'gone'" in reason for reason in done.reasons)
    assert any("not the exchange 'events'" in reason for reason in done.reasons)
    waits = f"{tall.level_name(11)}.1"
    wait_until(lambda: vhost.waiting(waits) == {waits: 2})


def test_what_cannot_be_moved_keeps_its_address_at_a_low_delivery_limit(
    connect, vhost, tall, operator, allow
):
    if tall.queue_type == "classic":
        pytest.skip("classic queues have no delivery limit")
    connection = connect(confirm_publish=True, binary_delay=TALL)
    Queue("mail", Exchange("events", "direct"), "mail")(connection.channel()).declare()
    publish(connection, "mail", HOUR, exchange="events", mine=1)
    allow(3)

    ladder = FOREIGN_LADDERS["celery"]
    with operator.plain() as client:
        create(client, ladder, ladder.whole)
    for _ in range(6):
        wait_until(lambda: waiting(vhost, tall))
        done = migrate(operator.plain, operator.plain, operator.management, tall, ladder)

    assert (done.moved, done.left) == (0, 1)
    (name,) = wait_until(lambda: waiting(vhost, tall))
    with vhost.connect() as reader:
        message = reader.channel().basic_get(name)
    digits, destination = tall.parse(message.delivery_info["routing_key"])
    assert name == f"{tall.level_name(len(digits) - 1)}.1"
    assert destination == Destination("events", "mail")
    assert message.headers["mine"] == 1
    due, left = message.headers["x-binary-delay"]["due"], tall.ladder.delay(digits)
    assert time.time() * 1000 + left >= due > time.time() * 1000 + HOUR / 2


def test_what_must_stay_is_looked_at_once_in_a_run_and_holds_up_nothing_behind_it(
    connect, vhost, tall, operator, allow
):
    """Given: a message that is due later than either of the ladders can hold it."""
    if tall.queue_type == "classic":
        pytest.skip("classic queues have no delivery limit")
    connection = connect(confirm_publish=True, binary_delay=TALL)
    Queue("mail")(connection.channel()).declare()
    publish(connection, "mail", HOUR)
    (name,) = wait_until(lambda: waiting(vhost, tall))
    connection.channel().queue_purge(name)
    later = {"due": time.time_ns() // 1_000_000 + 240 * HOUR}
    message = amqp.Message("m", delivery_mode=2, application_headers={"x-binary-delay": later})
    digits = tall.ladder.digits(HOUR)
    key = tall.address(digits, Destination("", "mail"))
    connection.channel().basic_publish(message, tall.entry_exchange(digits), key)
    publish(connection, "mail", HOUR)
    allow(8)

    runs: list[Any] = []
    for number in range(5):
        expected = {name: 2 + number - sum(run.moved for run in runs)}
        wait_until(partial(came_back, vhost, tall, expected))
        taller = Topology(Ladder.binary(13, 1000), queue_type=tall.queue_type)
        runs.append(operator.migrate(tall, taller, **{**TALL, "levels": 13}))
        publish(connection, "mail", HOUR)

    assert [(run.moved, run.left) for run in runs] == [(1, 1)] * 5
    why = "cannot be published again: .*use a shorter delay.*raise the queue's delivery-limit"
    assert re.search(why, runs[-1].reasons[0])
    wait_until(lambda: waiting(vhost, tall) == {name: 2})


def test_a_queue_that_takes_nothing_back_is_not_looked_into(connect, tall, operator, allow):
    if tall.queue_type == "classic":
        pytest.skip("classic queues have no delivery limit")
    connection = connect(confirm_publish=True, binary_delay=TALL)
    Queue("mail")(connection.channel()).declare()
    publish(connection, "mail", HOUR)
    allow(0)

    with pytest.raises(OperationError, match="delivery limit of 0"):
        operator.migrate(tall, Topology(Ladder.binary(4, 500)))


def test_a_limit_of_0_in_a_queues_arguments_is_seen_without_statistics():
    with pytest.raises(OperationError, match="delivery limit of 0"):
        max_deliveries("q", {"type": "quorum", "arguments": {"x-delivery-limit": 0}})


NO_POLICY: dict[str, Any] = {"effective_policy_definition": {}}


@pytest.mark.parametrize(
    ("row", "times"),
    [
        ({"type": "quorum", **NO_POLICY}, 10),
        # Without statistics, the API does not name the policy.
        ({"type": "quorum"}, 1),
        ({"type": "quorum", "arguments": {"x-delivery-limit": 50}}, 1),
        ({"type": "quorum", "arguments": {"x-delivery-limit": 5}, **NO_POLICY}, 2),
        ({"type": "quorum", "effective_policy_definition": {"delivery-limit": 3}}, 1),
        ({"type": "quorum", "effective_policy_definition": {"delivery-limit": 1}}, 1),
        (
            {
                "type": "quorum",
                "arguments": {"x-delivery-limit": 100},
                "effective_policy_definition": {"delivery-limit": 8},
            },
            4,
        ),
        ({"type": "quorum", "arguments": {"x-delivery-limit": -1}, **NO_POLICY}, 10),
        ({"type": "quorum", "arguments": {"x-delivery-limit": 1000}, **NO_POLICY}, 10),
        ({"type": "quorum", "arguments": [], "effective_policy_definition": []}, 10),
        ({"type": "classic", "effective_policy_definition": {"delivery-limit": 0}}, 10),
    ],
)
def test_a_message_comes_back_half_as_often_as_its_queue_allows(row, times):
    assert max_deliveries("q", row) == times


@pytest.mark.parametrize(
    ("topology", "key", "headers", "left", "again"),
    [
        # Of 8 + 2 + 1 s, in the queue of 8 s.
        (Topology(Ladder.binary(4, 1000)), "1.1.0.1.@..q", {}, 9.5, (3, "0.1.0.1.@..q", None)),
        (Topology(Ladder.binary(4, 1000)), "1.1.0.1.@.e.a.b", {}, 2.5, (1, "1.1.@.e.a.b", None)),
        (Topology(Ladder.binary(4, 1000)), "1.1.0.1.@!..q", {}, -5, (0, "1.@!..q", None)),
        (
            Topology(Ladder.binary(4, 1000)),
            "1.1.0.1.@..q",
            {"CC": ["1.1.0.1.@..r.s"]},
            4,
            (2, "0.0.1.@..q", ["0.0.1.@..r.s"]),
        ),
        # What is due later than its way takes is left alone, and so is what cannot be read.
        (Topology(Ladder.binary(4, 1000)), "1.@..q", {}, 5, None),
        (Topology(Ladder.binary(4, 1000)), "what", {}, 5, None),
        (
            FOREIGN_LADDERS["celery"],
            "0." * 24 + "1.0.1.1.q.r",
            {},
            9.5,
            (27, "0." * 24 + "1.0.1.0.q.r", None),
        ),
        (
            FOREIGN_LADDERS["nservicebus"],
            "0." * 24 + "1.0.1.1.q",
            {},
            3,
            (1, "0." * 26 + "1.1.q", None),
        ),
    ],
)
def test_a_message_that_stays_enters_its_ladder_again_for_what_remains(
    topology, key, headers, left, again
):
    now = 1_000_000
    due = {"x-binary-delay": {"due": now + round(left * 1000)}}
    properties = {"application_headers": {**due, **headers}, "priority": 3}

    outgoing = put_back(Source("q", topology, 8000, 3), key, properties, now)

    if again is None:
        assert outgoing is None
        return
    assert outgoing is not None
    level, key, copies = again
    copies = {} if copies is None else {"CC": copies}
    assert (outgoing.exchange, outgoing.routing_key) == (topology.level_name(level), key)
    assert outgoing.properties == {"application_headers": {**due, **copies}, "priority": 3}


def test_a_broker_that_goes_away_ends_a_migration_and_loses_nothing(
    connect, vhost, small, operator
):
    old = Topology(Ladder.binary(10, 500), queue_type=small.queue_type)
    connection = connect(confirm_publish=True, binary_delay={"tick": 500, "radix": 2, "levels": 10})
    Queue("mail")(connection.channel()).declare()
    publish(connection, "mail", *[300_000] * 5)
    there = ours(vhost, **{**SETTINGS, "levels": 10})()
    there.connect()
    sock = there.connection.transport.sock

    def cut(_):
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    with sock, pytest.raises(UnreachableError, match="went away"):
        migrate(
            operator.plain,
            lambda: there,
            operator.management,
            old,
            Topology(Ladder.binary(10, 1000), queue_type=small.queue_type),
            progress=cut,
        )

    wait_until(lambda: sum(waiting(vhost, old).values()) == 5)


def test_a_message_with_blind_copies_is_moved_with_them(connect, collect, tall, operator):
    old = Topology(Ladder.binary(10, 500), queue_type=tall.queue_type)
    connection = connect(confirm_publish=True, binary_delay={"tick": 500, "radix": 2, "levels": 10})
    queues = [Queue(name)(connection.channel()) for name in ("mail", "audit")]
    for queue in queues:
        queue.declare()
    for attempt in attempts(10_000, 120_000):
        publish(connection, "mail", attempt.delay, BCC=["audit"])

        done = operator.migrate(old, tall, **TALL)
        attempt.end()

        arrivals = collect(connection, queues, 2, timeout=attempt.limit)

    assert (done.moved, done.left) == (1, 0)
    assert sorted(arrival.queue for arrival in arrivals) == ["audit", "mail"]
    assert [arrival.headers for arrival in arrivals] == [{}] * 2


def test_tasks_with_a_future_eta_leave_an_ordinary_queue_and_others_stay(
    connect, collect, tall, operator
):
    plain = operator.plain
    # One of Celery's ladder is named alike.
    name = "celery_delayed_emails"
    connection = connect(confirm_publish=True, binary_delay=TALL)
    queue, other = (Queue(name)(connection.channel()) for name in (name, "other"))
    for declared in (queue, other):
        declared.declare()
    for attempt in attempts(*RESTS):
        other.purge()
        due = datetime.fromtimestamp(attempt.due, UTC)
        etas = {"a": None, "later": due.isoformat(), "b": "2020-01-01T00:00:00Z"}
        with plain() as client:
            for id_, eta in etas.items():
                client.Producer().publish(
                    id_,
                    routing_key=name,
                    headers={"task": "t", "id": id_, "eta": eta, "CC": ["other"]},
                )

        done = operator.migrate(name, tall, **TALL)
        attempt.end()

        arrivals = collect(connect("amqp"), [queue], 3, timeout=attempt.limit)

    assert (done.moved, done.kept) == (1, 2)
    at = {arrival.body: arrival.at for arrival in arrivals}
    assert set(at) == {"a", "b", "later"}
    assert operator.vhost.waiting("other") == {"other": 3}, "it has its own copies"
    assert at["later"] >= due.timestamp()


@pytest.mark.parametrize("name", ["endpoint", "an.end.point"])
def test_nservicebus_moves_from_its_first_ladder_to_its_second(broker, connect, name, operator):
    vhost = operator.vhost
    plain = operator.plain
    if broker.release not in ((3, 10), (4, 0)):
        pytest.skip("both ladders of NServiceBus can be declared on RabbitMQ 3.10 to 4.2 only")
    v1, v2 = FOREIGN_LADDERS["nservicebus-v1"], FOREIGN_LADDERS["nservicebus"]
    with plain() as client:
        create(client, v1, v1.whole + v2.whole)
        Queue(name)(client.channel()).declare()
        for delay, elapsed in VECTORS:
            sent = datetime.now(UTC) - timedelta(seconds=elapsed)
            digits = v1.ladder.digits(delay * 1000)
            client.Producer().publish(
                f"{delay}",
                exchange=v1.level_name(level_at(v1, delay, elapsed)),
                routing_key=v1.address(digits, Destination("", name)),
                headers={
                    "NServiceBus.TimeSent": sent.strftime("%Y-%m-%d %H:%M:%S:%f Z"),
                    "NServiceBus.Transport.RabbitMQ.DelayInSeconds": delay,
                },
            )
        client.Producer().publish("?", exchange=v1.level_name(9), routing_key="1." * 20)

    done = migrate(plain, plain, operator.management, v1, v2)

    # The one of no delay left has gone on at once, to the endpoint: it may have done so by itself.
    assert done.left == 0
    assert done.moved in (len(VECTORS), len(VECTORS) - 1)
    wait_until(lambda: vhost.waiting(name)[name] >= 1)
    waiting = vhost.waiting(*(queue.name for queue in v2.whole.queues))
    # Those that are in one for half a minute at least, however long all of this took.
    levels = [level for (_, elapsed), (_, level) in VECTORS.items() if level > 5]
    assert {key for key, count in waiting.items() if count} >= {
        v2.level_name(level) for level in levels
    }


#: NServiceBus's own: (delay, elapsed) -> (remaining, level that it enters), in seconds.
VECTORS = {
    (10, 10): (0, 0),
    (32, 30): (2, 1),
    (64, 30): (34, 5),
    (128, 30): (98, 6),
    (86_400, 43_200): (43_200, 15),
    (604_800, 259_200): (345_600, 18),
}


def level_at(ladder, delay, elapsed):
    """Return the level that a message waits in ``elapsed`` seconds after it was sent."""
    digits = ladder.ladder.digits(delay * 1000)
    waits = [
        level for level, digit in zip(range(len(digits))[::-1], digits, strict=True) if "1" in digit
    ]
    left = {level: sum(2**wait for wait in waits if wait < level) for level in waits}
    return next(level for level in waits if delay - elapsed >= left[level])


@pytest.mark.parametrize("queue", ["some-endpoint", "some.end.point"])
@pytest.mark.parametrize("delay", VECTORS)
def test_what_remains_is_what_nservicebus_says(queue, delay):
    v1, v2 = FOREIGN_LADDERS["nservicebus-v1"], FOREIGN_LADDERS["nservicebus"]
    now = datetime(2030, 1, 31, 12, tzinfo=UTC)
    headers = {
        "NServiceBus.TimeSent": f"{now - timedelta(seconds=delay[1]):%Y-%m-%d %H:%M:%S:%f Z}",
        "NServiceBus.Transport.RabbitMQ.DelayInSeconds": delay[0],
    }
    key = v1.address(v1.ladder.digits(delay[0] * 1000), Destination("", queue))
    epoch = round(now.timestamp() * 1000)
    at = level_at(v1, *delay)

    reading = read(Source("q", v1, 2**at * 1000, at), key, {"application_headers": headers}, epoch)

    assert reading is not None
    left, level = VECTORS[delay]
    digits = v2.ladder.digits(max(reading.due - epoch, 0))
    assert (max(reading.due - epoch, 0), v2.height(digits)) == (left * 1000, level)
    assert v2.parse(v2.address(digits, reading.destination)) == (digits, Destination("", queue))


def test_without_a_due_time_the_whole_of_the_level_and_of_those_below_is_waited():
    topology = Topology(Ladder.binary(4, 1000))
    key = topology.address(tuple("1011"), Destination("", "mail"))

    reading = read(Source("q", topology, 8000, 3), key, {}, 1_000_000)
    lower = read(Source("q", topology, 2000, 1), key, {}, 1_000_000)

    assert reading is not None
    assert lower is not None
    assert (reading.due, lower.due) == (1_011_000, 1_003_000)


NOW = datetime(2030, 1, 31, 12, tzinfo=UTC)


def nservicebus(delay, sent, retried=None):
    """Say as NServiceBus does how many seconds ago a message was sent, and with which delay."""
    times = {"NServiceBus.TimeSent": sent, "NServiceBus.Retries.Timestamp": retried}
    return {
        "NServiceBus.Transport.RabbitMQ.DelayInSeconds": delay,
        **{
            name: f"{NOW - timedelta(seconds=ago):%Y-%m-%d %H:%M:%S:%f Z}"
            for name, ago in times.items()
            if ago is not None
        },
    }


def in_seconds(seconds):
    return NOW + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("name", "level", "delay", "headers", "left"),
    [
        # All of 60 s: 32, 16, 8 and 4. In the queue of 32 s, at least 28 s are left.
        ("nservicebus", 5, 60, nservicebus(60, sent=10), 50),
        ("nservicebus", 5, 60, nservicebus(60, sent=20, retried=5), 55),
        ("nservicebus", 5, 60, nservicebus(60, sent=3600), 60),
        ("nservicebus", 5, 60, nservicebus(60, sent=3600, retried=33), 60),
        ("nservicebus", 5, 60, nservicebus(60, sent=-1), 60),
        ("nservicebus", 2, 60, nservicebus(60, sent=3600), 4),
        # A stock worker resends our header with its retry.
        ("celery", 5, 60, {"x-binary-delay": {"due": in_seconds(-5)}, "eta": in_seconds(50)}, 50),
        ("celery", 5, 60, {"x-binary-delay": {"due": in_seconds(55)}, "eta": in_seconds(50)}, 55),
        ("celery", 5, 60, {"x-binary-delay": {"due": in_seconds(55)}}, 55),
        ("celery", 5, 60, {"eta": in_seconds(50)}, 50),
    ],
)
def test_what_is_told_of_an_earlier_sending_makes_nothing_early(name, level, delay, headers, left):
    ladder = FOREIGN_LADDERS[name]
    now = round(NOW.timestamp() * 1000)
    headers = {"task": "t", **headers}
    if "x-binary-delay" in headers:
        headers["x-binary-delay"] = {
            "due": round(headers["x-binary-delay"]["due"].timestamp() * 1000)
        }
    key = ladder.address(ladder.ladder.digits(delay * 1000), Destination("", "q"))
    source = Source("x", ladder, 2**level * 1000, level)

    reading = read(source, key, {"application_headers": headers}, now)

    assert reading is not None
    assert max(reading.due - now, 0) == left * 1000


def test_what_cannot_be_decoded_leaves_a_ladder_for_the_poison_queue_and_a_queue_not_at_all(
    vhost, tall, operator
):
    """Given: one that would be copied, twice, and one that would expire."""
    copied = b"\2CCA" + pack(">I", 10) + b"S" + pack(">I", 5) + b"other"
    raw = [
        table(b"\1tT" + b"\xff" * 8 + copied + copied),
        # An expiration and a message_id.
        pack(">H", 0x180) + b"\x0860000000" + b"\1\xff",
    ]
    with operator.plain() as connection:
        channel = connection.default_channel
        create(connection, tall, tall.whole)
        for name in ("mail", "other", "tasks"):
            Queue(name)(channel).declare()
        digits = tall.ladder.digits(HOUR // 2)
        enter = tall.entry_exchange(digits), tall.address(digits, Destination("", "mail"))
        for exchange, key in (enter, ("", "tasks")):
            for header in raw:
                channel.basic_publish(RawMessage(b"odd", header), exchange, key)
            channel.basic_publish(amqp.Message(b"key"), exchange, key.encode() + b"\xff")
            channel.basic_publish(amqp.Message("m"), exchange, key)
        wait_until(lambda: vhost.waiting("tasks") == {"tasks": 3})
        copies = vhost.waiting("other")["other"]
        taller = Topology(Ladder.binary(13, 1000), queue_type=tall.queue_type)

        moved = operator.migrate(tall, taller, **{**TALL, "levels": 13})
        kept = operator.migrate("tasks", taller, **{**TALL, "levels": 13})

    assert (moved.moved, moved.poison, moved.left) == (1, 3, 0)
    assert any(f"in {queue.name!r}" in moved.reasons[0] for queue in tall.whole.queues)
    assert (kept.kept, kept.left, kept.poison) == (1, 2, 0)
    assert vhost.waiting("other", "tasks") == {"other": copies, "tasks": 3}
    moved_properties = [
        Properties(properties) for _, properties in raw_messages(vhost, moved.poison_queue)
    ]
    assert [properties.names for properties in moved_properties] == [
        {"application_headers"},
        {"application_headers", "message_id"},
        {"application_headers"},
    ]
    assert all(
        b"\x15x-binary-delay-poisonF" in properties.headers for properties in moved_properties
    )
    assert b"other" in moved_properties[0].headers
    assert b"60000000" in moved_properties[1].headers


@dataclass(frozen=True)
class Properties:
    raw: bytes

    @property
    def names(self):
        return set(split(self.raw))

    @property
    def headers(self):
        return split(self.raw)[HEADERS]


def test_what_cannot_be_read_goes_to_the_poison_queue(connect, small, collect, operator):
    plain = operator.plain
    old = Topology(Ladder.binary(4, 60_000), queue_type=small.queue_type)
    with plain() as client:
        create(client, old, old.whole)
        client.Producer().publish("?", exchange=old.level_name(3), routing_key="0.0.0.1.what")
        client.Producer().publish(
            "??",
            exchange=old.level_name(3),
            routing_key="0.0.0.1.@..mail",
            headers={"task": "t", "eta": "tomorrow"},
        )

    done = operator.migrate(old, small)

    assert (done.moved, done.poison) == (0, 2)
    arrivals = collect(connect("amqp"), [Queue(done.poison_queue, no_declare=True)], 2)
    assert {arrival.body for arrival in arrivals} == {"?", "??"}
    assert {arrival.headers["x-binary-delay-poison"]["queue"] for arrival in arrivals} == {
        f"{old.level_name(3)}.1"
    }


def test_what_cannot_be_read_goes_whole_to_the_poison_queue_of_each_type_and_to_no_other(
    vhost, small, operator
):
    """Given: a message with a copy in another queue, on a broker that has queues of both types."""
    ladders = [replace(small, queue_type=kind) for kind in {small.queue_type, "classic"}]
    poison = [f"{ladder.delivery_prefix}.poison" for ladder in ladders]
    with operator.plain() as client:
        for name in ("tasks", "audit"):
            Queue(name)(client.channel()).declare()
    for ladder, name in zip(ladders, poison, strict=True):
        with operator.plain() as client:
            client.Producer().publish(
                "?",
                routing_key="tasks",
                headers={"task": "t", "eta": "tomorrow", "CC": ["audit"]},
                expiration=3600,
            )

        done = operator.migrate("tasks", ladder, **SETTINGS, queue_type=ladder.queue_type)

        assert (done.poison, done.poison_queue) == (1, name)
    assert vhost.waiting("audit", *poison) == {"audit": len(ladders), **dict.fromkeys(poison, 1)}
    with vhost.connect() as reader:
        message = reader.channel().basic_get(poison[0])
    assert (message.headers.get("CC"), message.properties.get("expiration")) == (None, None)
    noted = message.headers["x-binary-delay-poison"]
    assert (noted["CC"], noted["expiration"]) == (["audit"], "3600000")


def test_a_task_that_goes_to_the_end_of_its_queue_is_copied_to_no_other():
    message = amqp.Message("m", application_headers={"CC": ["audit"], "mine": 1})

    again = _requeue(Source("tasks"), message, "kept")

    assert again is not None
    assert (again.exchange, again.routing_key) == ("", "tasks")
    assert again.message.headers == {"mine": 1}


def test_transfer_takes_what_waits_to_another_virtual_host(
    broker, connect, tall, collect, operator
):
    connection = connect(confirm_publish=True, binary_delay=TALL)
    for attempt in attempts(*RESTS):
        # What is late arrives here, in a queue of its own.
        name = f"mail-{attempt.delay}"
        Queue(name)(connection.channel()).declare()
        other = broker.vhost()
        try:
            with ours(other, **TALL)() as there:
                queue = Queue(name)(there.channel())
                queue.declare()
                attempt.began = time.time()
                publish(connection, name, attempt.delay, attempt.delay + 1000)
                done = migrate(operator.plain, ours(other, **TALL), operator.management, tall, tall)
                attempt.end()
                arrivals = collect(there, [queue], done.moved, timeout=attempt.limit)
        finally:
            other.delete()

    assert done.moved == 2
    assert all(arrival.at - attempt.began >= float(arrival.body) / 1000 for arrival in arrivals)
    assert operator.vhost.waiting(name) == {name: 0}


_MIGRATE = """
import sys
from functools import partial
from kombu import Connection
from kombu_binary_delay import Ladder, Topology
from kombu_binary_delay.operate import Management, migrate
url, api, kind = sys.argv[1:]
plain = partial(Connection, url)
with plain() as connection:
    management = Management.of(connection, api)
ours = partial(
    Connection, url, transport="kombu_binary_delay:Transport",
    transport_options={"binary_delay": {"tick": 1000, "radix": 2, "levels": 10}},
)
old = Topology(Ladder.binary(12, 500), queue_type=kind)
print("go", flush=True)
migrate(plain, ours, management, old, Topology(Ladder.binary(10, 1000), queue_type=kind))
"""


def fill(connection, count, delay):
    """Delay numbered messages on the connection's ladder."""
    channel = connection.channel()
    Queue("mail")(channel).declare()
    with PublishBatch(channel) as batch:
        for number in range(count):
            headers = {"x-delay": delay(number), "number": number}
            message = amqp.Message(str(number), application_headers=headers, delivery_mode=2)
            batch.publish(message, "", "mail", tag=number)


def numbers(vhost, topology):
    """Consume what waits in a ladder, and return how often each number is there."""
    counts: Counter[int] = Counter()
    with vhost.connect() as reader:
        for name in vhost.waiting(*(queue.name for queue in topology.whole.queues)):
            channel = reader.channel()
            while (message := channel.basic_get(name, no_ack=True)) is not None:
                counts[message.headers["number"]] += 1
            channel.close()
    return counts


@pytest.mark.slow
def test_undisturbed_a_migration_doubles_nothing(connect, vhost, small, operator):
    # More than fit into the broker's hands at once, on many levels: acknowledgements come in bulk.
    old = Topology(Ladder.binary(20, 500), queue_type=small.queue_type)
    new = Topology(Ladder.binary(20, 1000), queue_type=small.queue_type)
    fill(
        connect(confirm_publish=True, binary_delay={"tick": 500, "radix": 2, "levels": 20}),
        3000,
        lambda n: 600_000 * (1 + n % 99),
    )

    done = operator.migrate(old, new, tick=1000, radix=2, levels=20)

    assert done.moved == 3000
    assert numbers(vhost, new) == dict.fromkeys(range(3000), 1)


@pytest.mark.slow
def test_killed_again_and_again_a_migration_loses_nothing(broker, connect, vhost, small):
    kind = small.queue_type
    old = Topology(Ladder.binary(12, 500), queue_type=kind)
    fill(
        connect(confirm_publish=True, binary_delay={"tick": 500, "radix": 2, "levels": 12}),
        4000,
        lambda n: 900_000 + n,
    )

    def start():
        argv = [sys.executable, "-c", _MIGRATE, vhost.url, broker.management_url, kind]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, env={**os.environ})
        assert process.stdout is not None
        assert process.stdout.readline() == b"go\n"
        return process

    for seconds in (0.4, 0.7, 1.0):
        process = start()
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    process = start()
    assert process.wait(300) == 0
    process.stdout.close()

    assert not any(vhost.waiting(*(queue.name for queue in old.whole.queues)).values())
    counts = numbers(vhost, Topology(Ladder.binary(10, 1000), queue_type=kind))
    assert counts.keys() == set(range(4000))


def test_a_ladder_that_cannot_take_a_delay_leaves_the_message_where_it_is(
    connect, vhost, small, operator
):
    old = Topology(Ladder.binary(10, 2000), queue_type=small.queue_type)
    connection = connect(
        confirm_publish=True, binary_delay={"tick": 2000, "radix": 2, "levels": 10}
    )
    Queue("mail")(connection.channel()).declare()
    publish(connection, "mail", 500_000)

    done = operator.migrate(old, small)

    assert (done.moved, done.left) == (0, 1)
    assert "longer than 15 s" in done.reasons[0]
    wait_until(
        lambda: sum(vhost.waiting(*(queue.name for queue in old.whole.queues)).values()) == 1
    )


ODD = [
    {"x-delivery-count": "abc"},
    {"x-delivery-count": {"a": [1]}},
    {"x-binary-delay": {"due": "soon"}},
    {"x-binary-delay": {"due": -(2**60)}},
    {"x-binary-delay": {"due": 2**62}},
    {"x-binary-delay": {"due": 2**60}, "x-delay-jitter": 5, "eta": "2030-01-01", "task": "t"},
    {"eta": "9999-12-31T23:59:59-23:59", "task": "t", "x-delay-jitter": 5},
    {"x-binary-delay": ["due"]},
    {"x-binary-delay": {"due": 1, "expiration": "soon"}},
    {"x-binary-delay": {"due": 1, "cc": [1], "death": 5, "to": 7}},
    {"x-death": "x", "eta": 5, "task": "t"},
    {"eta": "9999-99-99", "task": "t"},
    {"CC": ["x"]},
]


@pytest.mark.parametrize("subcommand", ["migrate", "redrive"])
def test_no_odd_message_or_queue_ends_it(subcommand, vhost, topology, operator):
    """Given: what other programs have put into queues of the ladder, or named like one of its."""
    ladder = Topology(Ladder.binary(4, 60_000), queue_type=topology.queue_type)
    level, odd_queue = f"{ladder.level_name(3)}.1", f"{ladder.direct}.XXms"
    keys = "1.1.1.1.@..mail", "9.9.9.1.@..mail", "", "no address", "0.0.0.1.@.%.x"
    total = len(ODD) * len(keys)
    with operator.plain() as connection:
        create(connection, ladder, ladder.whole)
        for name in ("mail", odd_queue):
            Queue(name)(connection.channel()).declare()
        enter = ladder.entry_exchange(("1", "0", "0", "0"))
        exchange = enter if subcommand == "migrate" else ladder.parking
        for headers in ODD:
            for key in keys:
                connection.Producer().publish(
                    "m", exchange=exchange, routing_key=key, headers=headers
                )

    if subcommand == "migrate":
        to = {**SETTINGS, "tick": 120_000}
        done = operator.migrate(
            ladder, Topology(Ladder.binary(4, 120_000), queue_type=ladder.queue_type), **to
        )
        assert done.moved + done.poison + done.left == total
        assert done.poison >= 3 * len(ODD)
    else:
        done = redrive(operator.plain, ladder, to=Destination("", "mail"))
        assert done.sent + done.stays == total
        assert done.sent >= total - len(keys), "one of them says that it is due in the year 10,000"
    assert vhost.waiting(odd_queue) == {odd_queue: 0}
    assert level in vhost.waiting(level)


def test_a_queue_that_hands_its_messages_to_somebody_else_ends_it_and_is_named(small, operator):
    """Given: a queue with a single active consumer, which has no room for more."""
    with operator.plain() as connection:
        channel = connection.channel()
        alone = {"x-single-active-consumer": True}
        Queue("alone", queue_arguments=alone)(channel).declare()
        channel.basic_qos(0, 1, False)  # noqa: FBT003 - as AMQP has it
        channel.basic_consume("alone", consumer_tag="other", callback=lambda _: None)
        for _ in range(4):
            connection.Producer().publish("m", routing_key="alone")

        done = operator.migrate("alone", small)

    assert (done.moved, done.left) == (0, 3)
    assert "'alone' hands out nothing" in done.reasons[0]


def test_what_cannot_be_moved_hides_nothing_that_is_behind_it(vhost, small, operator, monkeypatch):
    """Given: more messages that stay than the mover has room for, before one that can be moved."""
    monkeypatch.setattr(mover, "PREFETCH", 100)
    many = 2 * mover.PREFETCH
    ladder = Topology(Ladder.binary(4, 60_000), queue_type=small.queue_type)
    with operator.plain() as connection:
        create(connection, ladder, ladder.whole)
        Queue("mail")(connection.channel()).declare()
        exchange = ladder.entry_exchange(("1", "0", "0", "0"))
        with PublishBatch(connection.channel()) as batch:
            for key in ("gone",) * many + ("mail",) * 3:
                batch.publish(amqp.Message("m", delivery_mode=2), exchange, f"0.0.0.1.@..{key}")

    done = migrate(
        operator.plain, operator.plain, operator.management, ladder, FOREIGN_LADDERS["nservicebus"]
    )

    assert (done.moved, done.left) == (3, many)
    level = f"{ladder.level_name(3)}.1"
    wait_until(lambda: vhost.waiting(level) == {level: many})


def is_waiting(pid):
    """Return whether a process uses no CPU for a second."""

    def used():
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]

    before = used()
    time.sleep(1)
    return used() == before


def test_the_command_ends_soon_after_an_interrupt_though_the_broker_is_silent(vhost, plain, small):
    with plain() as connection:
        create(connection, small, small.base)
        Queue("mail")(connection.default_channel).declare()
        with PublishBatch(connection.default_channel) as batch:
            for _ in range(5000):
                batch.publish(amqp.Message("m"), small.parking, "@..mail")
    command = [sys.executable, "-m", "kombu_binary_delay.cli", "redrive"]
    with Proxy(urlsplit(vhost.url).port or 5672) as proxy:
        place = ["-b", proxy.through(vhost.url), "--queue-type", small.queue_type]
        running = subprocess.Popen([*command, *place, "-m", vhost.broker.management_url])
        try:
            wait_until(lambda: vhost.waiting(small.parking)[small.parking] < 5000)
            proxy.hold()
            wait_until(partial(is_waiting, running.pid))
            running.send_signal(signal.SIGINT)
            running.wait(timeout=PATIENCE)
        finally:
            running.kill()
            running.wait()

    assert running.returncode != 0
    wait_until(lambda: sum(vhost.waiting(small.parking, "mail").values()) >= 5000)


def test_an_interrupt_within_a_frame_ends_in_time_and_loses_nothing(
    parked, operator, small, vhost, monkeypatch
):
    monkeypatch.setattr(mover, "_ANSWER", 1.0)
    taking, aside, sending = (operator.plain() for _ in range(3))

    def decide(_):
        # The head of the next frame, and no more.
        taking.connection.transport._read(7)  # noqa: SLF001 - py-amqp's way to read
        raise KeyboardInterrupt

    with taking, aside, sending:
        moving = mover.Mover(taking, aside, sending)
        with pytest.raises((KeyboardInterrupt, OSError, amqp.AMQPError)):
            moving.run(small.parking, decide, requeue=lambda *_: None)

    wait_until(lambda: vhost.waiting(small.parking) == {small.parking: 4})


def test_a_migration_leaves_no_channel_open(vhost, small, operator):
    """Given: messages for more destinations than the broker lets a connection have channels."""
    names = [f"q{number}" for number in range(300)]
    opened = []
    with operator.plain() as connection:
        create(connection, small, small.whole)
        for name in names[::2]:
            Queue(name)(connection.channel()).declare()
        for name in names:
            exchange, key = small.entry_exchange((1, 1, 1, 1)), f"1.1.1.1.@..{name}"
            connection.Producer().publish("m", exchange=exchange, routing_key=key)

    def connect():
        opened.append(Connection(vhost.url))
        return opened[-1]

    with patch.object(Connection, "release"):
        migrate(connect, connect, operator.management, small, FOREIGN_LADDERS["nservicebus"])

    # Also those that a handle leads to no more.
    assert max(len(connection.connection._used_channel_ids) for connection in opened) < 10  # noqa: SLF001
    for opened_connection in opened:
        opened_connection.close()


def test_nothing_is_moved_to_a_ladder_of_ours_by_a_transport_that_does_not_delay(
    connect, plain, management, small, tall
):
    connection = connect(binary_delay=SETTINGS)
    Queue("mail")(connection.default_channel).declare()
    publish(connection, "mail", 14_000)
    with pytest.raises(OperationError, match="without the transport kombu_binary_delay:Transport"):
        migrate(plain, plain, management, small, tall)
    assert plan(connection, Snapshot.read(management), small).messages == 1


def test_acknowledgements_count_however_late_and_close_together_they_arrive(vhost, small):
    rest = Queue("q", queue_arguments={"x-queue-type": small.queue_type})
    with Connection(vhost.url) as connection:
        rest(connection.default_channel).declare()
        for number in range(100):
            connection.Producer().publish(number, routing_key="q")
        wait_until(lambda: vhost.waiting("q") == {"q": 100})
    taken: list[Any] = []
    with (
        Proxy(urlsplit(vhost.url).port or 5672) as proxy,
        Connection(proxy.through(vhost.url)) as connection,
    ):
        channel = amqp.Channel(connection.connection)
        channel.open()
        acks = mover.Acks(channel)
        channel.basic_consume("q", "t", callback=taken.append)
        while len(taken) < 100:
            connection.drain_events(timeout=PATIENCE)
        channel.basic_cancel("t")
        for message in taken[1:]:
            acks.add(message.delivery_tag)
        # In less time than that, they were believed to have arrived.
        proxy.hold()
        threading.Timer(2, proxy.reads.set).start()
        acks.send()
        channel.close()

    wait_until(lambda: vhost.waiting("q") == {"q": 1})


def test_a_queue_that_does_not_exist_is_named(small, operator):
    with pytest.raises(OperationError, match="'nowhere' does not exist"):
        operator.migrate("nowhere", small)


def test_a_move_makes_no_relay_for_a_queue_that_refuses_nothing(connect, tall, operator):
    connection = connect(confirm_publish=True, binary_delay={"tick": 500, "radix": 2, "levels": 10})
    old = Topology(Ladder.binary(10, 500), queue_type=tall.queue_type)
    Queue("mail")(connection.channel()).declare()
    publish(connection, "mail", 500_000)

    done = operator.migrate(old, tall, **TALL)

    assert done.moved == 1
    names = {row["name"] for row in operator.vhost.queues()}
    assert not [name for name in names if ".relay-to-queue." in name]
