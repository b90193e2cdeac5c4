"""A channel of ours gets messages that py-amqp cannot decode, on any connection, and goes on."""

from struct import pack
from typing import Any

import amqp
import pytest

from kombu_binary_delay.wire.undecodable import Undecodable, take_undecodable, undecodable
from tests.broker.conftest import OURS
from tests.raw_messages import RAW, RawMessage, table
from tests.waits import PATIENCE, drain_until


@pytest.mark.parametrize("transport", ["amqp", OURS])
def test_what_cannot_be_decoded_comes_as_it_was_sent(connect, vhost, transport):
    connection = connect(transport)
    sender = connect("amqp").connection.channel()
    queue = sender.queue_declare("", exclusive=False, auto_delete=False).queue
    channel = amqp.Channel(connection.connection, auto_decode=False)
    channel.open()
    take_undecodable(channel)
    taken: list[Any] = []
    channel.basic_consume(queue, no_ack=True, callback=taken.append)
    for body in (b"body", b""):
        for raw in RAW.values():
            sender.basic_publish(RawMessage(body, raw), "", queue)
    copy = amqp.Message(b"key", application_headers={"CC": [queue]})
    sender.basic_publish(copy, "", b"a\xff")
    for fields in (b"\1t?", b"\1tS" + pack(">I", 99)):
        # A field of an unknown type, and one that is cut off, get no further than the broker.
        other = vhost.connect()
        other.channel().basic_publish(RawMessage(b"odd", table(fields)), "", queue)
        with pytest.raises(amqp.InternalError):
            other.drain_events(timeout=PATIENCE)
    sender.basic_publish(amqp.Message(b"last", message_id="i"), "", queue)

    drain_until(connection, lambda: taken and taken[-1].body == b"last")

    bodies = [body for body in (b"body", b"") for _ in RAW]
    assert [message.body or b"" for message in taken] == [*bodies, b"key", b"last"]
    for message, (error, raw) in zip(taken, [*RAW.items(), *RAW.items()], strict=False):
        cut = undecodable(message)
        assert cut
        assert (cut.properties, cut.routing_key) == (raw, b"")
        assert cut.why.startswith(error.split(":")[0])
    *_, key, last = taken
    raw = copy._serialize_properties()  # noqa: SLF001 - as it was sent
    assert undecodable(key) == Undecodable("its routing key is not UTF-8", raw, b"a\xff")
    assert key.delivery_info["routing_key"] == ""
    assert undecodable(last) is None
    assert last.properties == {"message_id": "i"}


def test_an_error_of_a_callback_is_raised_once(connect):
    connection = connect("amqp")
    channel = connection.connection.channel()
    take_undecodable(channel)
    taken: list[Any] = []

    def fail(message):
        taken.append(message)
        raise ValueError("of the program")

    queue = channel.queue_declare("", exclusive=True).queue
    channel.basic_consume(queue, no_ack=True, callback=fail)
    channel.basic_publish(amqp.Message(b""), "", queue)
    with pytest.raises(ValueError, match="of the program"):
        drain_until(connection, lambda: len(taken) > 1)

    assert len(taken) == 1
