"""Whatever is published, and whatever comes in: nothing lost, misdelivered or crashed.

Ten thousand and more inputs from a generator with a seed of its own, on one connection each, so
that the whole of it takes seconds. What an undelayed publish delivers on the same broker is the
measure of what a delayed one has to.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import suppress
from decimal import Decimal
from typing import Any

import amqp
import pytest
from kombu import Exchange, Queue

from kombu_binary_delay import BinaryDelayError, Topology
from kombu_binary_delay.ladder.parts import Part
from kombu_binary_delay.ladder.simulate import walk
from tests.waits import PATIENCE, wait_until

#: In each test: fifteen thousand together.
PUBLISHED = 2000
FORGED = 4500
#: More does not fit beside the digits; the keys here are far shorter, or far longer.
MAX_TOPIC_KEY = 165

#: Exchange, routing key and body, as they are sent; behind the queue, as they arrive.
Sent = tuple[str, str, str]
Arrival = tuple[str, str, str, str]

DELAYS: list[Any] = [1, 1, 1, 125, 250, "1", "2.5", 0.1, 100.0, Decimal("0.001"), 0, "0"]
BAD_DELAYS: list[Any] = [
    -1, "-1", "soon", "", None, True, b"1", [1], {"ms": 1}, float("nan"), float("inf"), 10**30,
    "9" * 400, "1e400", "0x10", {"x-delay": 1}, "\x00", " ",
]  # fmt: skip
WORDS = [
    "a", "b", "order", "#", "*", "@", "!", "%", "%2E", "%23", "!x", "", " ", "é", "0", "1",
    "x" * 50,
]  # fmt: skip
ADDRESSES = [
    "0.1.@..a", "1.@..a", "@..a", "@.x.a", "#.@..a", "*.@..a", "1.1.1.1.1.1.1.@.direct.a",
    "0.@.", "1.@", "@", "1.", ".", "..", "1.0.1", "kbd.v2.delivery", "01.@..a", "-1.@..a",
    "2.@..a", "9.9.@..a", "1.@.%.a", "1.@.%ZZ.a", "1.@..%", "1.@.!" + "0" * 40 + ".a",
    "1.@..!" + "f" * 40, "1" * 200, "1." * 120 + "@",
]  # fmt: skip
JUNK: list[Any] = [
    None, True, 0, -1, 2**40, 1.5, "", "x", b"\x00\xff", [], [1], ["x"], {}, {"a": 1}, [[]], [{}],
    {"to": 1}, {"x": {"y": [1]}}, [{"queue": 5}], [{"queue": "theirs", "count": 1}], Decimal("1.5"),
]  # fmt: skip
OURS = (
    "x-binary-delay", "x-death", "x-first-death-queue", "x-last-death-queue",
    "x-first-death-reason", "x-first-death-exchange", "x-last-death-exchange", "eta", "task",
    "x-delay",
)  # fmt: skip
FIELDS = ("due", "to", "expiration", "death", "cc", "unknown")


def some_key(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(ADDRESSES)
    return ".".join(rng.choice(WORDS) for _ in range(rng.randint(0, 4)))


def some_packed(rng: random.Random) -> Any:
    """Forge the header that travels with a delayed message."""
    if rng.random() < 0.3:
        return rng.choice(JUNK)
    values = [*JUNK, ["", "b"], ["direct", "a"], ["b"], "1"]
    return {name: rng.choice(values) for name in FIELDS if rng.random() < 0.5}


def some_headers(rng: random.Random, *but: str) -> dict[str, Any]:
    headers: dict[str, Any] = {}
    for name in OURS:
        if name not in but and rng.random() < 0.15:
            headers[name] = some_packed(rng) if name == "x-binary-delay" else rng.choice(JUNK)
    if rng.random() < 0.5:
        headers["mine"] = rng.choice(JUNK)
    return headers


class Ground:
    """Exchanges of most types with queues behind them, and all that comes to those queues."""

    QUEUES = ("a", "b", "order", "all", "odd", "fan", "literal")

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        direct, topic = Exchange("direct", "direct"), Exchange("topic", "topic")
        keys = (
            (direct, "a"),
            (direct, "0.1.@..a"),
            (topic, "order.*"),
            (topic, "#"),
            (topic, "*.@.#"),
            (Exchange("fan", "fanout"), ""),
            (direct, "#"),
        )
        self.bindings = list(zip(self.QUEUES, keys, strict=True))
        for queue, (exchange, key) in self.bindings:
            Queue(queue, exchange, key, channel=connection.default_channel).declare()

    def part(self, topology: Topology) -> Part:
        """Return what the ladder has to lead to, by the pure topology."""
        part = sum(topology.levels[:3], topology.base)
        for name in ("direct", "topic", "fan"):
            part += topology.mirror(name)
        for queue, (exchange, key) in self.bindings:
            mirrored = topology.mirror_bindings(
                exchange.name, exchange.type, queue, key, to_queue=True
            )
            part += topology.to_queue(queue) + Part(bindings=mirrored)
        return part

    def take(self, count: int, more: str = "", timeout: float = PATIENCE) -> Counter[Arrival]:
        """Consume through our transport until so many have come, and then a little longer."""
        taken: Counter[Arrival] = Counter()
        channel = self.connection.channel()

        def receive(queue: str) -> Any:
            def received(raw: Any) -> None:
                message = channel.message_to_python(raw)
                assert "x-binary-delay" not in (message.headers or {})
                info = message.delivery_info
                body = message.body if isinstance(message.body, str) else message.body.decode()
                taken[queue, info["exchange"], info["routing_key"], body] += 1

            return received

        for queue in (*self.QUEUES, more) if more else self.QUEUES:
            channel.basic_consume(queue, no_ack=True, callback=receive(queue))
        end = time.monotonic() + timeout
        late = None
        while time.monotonic() < (end if late is None else late):
            with suppress(TimeoutError):
                self.connection.drain_events(timeout=0.1)
            if late is None and taken.total() >= count:
                late = time.monotonic() + 0.7
        channel.close()
        return taken


def undelayed(connection: Any, ground: Ground, vhost: Any, sent: list[Sent]) -> Counter[Arrival]:
    """Publish the same once more without a delay, and see where it goes."""
    channel = connection.default_channel
    for exchange, key, body in sent:
        channel.basic_publish(amqp.Message(body), exchange, key)
    channel.queue_declare("a", passive=True)  # an answer, so all of them have been routed
    return ground.take(sum(vhost.waiting(*ground.QUEUES).values()))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_delayed_publish_is_a_clear_error_or_goes_exactly_where_an_undelayed_one_goes(
    connect, vhost, topology, seed
):
    rng = random.Random(seed)
    ground = Ground(connect())
    channel = ground.connection.default_channel
    refused = 0
    sent: list[Sent] = []
    on_ladder: set[str] = set()
    for number in range(PUBLISHED):
        exchange, key = rng.choice(["", "direct", "topic", "fan"]), some_key(rng)
        headers = some_headers(rng, "x-delay", "task")
        bad = rng.random() < 0.1
        headers["x-delay"] = delay = rng.choice(BAD_DELAYS if bad else DELAYS)
        if rng.random() < 0.1:
            eta = rng.choice([*JUNK, "2001-01-01", "soon", "2001-01-01T00:00:00Z"])
            headers |= {"task": "t", "eta": eta}
            bad = bad or not (eta is None or str(eta).startswith("2001"))
        delayed = delay not in (0, "0")
        if not delayed:
            # Nobody takes it off then, and with it a key that imitates an address is read as one.
            headers.pop("x-binary-delay", None)
        before = dict(headers)
        message = amqp.Message(str(number), application_headers=headers)
        if bad or (delayed and exchange == "topic" and len(key) > MAX_TOPIC_KEY):
            with pytest.raises(BinaryDelayError):
                channel.basic_publish(message, exchange, key)
            refused += 1
        else:
            channel.basic_publish(message, exchange, key)
            sent.append((exchange, key, str(number)))
            if delayed:
                on_ladder.add(str(number))
        assert headers == before
    assert refused > PUBLISHED / 20

    # An error of the channel would be found here at the latest.
    other = vhost.broker.vhost()
    try:
        elsewhere = connect("amqp", url=other.url)
        expected = undelayed(elsewhere, Ground(connect(url=other.url)), other, sent)
    finally:
        other.delete()
    arrived = ground.take(expected.total())

    assert arrived == expected
    # What no queue wants is parked. Undelayed, it would be dropped.
    unwanted = on_ladder - {body for *_, body in expected}
    wait_for_parked(vhost, topology, len(unwanted))


#: Destination and properties of messages that no frame of AMQP can be of, or that RabbitMQ refuses.
IMPOSSIBLE: list[tuple[Any, Any, dict[str, Any]]] = [
    ("", "q" * 256, {}),
    ("", "\ud800", {}),
    ("\ud800", "k", {}),
    ("e" * 256, "k", {}),
    ("amq.topic", 7, {}),
    ("", ["a"], {}),
    ("", "a", {"application_headers": {"CC": ["q" * 256]}}),
    ("", "a", {"application_headers": {"n": 2**64}}),
    ("", "a", {"application_headers": {"n": object()}}),
    ("", "a", {"application_headers": {"x-delay": 10**5000}}),
    ("", "a", {"application_headers": {"x-delay-jitter": [1], "x-delay": 125}}),
    ("", "a", {"application_headers": {"x-delay-jitter": 5, "x-delay-generation": 10**5000}}),
    ("", "a", {"expiration": "soon"}),
    ("", "a", {"expiration": 5}),
    ("", "a", {"priority": "high"}),
    ("", "a", {"message_id": "i" * 256}),
]


def test_what_amqp_cannot_say_is_refused_by_our_errors_and_the_channel_goes_on(connect, vhost):
    channel = connect().default_channel
    Queue("a", channel=channel).declare()
    for exchange, key, properties in IMPOSSIBLE:
        headers = {"x-delay": 125, **properties.get("application_headers", {})}
        message = amqp.Message("m", **{**properties, "application_headers": headers})

        with pytest.raises(BinaryDelayError):
            channel.basic_publish(message, exchange, key)

        good = amqp.Message("m", application_headers={"x-delay": 125})
        channel.basic_publish(good, "", "a")
    wait_until(lambda: vhost.waiting("a") == {"a": len(IMPOSSIBLE)})


def test_a_message_for_no_queue_at_all_is_parked_and_binds_nothing_of_the_ladders(
    connect, vhost, topology
):
    """To AMQP, an empty name is the queue that a channel declared last: one of the ladder's own."""
    connect().Producer().publish("x", routing_key="", headers={"x-delay": 250, "CC": [""]})

    wait_for_parked(vhost, topology, 1)
    assert not [
        row
        for row in vhost.bindings()
        if row["source"] == topology.delivery and row["destination_type"] == "queue"
    ]


def test_what_is_forged_on_the_ladder_goes_where_the_topology_says_or_is_parked(
    connect, vhost, topology
):
    rng = random.Random(4)
    ground = Ground(connect())
    part = ground.part(topology)
    # The first makes two levels, and the second the mirrors.
    for body, exchange in (("first", ""), ("second", "direct")):
        headers = {"x-delay": 64 * 125}
        ground.connection.Producer().publish(body, "a", exchange=exchange, headers=headers)
    rogue = connect("amqp").default_channel
    doors = [topology.delivery]
    doors += [exchange.name for level in topology.levels[:2] for exchange in level.exchanges]
    doors += [topology.mirror_name(name) for name in ("direct", "topic", "fan")]
    expected: Counter[tuple[str, str]] = Counter({("a", "first"): 1, ("a", "second"): 1})
    for number in range(FORGED):
        door, key = rng.choice(doors), forged_address(rng)
        # RabbitMQ itself drops what has the x-death of a cycle.
        headers = some_headers(rng, "x-death")
        rogue.basic_publish(amqp.Message(str(number), application_headers=headers), door, key)
        expected.update((queue, str(number)) for queue in walk(part, door, key).arrived)

    arrived = ground.take(expected.total(), more=topology.parking)

    assert Counter((queue, body) for queue, _, _, body in arrived.elements()) == expected
    assert {body for *_, body in arrived} == {"first", "second", *map(str, range(FORGED))}


def test_a_consumer_takes_every_forged_message_in_its_queue_and_none_crashes_it(connect, vhost):
    rng = random.Random(5)
    ground = Ground(connect())
    rogue = connect("amqp").default_channel
    sent: list[Sent] = []
    for number in range(FORGED):
        exchange = rng.choice(["", "direct", "topic", "fan"])
        key = forged_address(rng) if rng.random() < 0.5 else some_key(rng)
        headers = some_headers(rng)
        rogue.basic_publish(amqp.Message(str(number), application_headers=headers), exchange, key)
        sent.append((exchange, key, str(number)))
    rogue.queue_declare("a", passive=True)
    arrived = ground.take(sum(vhost.waiting(*ground.QUEUES).values()))

    expected = undelayed(connect("amqp"), ground, vhost, sent)

    def places(arrivals: Counter[Arrival]) -> Counter[tuple[str, str, str]]:
        # A key that is an address, beside our header, is read as one.
        return Counter((queue, exchange, body) for queue, exchange, _, body in arrivals.elements())

    assert places(arrived) == places(expected)


def forged_address(rng: random.Random) -> str:
    """Write an address, and now and then cut it short or write a stray character into it."""
    digits = "".join(rng.choice("0011129") + "." for _ in range(rng.randint(0, 5)))
    exchange = rng.choice(["", "", "direct", "topic", "fan", "none", "%", "!x", "*", "direct.a"])
    address = f"{digits}@.{exchange}.{some_key(rng)}"[:255]
    if rng.random() < 0.3:
        address = address[: rng.randint(0, len(address))]
    if rng.random() < 0.2:
        at = rng.randint(0, len(address))
        address = address[:at] + rng.choice(".#*@!%") + address[at + 1 :]
    return address.encode()[:255].decode(errors="ignore")


def wait_for_parked(vhost: Any, topology: Topology, count: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while (parked := vhost.waiting(topology.parking)[topology.parking]) < count:
        assert time.monotonic() < deadline, f"{parked} of {count} are parked"
        time.sleep(0.1)
    assert parked == count
