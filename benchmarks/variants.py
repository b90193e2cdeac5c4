"""Purpose: the ways to delay that are compared, each as one row of a table.

All are asked the same: declare what you need, and say where a message for the inbox with this delay
goes. Celery's ladder is made by Kombu's own functions, the others as their sources have them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from kombu import Connection, Exchange, Queue
from kombu.transport.native_delayed_delivery import (
    bind_queue_to_native_delayed_delivery_exchange,
    calculate_routing_key,
    declare_native_delayed_delivery_exchanges_and_queues,
)

from kombu_binary_delay import Ladder, Topology
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.envelope import HEADER
from kombu_binary_delay.ladder.foreign import CELERY, NSERVICEBUS
from kombu_binary_delay.ladder.parts import Part
from kombu_binary_delay.wire.executor import declare

if TYPE_CHECKING:
    import amqp

    from dev.broker import VHost

INBOX = "inbox"
#: The highest level of Celery's native delivery, where all of its messages enter.
NATIVE = CELERY.level_name(CELERY.ladder.levels - 1)
_TO_INBOX = {
    "x-queue-type": "quorum",
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
    "x-dead-letter-exchange": "",
    "x-dead-letter-routing-key": INBOX,
}


class Route(NamedTuple):
    """Where to publish a message, and how long it will wait in queues, in milliseconds.

    expiration: the message's own TTL, if that is what makes it wait.
    """

    exchange: str
    key: str
    headers: dict[str, Any]
    wait: int
    expiration: str | None = None


class Variant:
    """A way to delay; this one does not."""

    title: str
    #: Delays are whole multiples of this, in milliseconds.
    tick = 1

    def declare(self, vhost: VHost, channel: amqp.Channel) -> None:
        """Make all that it needs."""

    def route(self, channel: amqp.Channel, delay: int) -> Route:
        """Say where a message with a delay in milliseconds goes."""
        del channel, delay
        return Route("", INBOX, {}, 0)


class Floor(Variant):
    """No delay at all: what any message costs."""

    title = "no delay"


@dataclass
class OnLadder(Variant):
    """A ladder whose topology is a value.

    longest: where given, no queue waits longer, in milliseconds. The way is the same, only sooner
             done; so a day's delays can be measured in seconds.
    """

    title: str
    topology: Topology
    longest: int | None = None
    _to: Destination = field(default_factory=lambda: Destination("", INBOX))

    def __post_init__(self) -> None:
        self.tick = self.topology.ladder.tick

    def declare(self, vhost: VHost, channel: amqp.Channel) -> None:
        del vhost
        part = self.topology.whole + self.topology.to_queue(INBOX)
        declare(channel, _shortened(part, self.longest))

    def route(self, channel: amqp.Channel, delay: int) -> Route:
        del channel
        topology, ladder = self.topology, self.topology.ladder
        digits = topology.ladder.digits(delay)
        key, exchange = topology.address(digits, self._to), topology.entry_exchange(digits)
        values = (int(digit, 2) for digit in digits)
        waits = [d * w for d, w in zip(values, ladder.weights[-len(digits) :], strict=True) if d]
        wait = sum(_short(duration, self.longest) for duration in waits)
        headers: dict[str, Any] = {HEADER: {"due": int(time.time() * 1000) + delay}}
        if topology.delay_header:
            headers = {topology.delay_header: delay // 1000}
        elif topology is CELERY:
            headers = {}
        return Route(exchange, key, headers, wait)


@dataclass
class CeleryNative(Variant):
    """Celery's native delayed delivery, made by the functions that Celery calls."""

    title: str
    queue_type: str = "quorum"
    tick = 1000

    def declare(self, vhost: VHost, channel: amqp.Channel) -> None:
        del channel
        inbox = Queue(INBOX, Exchange("inbox", "topic"), INBOX, no_declare=True)
        with Connection(vhost.url, transport="pyamqp") as connection:
            inbox.exchange(connection.default_channel).declare()
            declare_native_delayed_delivery_exchanges_and_queues(connection, self.queue_type)
            bind_queue_to_native_delayed_delivery_exchange(connection, inbox)

    def route(self, channel: amqp.Channel, delay: int) -> Route:
        del channel
        return Route(NATIVE, calculate_routing_key(delay // 1000, INBOX), {}, delay)


@dataclass
class QueuePerDelay(Variant):
    """A queue for each delay, that goes when it has not been used for a while.

    As in Symfony's AMQP transport and the articles: the publisher declares it each time, and
    ``x-expires`` is the delay and ten seconds more.
    """

    title: str
    queue_type: str = "classic"

    def route(self, channel: amqp.Channel, delay: int) -> Route:
        name = f"delay_inbox_{delay}"
        channel.queue_declare(
            name,
            durable=True,
            auto_delete=False,
            arguments={
                "x-queue-type": self.queue_type,
                "x-message-ttl": delay,
                "x-expires": delay + 10_000,
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": INBOX,
            },
        )
        return Route("", name, {}, delay)


class Lanes(Variant):
    """Our default ladder several times side by side, each message on the next one."""

    def __init__(self, count: int) -> None:
        self.title = f"lanes: {count}"
        self._ladders = [OnLadder("lane", lane) for lane in Topology().lanes(count)]
        self.tick = self._ladders[0].tick
        self._turns = cycle(self._ladders)

    def declare(self, vhost: VHost, channel: amqp.Channel) -> None:
        for ladder in self._ladders:
            ladder.declare(vhost, channel)

    def route(self, channel: amqp.Channel, delay: int) -> Route:
        return next(self._turns).route(channel, delay)


@dataclass
class Bare(Variant):
    """Nothing but dead-lettering: queues of one second each, one after the other.

    The broker's own price for a hop: no topic exchange, no address.
    """

    title: str
    hops: int
    queue_type: str = "quorum"

    def declare(self, vhost: VHost, channel: amqp.Channel) -> None:
        del vhost
        for hop in range(self.hops):
            arguments: dict[str, Any] = {
                "x-queue-type": self.queue_type,
                "x-message-ttl": 1000,
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": f"hop-{hop - 1}" if hop else INBOX,
            }
            if self.queue_type == "quorum":
                arguments["x-dead-letter-strategy"] = "at-least-once"
                arguments["x-overflow"] = "reject-publish"
            channel.queue_declare(
                f"hop-{hop}", durable=True, auto_delete=False, arguments=arguments
            )

    def route(self, channel: amqp.Channel, delay: int) -> Route:
        del channel, delay
        return Route("", f"hop-{self.hops - 1}", {}, 1000 * self.hops)


class BareByMessage(Variant):
    """Nothing but dead-lettering: each message waits for its own TTL, in one of some queues.

    No way to delay in general, as a message waits for all that are before it. If all are due at the
    same moment, that makes no difference, and this is all that the broker has to do.
    """

    def __init__(self, title: str, queues: int) -> None:
        self.title = title
        self._names = [f"bare-{number}" for number in range(queues)]
        self._turns = cycle(self._names)

    def declare(self, vhost: VHost, channel: amqp.Channel) -> None:
        del vhost
        for name in self._names:
            channel.queue_declare(name, durable=True, auto_delete=False, arguments=_TO_INBOX)

    def route(self, channel: amqp.Channel, delay: int) -> Route:
        del channel
        return Route("", next(self._turns), {}, delay, expiration=str(delay))


def peers(queue_type: str) -> dict[str, Variant]:
    """Return all that are compared, by their names in the results."""
    ours = Topology(queue_type=queue_type)
    three_bits = Topology(Ladder.uniform(8), queue_type=queue_type)
    two_bits = Topology(Ladder.uniform(4), queue_type=queue_type)
    binary = Topology(Ladder.binary(), queue_type=queue_type)
    skip = Topology(queue_type=queue_type, layout="skip")
    return {
        "floor": Floor(),
        "ours": OnLadder("ours: the default", ours),
        "three-bits": OnLadder("ours: three bits a level", three_bits),
        "two-bits": OnLadder("ours: two bits a level", two_bits),
        "binary": OnLadder("ours: one bit a level", binary),
        "skip": OnLadder("ours: skip", skip),
        "celery-native": CeleryNative("Celery's native delivery", queue_type),
        "nservicebus": OnLadder("NServiceBus v2 ladder", NSERVICEBUS),
        "symfony": QueuePerDelay("queue per delay with x-expires (classic)"),
    }


def shortened(longest: int) -> dict[str, Variant]:
    """Return the peers on ladders, with no wait longer than ``longest`` milliseconds a queue."""
    # A ladder of ours is made and measured in the same way as the native one.
    ladders = peers("quorum") | {"celery-native": OnLadder("Celery's native delivery", CELERY)}
    names = ("ours", "three-bits", "two-bits", "binary", "skip", "celery-native", "nservicebus")
    return {name: replace(ladders[name], longest=longest) for name in names}  # type: ignore[type-var]


def _short(wait: int, longest: int | None) -> int:
    """Return a wait in milliseconds that is no longer than ``longest``.

    Longer ones become different ones: messages that would come on different days must not come at
    the same moment.
    """
    steps, rest = divmod(wait, 125)  # a TTL is a millisecond longer than the wait
    if longest is None or steps * 125 <= longest:
        return wait
    half = longest // 2
    return half + steps * 617 % half + rest


def _shortened(part: Part, longest: int | None) -> Part:
    """Return the part with no queue that waits longer, in milliseconds."""
    return replace(
        part,
        queues=tuple(
            replace(
                queue,
                arguments=tuple(
                    (name, _short(int(value), longest) if name == "x-message-ttl" else value)
                    for name, value in queue.arguments
                ),
            )
            for queue in part.queues
        ),
    )
