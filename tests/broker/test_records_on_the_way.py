"""A record of amendments that waits on the ladder counts though an operator moves it on the way."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import amqp
import pytest

from kombu_binary_delay import Ladder, Topology, cancel
from kombu_binary_delay.amendments import parts
from kombu_binary_delay.amendments.record import Cancel, to_line
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.operate import Management, OperationError, migrate, redrive
from kombu_binary_delay.operate.migrate import _requeue
from kombu_binary_delay.operate.reading import Source, sources
from kombu_binary_delay.wire.mechanism import mechanism_of
from tests.waits import wait_until

EXCHANGE = parts.exchange_name("kbd")


@pytest.fixture(scope="module")
def radix():
    """The commands are asked about the default ladder."""


def riding(connect, seconds, **settings):
    """Cancel what is due far ahead, for a stream that keeps records for two seconds."""
    eta = datetime.now(UTC) + timedelta(seconds=seconds)
    connection = connect(binary_delay={"amendments_max_age": "2s", **settings})
    cancel("x", eta=eta, connection=connection)


def riding_while(connect, step):
    """Cancel, and take a step while the record is on its way: on a slow machine, a longer way."""
    for seconds in (8, 60):
        early = time.monotonic() + seconds - 2
        riding(connect, seconds)
        step()
        if time.monotonic() < early:
            break
        # It had arrived before.


def in_levels(connection, topology, queues):
    """Take the records that wait, each with its level's queue."""
    channel = connection.channel()
    taken = ((source, channel.basic_get(source.name)) for source in sources(topology, queues))
    return [(queue, message) for queue, message in taken if message is not None]


def test_a_record_that_was_parked_stays_since_its_headers_prove_nothing(connect, vhost):
    """Given: somebody deletes the queue by which it leaves the ladder, while it is on its way."""
    riding(connect, 3600)  # declares all that the next one takes
    topology = Topology()
    later = parts.way_of_records(topology).routing_key
    riding_while(connect, lambda: vhost.broker.api("DELETE", f"queues/{vhost.name}/{later}"))
    wait_until(lambda: vhost.waiting(topology.parking) == {topology.parking: 1})
    management = Management.of(connect("amqp"), vhost.broker.management_url)

    done = redrive(lambda: connect("amqp"), topology, management)

    assert (done.sent, done.stays) == (0, 1), done
    assert "cancel again" in str(done.reasons)


def test_what_was_parked_for_the_exchange_of_amendments_stays(connect, vhost):
    """Given: a record by who may write to the levels alone, for an exchange that has no mirror."""
    cancel("x", connection=connect())
    topology = Topology()
    # This makes the ladder.
    connect().Producer().publish("m", routing_key="none", headers={"x-delay": 1})
    digits = topology.ladder.digits(125)
    address = topology.address(digits, Destination(EXCHANGE, parts.IDS), topic=True)
    forged = amqp.Message(to_line(Cancel(("y",), time.time_ns() // 1_000_000)))
    connect("amqp").default_channel.basic_publish(forged, topology.level_of(digits), address)
    wait_until(lambda: vhost.waiting(topology.parking) == {topology.parking: 2})
    management = Management.of(connect("amqp"), vhost.broker.management_url)
    place = Destination(EXCHANGE, parts.IDS)

    def taken(**options):
        return redrive(lambda: connect("amqp"), topology, management, only=place, **options)

    done = taken()
    assert (done.sent, done.stays) == (0, 2), done
    assert "streams of amendments" in str(done.reasons)
    with pytest.raises(OperationError, match="part of a ladder"):
        taken(to=place)


def test_a_stream_that_is_made_again_gets_the_records_that_are_on_their_way(connect, vhost):
    riding(connect, 3600)
    stream = parts.stream_name("kbd", parts.IDS)
    riding_while(connect, lambda: vhost.broker.api("DELETE", f"queues/{vhost.name}/{stream}"))
    topology = Topology()
    levels = [queue.name for level in topology.levels[:3] for queue in level.queues]
    wait_until(lambda: not sum(vhost.waiting(*levels).values()))

    cancel("another", connection=connect())

    wait_until(lambda: vhost.waiting(stream) == {stream: 2})
    assert vhost.waiting(topology.parking) == {topology.parking: 0}


def test_a_record_that_is_put_back_enters_by_its_own_exchange(connect, vhost):
    riding(connect, 3600)
    topology = Topology()
    queues = {row["name"]: row for row in vhost.queues()}
    [(source, message)] = wait_until(lambda: in_levels(connect("amqp"), topology, queues))
    again = _requeue(source, message, "again")

    assert again is not None
    assert again.exchange == EXCHANGE
    channel = message.channel
    channel.basic_publish(again.message, again.exchange, again.routing_key, mandatory=True)
    channel.basic_ack(message.delivery_tag)
    # There is a way for it, and it waits in one queue of the same ladder again.
    names = [source.name for source in sources(topology, queues)]
    wait_until(lambda: sum(vhost.waiting(*names).values()) == 1)


def test_a_record_is_left_where_nothing_shows_that_it_entered_by_its_exchange(connect, vhost):
    """Given: one as if it had come down from a higher level, by who may write to the levels."""
    settings = {"radix": 2, "levels": 20, "amendments_max_age": "2s"}
    riding(connect, 3600, **settings)
    old, new = (Topology(Ladder.binary(20, tick)) for tick in (125, 250))
    forged = to_line(Cancel(("y",), time.time_ns() // 1_000_000))
    digits = old.ladder.digits(3_600_000)
    address = old.address(digits, parts.way_of_records(old))
    headers = {parts.ENTERED: EXCHANGE}
    connect("amqp").default_channel.basic_publish(
        amqp.Message(forged, application_headers=headers), old.level_of(digits), address
    )

    done = migrate(
        lambda: connect("amqp"),
        lambda: connect(binary_delay={**settings, "tick": 250}),
        Management.of(connect("amqp"), vhost.broker.management_url),
        old,
        new,
    )

    assert (done.moved, done.left) == (1, 1), done
    [(_, message)] = in_levels(connect("amqp"), old, {row["name"] for row in vhost.queues()})
    assert message.body == forged
    assert _requeue(Source("q", old, 1, len(digits) - 1), message, "again") is None


def test_a_record_that_is_to_come_twice_is_moved_twice_each_for_its_own_time(connect, vhost):
    """Given: the cancellation of tasks that are due at two times, as a Spark job writes it."""
    now = time.time_ns() // 1_000_000
    settings = {"radix": 2, "levels": 20, "amendments_max_age": "2s"}
    dues = [now + 3_600_000, now + 7_200_000]
    connection = connect(binary_delay=settings)
    mechanism = mechanism_of(connection.connection)
    assert mechanism is not None
    for due in dues:
        mechanism.amendments.write_ahead(Cancel(("x", "y"), now, dues[-1]), due)
    old, new = (Topology(Ladder.binary(20, tick)) for tick in (125, 250))

    done = migrate(
        lambda: connect("amqp"),
        lambda: connect(binary_delay={**settings, "tick": 250}),
        Management.of(connect("amqp"), vhost.broker.management_url),
        old,
        new,
    )

    assert (done.moved, done.left) == (2, 0)
    channel, queues = connect("amqp").channel(), {row["name"]: row for row in vhost.queues()}
    taken = [channel.basic_get(source.name) for source in sources(new, queues)]
    moved_dues = [
        message.headers["x-binary-delay"]["due"] for message in taken if message is not None
    ]
    # They reach the stream a second before.
    assert sorted(moved_dues) == [due - 1000 for due in dues]
