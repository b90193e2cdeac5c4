"""Bodies of any size and properties and headers of every type pass the ladder unchanged."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import amqp
import pytest
from amqp.exceptions import FrameError

from kombu_binary_delay import DelayError, TopologyError
from tests.waits import wait_until

#: Every property that AMQP 0-9-1 has, apart from the headers.
PROPERTIES: dict[str, Any] = {
    "content_type": "application/x-own",
    "content_encoding": "binary",
    "delivery_mode": 2,
    "priority": 7,
    "correlation_id": "c" * 255,
    "reply_to": "é.ключ",
    "expiration": "3600000",
    "message_id": "",
    "timestamp": 981173106,
    "type": "#.*",
    "user_id": "guest",
    "app_id": "%",
    "cluster_id": "c",
}
#: A header of every type that amqp writes, its own names being those of the wire.
HEADERS: dict[str, Any] = {
    "S string": "text é ключ",
    "S empty": "",
    "x bytes": b"\x00\xff\xfe",
    "I small": -5,
    "I large": 2**31 - 1,
    "l": -(2**62),
    "d": 1.25,
    "D": Decimal("3.14"),
    "t true": True,
    "t false": False,
    "T": datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC).replace(tzinfo=None),
    "F": {"deep": {"deeper": [1, "two", None, {"three": b"3"}]}},
    "F empty": {},
    "A": [1, "two", 3.5, None, [True], {"k": "v"}],
    "A empty": [],
    "V": None,
    "name é " + "n" * 200: 1,
}
DEATH: dict[str, Any] = {
    "count": 1,
    "reason": "rejected",
    "queue": "theirs",
    "time": datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC).replace(tzinfo=None),
    "exchange": "theirs",
    "routing-keys": ["k"],
}
DEATHS: dict[str, Any] = {
    "x-death": [DEATH],
    "x-first-death-exchange": "theirs",
    "x-first-death-queue": "theirs",
    "x-first-death-reason": "rejected",
}


def get(channel: Any, queue: str) -> Any:
    return wait_until(lambda: channel.basic_get(queue, no_ack=True))


def round_trip(connection: Any, body: Any, headers: dict[str, Any], **properties: Any) -> list[Any]:
    """Publish without a delay and with one that takes three hops; return what arrives."""
    channel = connection.default_channel
    channel.queue_declare("q", durable=True, auto_delete=False)
    arrived = []
    for delay in ({}, {"x-delay": 7 * 125}):
        message = amqp.Message(body, application_headers={**headers, **delay}, **properties)
        channel.basic_publish(message, "", "q")
        arrived.append(channel.message_to_python(get(channel, "q")))
    return arrived


def test_every_property_arrives_as_that_of_an_undelayed_message(connect):
    undelayed, delayed = round_trip(connect(), b"x", {}, **PROPERTIES)

    assert delayed.properties == undelayed.properties
    for name, value in PROPERTIES.items():
        assert delayed.properties[name] == value, name


def test_headers_of_every_type_arrive_as_those_of_an_undelayed_message(connect):
    undelayed, delayed = round_trip(connect(), b"x", {**HEADERS, **DEATHS})

    arrived = delayed.properties["application_headers"]
    assert arrived == undelayed.properties["application_headers"]
    assert {name: type(value) for name, value in arrived.items()} == {
        name: type(value) for name, value in undelayed.properties["application_headers"].items()
    }
    assert set(arrived) == {*HEADERS, *DEATHS}
    assert arrived["x-death"] == [DEATH]


@pytest.mark.parametrize(
    "size", [0, 1, 4087, 4088, 131_064, 131_065, 2**20, 16 * 2**20], ids=lambda size: f"{size} B"
)
def test_a_body_of_any_size_passes(connect, size):
    body = (b"\x00\xff\n" * (size // 3 + 1))[:size]

    _, delayed = round_trip(connect(confirm_publish=True), body, {})

    arrived = delayed.body if isinstance(delayed.body, bytes) else delayed.body.encode()
    assert len(arrived) == size
    assert hashlib.sha256(arrived).digest() == hashlib.sha256(body).digest()


@pytest.mark.parametrize(
    ("delay", "size", "error", "text"),
    [
        # RabbitMQ itself refuses it, and ends the connection.
        ({}, 131_072, FrameError, r"too_large,131\d\d\d,131064"),
        # Without the ladder's header, it would fit.
        ({"x-delay": 1}, 131_000, DelayError, r"take 131\d\d\d bytes, and at most 131064"),
    ],
    ids=["undelayed", "delayed"],
)
def test_headers_that_do_not_fit_into_a_frame_are_an_error_with_the_remedy(
    connect, delay, size, error, text
):
    connection = connect(confirm_publish=True)
    headers = {"large": "x" * size, **delay}

    with pytest.raises(error, match=rf"{text}.*raise frame_max"):
        connection.Producer().publish("x", routing_key="q", headers=headers, retry=True)
    if error is DelayError:
        del headers["x-delay"]
        connection.Producer().publish("x", routing_key="q", headers=headers)
    else:
        connection.collect()


NAMES = [
    "a.b.c", ".", "..", "#", "a.#.b", "*", "a*b", "%", "%2E", "%%", "a b", " ", "\t", "ключ",
    "日本", "🐇", "@", "a.@.b", "!", "!" + "0" * 40, "0.1.@..q",
    "x" * 255, "." * 255, "%" * 255, "é" * 127,
]  # fmt: skip


def test_strange_names_of_queues_exchanges_and_keys_are_destinations_like_others(connect):
    """All of them at once, each with an exchange of its own and one that they share."""
    connection = connect()
    channel = connection.default_channel
    channel.exchange_declare("shared", "direct", durable=True, auto_delete=False)
    for name in NAMES:
        channel.queue_declare(name, durable=True, auto_delete=False)
        channel.exchange_declare(name, "direct", durable=True, auto_delete=False)
        channel.queue_bind(name, name, name)
        channel.queue_bind(name, "shared", name)
    sent = [(exchange, name) for name in NAMES for exchange in ("", name, "shared")]
    for exchange, name in sent:
        message = amqp.Message(name, application_headers={"x-delay": 1})
        channel.basic_publish(message, exchange, name)

    arrived = []
    for name in NAMES:
        for _ in range(3):
            message = channel.message_to_python(get(channel, name))
            body = message.body if isinstance(message.body, str) else message.body.decode()
            assert body == name
            info = message.delivery_info
            arrived.append((info["exchange"], info["routing_key"]))
        assert channel.basic_get(name, no_ack=True) is None
    assert sorted(arrived) == sorted(sent)


@pytest.mark.parametrize("letter", ["é", "日", "🐇"])
def test_a_long_name_that_is_not_ascii_costs_no_connection(connect, letter):
    """Of a queue declared elsewhere: the broker is asked for what may be before it."""
    name = letter * (200 // len(letter.encode()))
    connect().default_channel.queue_declare(name, durable=True, auto_delete=False)
    connection = connect(confirm_publish=True)
    channel = connection.default_channel

    channel.basic_publish(amqp.Message("m", application_headers={"x-delay": 1}), "", name)

    assert channel.message_to_python(get(channel, name)).delivery_info["routing_key"] == name


def test_a_long_name_that_the_broker_could_not_deny_is_refused_at_the_publish(connect):
    connection = connect(confirm_publish=True)
    channel, name = connection.default_channel, "é" * 120
    delayed = amqp.Message("m", application_headers={"x-delay": 1})

    with pytest.raises(TopologyError, match=r"240 bytes that is not ASCII.*declare the queue"):
        channel.basic_publish(delayed, "", name)

    channel.queue_declare(name, durable=True, auto_delete=False)
    channel.basic_publish(delayed, "", name)
    assert channel.message_to_python(get(channel, name)).delivery_info["routing_key"] == name


@pytest.mark.parametrize("kind", ["topic", "headers", "fanout", "direct"])
def test_the_type_of_an_exchange_with_a_long_name_is_read_from_the_broker(connect, kind):
    """The text of the broker's answer is cut before the type."""
    name = "x" * 200
    connect("amqp").default_channel.exchange_declare(name, kind, durable=True, auto_delete=False)
    connection = connect()
    channel = connection.default_channel
    channel.queue_declare("mail", durable=True, auto_delete=False)
    channel.queue_bind("mail", name, "a.*" if kind == "topic" else "a.b")
    # Whoever reads has its bindings repeated for delayed messages.
    assert channel.basic_get("mail") is None

    delayed = amqp.Message("m", application_headers={"x-delay": 1})
    connect().default_channel.basic_publish(delayed, name, "a.b")

    assert get(channel, "mail").body == "m"


def test_a_long_name_of_which_the_broker_cannot_tell_the_type_costs_no_connection(connect, caplog):
    name = "é" * 100
    connect("amqp").default_channel.exchange_declare(name, "topic", durable=True, auto_delete=False)
    channel = connect().default_channel
    channel.queue_declare("mail", durable=True, auto_delete=False)
    channel.queue_bind("mail", name, "#")

    channel.basic_publish(amqp.Message("at once"), name, "a")
    assert get(channel, "mail").body == "at once"
    assert "200 bytes that is not ASCII, too long for RabbitMQ to report its type" in caplog.text

    channel.exchange_declare(name, "topic", durable=True, auto_delete=False)
    channel.queue_bind("mail", name, "#")
    channel.basic_publish(amqp.Message("m", application_headers={"x-delay": 1}), name, "a")
    assert get(channel, "mail").body == "m"
