"""A record of amendments that rides the ladder counts though an operator moves it on the way."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
from kombu import Queue

from kombu_binary_delay import Ladder, Topology, cancel
from kombu_binary_delay.admin import Management, migrate, redrive
from kombu_binary_delay.admin.migrate import _requeue
from kombu_binary_delay.admin.reading import sources
from kombu_binary_delay.amendments import parts
from kombu_binary_delay.amendments.record import Cancel
from kombu_binary_delay.mechanism import mechanism_of
from tests.waits import wait_until

pytestmark = pytest.mark.usefixtures("streams")

EXCHANGE = parts.exchange_name("kbd")


def riding(connect, seconds):
    """Cancel what is due far ahead, for a stream that keeps records for two seconds."""
    eta = datetime.now(UTC) + timedelta(seconds=seconds)
    cancel("x", eta=eta, connection=connect(binary_delay={"amendments_max_age": "2s"}))


def spy(connect):
    """Make a queue that gets what the exchange of amendments leads to the stream."""
    channel = connect("amqp").channel()
    queue = Queue("spy")(channel)
    queue.declare()
    channel.queue_bind("spy", EXCHANGE, parts.IDS)
    return queue


def test_a_record_that_was_parked_counts_when_it_is_sent_on(connect, vhost):
    """Given: somebody deletes the stream while the record is on its way."""
    riding(connect, 3600)  # declares all that the next one takes
    for seconds in (15, 90):
        early = time.monotonic() + seconds - 2
        riding(connect, seconds)
        vhost.broker.api("DELETE", f"queues/{vhost.name}/{parts.stream_name('kbd', parts.IDS)}")
        if time.monotonic() < early:
            break
        # It was in the stream before.
    topology = Topology()
    wait_until(lambda: vhost.waiting(topology.parking) == {topology.parking: 1})
    queue = spy(connect)
    management = Management.of(connect("amqp"), vhost.broker.management_url)

    done = redrive(lambda: connect("amqp"), topology, management)

    assert (done.sent, done.stays) == (1, 0), done
    assert "cancel" in str(wait_until(lambda: queue.get(no_ack=True)).body)


def test_a_record_that_is_put_back_enters_by_its_own_exchange(connect, vhost):
    riding(connect, 3600)
    topology = Topology()
    queues = {row["name"]: row for row in vhost.queues()}
    channel = connect("amqp").channel()

    def taken():
        for source in sources(topology, queues):
            message = channel.basic_get(source.name)
            if message is not None:
                return source, message
        return None

    source, message = wait_until(taken)
    again = _requeue(source, message, "again")

    assert again is not None
    assert again.exchange == EXCHANGE
    channel.basic_publish(again.message, again.exchange, again.routing_key, mandatory=True)
    channel.basic_ack(message.delivery_tag)
    # There is a way for it, and it waits in one queue of the same ladder again.
    names = [each.name for each in sources(topology, queues)]
    wait_until(lambda: sum(vhost.waiting(*names).values()) == 1)


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
    taken = [channel.basic_get(each.name) for each in sources(new, queues)]
    found = [each.headers["x-binary-delay"]["due"] for each in taken if each is not None]
    # They reach the stream a second before.
    assert sorted(found) == [each - 1000 for each in dues]
