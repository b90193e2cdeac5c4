"""What a channel keeps in mind of a program's calls, on the broker of the kit."""

from __future__ import annotations

import pytest
from amqp.exceptions import FrameSyntaxError
from kombu import Connection

from kombu_binary_delay import Outcome, PublishBatch
from kombu_binary_delay.wire.following import is_consuming
from tests.testing.programs import OURS


def publish(channel, key, exchange="", **headers):
    message = channel.prepare_message(b"", headers=headers)
    channel.basic_publish(message, exchange, key)


@pytest.mark.parametrize("kind", ["direct", "topic", "fanout"])
def test_of_two_bindings_that_differ_in_arguments_the_last_ends_the_delayed_route(delayed, kind):
    with Connection("amqp://", transport=OURS) as connection:
        channel = connection.default_channel
        channel.exchange_declare("post", kind, auto_delete=False)
        channel.queue_declare("mail", auto_delete=False)
        for number in (1, 2):
            channel.queue_bind("mail", "post", "k", arguments={"number": number})

        def arrives():
            parked = len(delayed.parked())
            publish(channel, "k", "post", **{"x-delay": 2000})
            delayed.advance(seconds=3)
            assert (channel.basic_get("mail", no_ack=True) is None) == len(
                delayed.parked()
            ) - parked
            return len(delayed.parked()) == parked

        assert arrives()
        channel.queue_unbind("mail", "post", "k", arguments={"number": 1})
        assert arrives()
        channel.queue_unbind("mail", "post", "k", arguments={"number": 2})
        assert not arrives()


def test_a_batch_that_publishes_first_leaves_no_later_publish_waiting_for_the_broker(delayed):
    for _ in range(2):
        with Connection("amqp://", transport=OURS) as connection:
            connection.default_channel.queue_declare("mail", auto_delete=False)
            publish(connection.default_channel, "mail", **{"x-delay": 2000})
    with Connection("amqp://", transport=OURS) as connection:
        channel = connection.default_channel
        came: list[object] = []
        with PublishBatch(channel) as batch:
            message = channel.prepare_message(b"", headers={"x-delay": 2000})
            batch.publish(message, "", "mail")
        delayed.advance(seconds=3)
        channel.basic_consume("mail", no_ack=True, callback=came.append)
        publish(channel, "mail", **{"x-delay": 2000})
        # py-amqp itself reads what may be the reason why a connection is blocked.
        assert len(came) <= 1


def test_a_consumer_that_could_not_begin_is_forgotten(delayed):
    with Connection("amqp://", transport=OURS) as connection:
        channel = connection.default_channel
        channel.queue_declare("mail", auto_delete=False)
        with pytest.raises(FrameSyntaxError):
            channel.basic_consume("mail", callback=print, arguments={"x": object()})
        assert not is_consuming(connection.connection)


def test_a_batch_that_a_callback_closes_during_a_publish_does_not_take_the_message(delayed):
    with Connection("amqp://", transport=OURS) as connection:
        channel = connection.channel()
        outcomes: list[Outcome] = []
        channel.queue_declare("mail", auto_delete=False)
        batch = PublishBatch(channel, on_outcome=outcomes.append)
        consumer = connection.channel()
        consumer.basic_consume("mail", no_ack=True, callback=lambda _: batch.close())
        publish(channel, "mail")
        message = channel.prepare_message(b"", headers={"x-delay": 3_600_000})
        with pytest.raises(RuntimeError, match="closed"):
            batch.publish(message, "", "mail", tag=1)
        assert outcomes == []


def test_a_publish_within_a_callback_leaves_the_limit_of_the_one_that_it_interrupts(delayed):
    limits: list[float] = []
    options = {"confirm_publish": True}
    with Connection("amqp://", transport=OURS, transport_options=options) as connection:
        channel = connection.channel()
        channel.queue_declare("mail", auto_delete=False)
        consumer = connection.channel()
        consumer.basic_consume("mail", no_ack=True, callback=lambda _: publish(channel, "mail2"))
        way_out = channel.mechanism.way_out
        ready = way_out.ready

        def noting(properties, destination, limit, **options):
            limits.append(limit)
            return ready(properties, destination, limit, **options)

        way_out.ready = noting
        with Connection("amqp://", transport=OURS) as other:
            publish(other.channel(), "mail")
        message = channel.prepare_message(b"", headers={"x-delay": 2000})
        channel.basic_publish(message, "", "mail", confirm_timeout=5)
        assert limits == [5]
