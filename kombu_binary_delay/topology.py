"""Exchanges, queues and bindings as frozen values, computed from a ladder. Pure.

Declaring, exporting, drawing, verifying and walking are readers of this one table.

The ladder side is one topic exchange per level, and per digit above 0 one queue whose messages
expire after the digit's weight into the exchange of the level below. The delivery side is the
delivery exchange and what stands behind it: for a destination on the default exchange the queue
itself; for any other exchange its *shadow*, a topic exchange with the same bindings, made narrower
by the fixed width of the digits. A headers exchange, or one of a type that a topic exchange cannot
imitate, has an *outlet* behind its shadow: a queue that expires at once into the real exchange.
Every exchange here has the parking queue as its alternate: what finds no way waits there, and
never blocks the level that it came from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

from .address import (
    Destination,
    exchange_word,
    format_address,
    parse_address,
    pattern_words,
    route,
)
from .errors import AddressError
from .ladder import MAX_KEY, Ladder

#: Changes when names or arguments do, so that an upgrade never redeclares anything differently.
VERSION = "v1"
QUEUE_TYPES = ("quorum", "classic")
#: The exchange types whose bindings a topic exchange can imitate.
IMITABLE = ("direct", "topic", "fanout")

Arguments = tuple[tuple[str, str | int], ...]


@dataclass(frozen=True)
class Exchange:
    """A durable exchange."""

    name: str
    type: str = "topic"
    arguments: Arguments = ()


@dataclass(frozen=True)
class Queue:
    """A durable queue."""

    name: str
    arguments: Arguments


@dataclass(frozen=True)
class Binding:
    """From an exchange to a queue or, where ``to_queue`` is false, to another exchange."""

    source: str
    destination: str
    key: str
    to_queue: bool = True
    arguments: Arguments = ()


@dataclass(frozen=True)
class Part:
    """Some exchanges, queues and bindings that belong together, in the order of declaring."""

    exchanges: tuple[Exchange, ...] = ()
    queues: tuple[Queue, ...] = ()
    bindings: tuple[Binding, ...] = ()

    def __add__(self, other: Part) -> Part:
        return Part(
            self.exchanges + other.exchanges,
            self.queues + other.queues,
            self.bindings + other.bindings,
        )


@dataclass(frozen=True)
class Topology:
    """A ladder as it stands on a broker: same value, same names, on every machine.

    :param namespace: the first word of every name: letters, digits, ``-`` and ``_``.
    :param queue_type: ``"quorum"`` or ``"classic"``.
    """

    ladder: Ladder = field(default_factory=Ladder.binary)
    namespace: str = "kbd"
    queue_type: str = "quorum"

    # -- names ---------------------------------------------------------------------------------

    @cached_property
    def prefix(self) -> str:
        """What every name of this topology begins with; the ladder can be read back from it."""
        kind = "" if self.queue_type == "quorum" else f"-{self.queue_type}"
        return f"{self.namespace}.{VERSION}-{self.ladder.name}{kind}"

    @cached_property
    def delivery(self) -> str:
        """The name of the delivery exchange."""
        return f"{self.prefix}.delivery"

    @cached_property
    def parking(self) -> str:
        """The name of the parking queue, and of the exchange before it."""
        return f"{self.prefix}.parking"

    def level_name(self, level: int) -> str:
        """Name the exchange of a level; 0 is the lowest, -1 what is below it: delivery."""
        return f"{self.prefix}.level-{level:02d}" if level >= 0 else self.delivery

    def shadow_name(self, exchange: str) -> str:
        """Name the shadow of an exchange."""
        return self._behind("to", exchange)

    def outlet_name(self, exchange: str) -> str:
        """Name the queue that leads back to an exchange."""
        return self._behind("outlet", exchange)

    def owns(self, name: object) -> bool:
        """Whether an exchange or queue is a part of any ladder in this namespace."""
        return isinstance(name, str) and name.startswith(f"{self.namespace}.{VERSION}-")

    # -- the ladder side -----------------------------------------------------------------------

    @cached_property
    def base(self) -> Part:
        """The parking queue and the delivery exchange: what the levels stand on."""
        parking = Queue(self.parking, (("x-queue-type", self.queue_type),))
        return Part(
            (Exchange(self.parking, "fanout"), self._exchange(self.delivery)),
            (parking,),
            (Binding(self.parking, self.parking, ""),),
        )

    @cached_property
    def levels(self) -> tuple[Part, ...]:
        """One part per level, lowest first, as they have to be declared."""
        return tuple(self._level(level) for level in range(self.ladder.levels))

    @cached_property
    def whole(self) -> Part:
        """The base and every level in one part."""
        return sum(self.levels, self.base)

    def height(self, digits: tuple[int, ...]) -> int:
        """Tell the level of the first non-zero digit, where a message enters; -1 for none."""
        for position, digit in enumerate(digits):
            if digit:
                return self.ladder.levels - 1 - position
        return -1

    # -- the delivery side ---------------------------------------------------------------------

    @cached_property
    def room(self) -> int:
        """The bytes of an address that are left to the destination."""
        return MAX_KEY - self.ladder.prefix_length

    def address(
        self, digits: tuple[int, ...], destination: Destination, *, topic: bool = False
    ) -> str:
        """Write the routing key that takes a message to ``destination`` after ``digits``."""
        return format_address(digits, destination, room=self.room, topic=topic)

    def unwrap(self, destination: Destination, carried: Destination | None = None) -> Destination:
        """Start from the destination of what is an address already, so that retries never grow.

        A key is taken for an address only where the exchange is a ladder's: a user's own key that
        looks like an address stays what it is.
        """
        if not self.owns(destination.exchange):
            return destination
        try:
            return parse_address(destination.routing_key, carried)[1]
        except AddressError:
            return destination

    def to_queue(self, queue: str) -> Part:
        """Lead from delivery to a queue that is addressed through the default exchange."""
        key = self._any_digits + route(Destination("", queue), room=self.room)
        return Part(bindings=(Binding(self.delivery, queue, key),))

    def shadow(self, exchange: str) -> Part:
        """Lead from delivery to the shadow of an exchange."""
        name = self.shadow_name(exchange)
        key = f"{self._any_digits}{exchange_word(exchange)}.#"
        return Part(
            (self._exchange(name),), (), (Binding(self.delivery, name, key, to_queue=False),)
        )

    def outlet(self, exchange: str) -> Part:
        """Lead from the shadow of an exchange back to the exchange itself, at most once."""
        outlet = Queue(
            self.outlet_name(exchange),
            (
                ("x-queue-type", self.queue_type),
                ("x-message-ttl", 0),
                ("x-dead-letter-exchange", exchange),
            ),
        )
        binding = Binding(self.shadow_name(exchange), outlet.name, "#")
        return self.shadow(exchange) + Part((), (outlet,), (binding,))

    def mirror(
        self, exchange: str, exchange_type: str, destination: str, key: str, *, to_queue: bool
    ) -> Binding:
        """Repeat a binding of an exchange on its shadow.

        :param exchange_type: one of :data:`IMITABLE`.
        :param destination: a queue, or an exchange, whose shadow is then bound.
        :raises AddressError: where a topic pattern is too long to stand behind the digits.
        """
        target = destination if to_queue else self.shadow_name(destination)
        source = self.shadow_name(exchange)
        if exchange_type == "fanout":
            # A fanout ignores its keys, yet each is a binding of its own, to be undone by itself.
            arguments = (("x-binary-delay-key", key),)
            return Binding(source, target, "#", to_queue, arguments)
        if exchange_type == "topic":
            words = pattern_words(key)
        else:
            words = route(Destination(exchange, key), room=self.room)
            words = words.removeprefix(exchange_word(exchange))
        pattern = f"{self._any_digits}*{words}"
        if len(pattern.encode()) > MAX_KEY:
            raise AddressError(
                f"the binding key {key!r} of the exchange {exchange!r} takes more than the "
                f"{MAX_KEY - len(self._any_digits) - 2} bytes that a pattern behind "
                f"{self.ladder.levels} digits has; delayed messages for it will be parked"
            )
        return Binding(source, target, pattern, to_queue)

    # -- how they are made ---------------------------------------------------------------------

    @cached_property
    def _any_digits(self) -> str:
        return "*." * self.ladder.levels

    def _behind(self, what: str, exchange: str) -> str:
        name = f"{self.prefix}.{what}.{exchange}"
        if len(name.encode()) <= MAX_KEY:
            return name
        return f"{self.prefix}.{what}!{blake2b(exchange.encode(), digest_size=20).hexdigest()}"

    def _exchange(self, name: str) -> Exchange:
        return Exchange(name, "topic", (("alternate-exchange", self.parking),))

    def _level(self, level: int) -> Part:
        name, below = self.level_name(level), self.level_name(level - 1)
        position = self.ladder.levels - 1 - level
        radix, weight = self.ladder.radices[position], self.ladder.weights[position]
        before = "*." * position
        queues = tuple(
            Queue(f"{name}.{digit}", self._waiting(digit * weight, below))
            for digit in range(1, radix)
        )
        down = Binding(name, below, f"{before}0.#", to_queue=False)
        waits = tuple(
            Binding(name, queue.name, f"{before}{digit}.#")
            for digit, queue in enumerate(queues, start=1)
        )
        return Part((self._exchange(name),), queues, (*waits, down))

    def _waiting(self, ttl: int, below: str) -> Arguments:
        arguments: Arguments = (
            ("x-queue-type", self.queue_type),
            ("x-message-ttl", ttl),
            ("x-dead-letter-exchange", below),
        )
        if self.queue_type == "quorum":
            # At least once needs reject-publish, or RabbitMQ falls back to at most once.
            arguments += (
                ("x-dead-letter-strategy", "at-least-once"),
                ("x-overflow", "reject-publish"),
            )
        return arguments


__all__ = ["Binding", "Exchange", "Part", "Queue", "Topology"]
