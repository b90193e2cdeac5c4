"""The exchanges, queues and bindings of a ladder, computed from its numeral system. Pure.

Declaring, exporting, drawing, verifying and walking are readers of this one table.

The ladder side is one topic exchange per level, and per digit above 0 one queue whose messages
expire after the digit's wait into the exchange of the level below. Before each of these queues
is its *entry exchange*, a fanout of the same name: the publisher knows the first digit, and a
topic exchange would take as long to read it out of the address as to store the message, or longer.

The delivery side, which all ladders of a namespace share, is the delivery exchange and what is
behind it: for a destination on the default exchange the queue itself; for any other exchange its
*mirror*, a topic exchange with the same bindings behind the digits. A headers exchange, which a
topic exchange cannot imitate, has a *relay* behind its mirror: a queue that expires at once into
the real exchange. So has a destination queue that may refuse messages: what it refuses waits in its
own relay, at least once, and not in the levels, where it would hold up all others. Every exchange
here has the parking queue as its alternate: what finds no way waits there, and never blocks the
level that it came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from kombu_binary_delay.errors import AddressError, LadderError

from .address import (
    MARK,
    Destination,
    digest,
    exchange_word,
    format_address,
    pattern_words,
    read_address,
    route,
)
from .ladder import MAX_DIGITS, MAX_KEY, Ladder
from .parts import Arguments, Binding, Exchange, Part, Queue
from .versions import lets_urgent_hold_up

#: Changes when names, keys or arguments do: an upgrade never redeclares anything differently.
VERSION = "v2"
#: The forms that a ladder may have on a broker; the older one is in :mod:`.v1`.
VERSIONS = (VERSION, "v1")
QUEUE_TYPES = ("quorum", "classic")
#: How a message gets from one level to the next: past every level between, or straight.
LAYOUTS = ("chain", "skip")
#: The exchange types whose bindings a topic exchange can imitate.
IMITABLE = ("direct", "topic", "fanout")
#: A quorum queue's dead-letter worker has at most so many messages that nobody has confirmed.
WORKER_HOLDS = 32

#: A name that is not ASCII is said in a broker's errors, which are best kept short.
_MAX_NAME_NOT_ASCII = 128


@dataclass(frozen=True)
class Topology:
    """A ladder as it is declared on a broker: same value, same names, on every machine.

    :param ladder: the numeral system; by default :meth:`Ladder.uniform`.
    :param namespace: the first word of every name: letters, digits, ``-`` and ``_``.
    :param queue_type: ``"quorum"`` or ``"classic"``.
    :param layout: ``"chain"``, where a digit 0 is a binding to the level below, or ``"skip"``,
        where each level is bound straight to the queues of every level below: fewer exchanges to
        pass, more bindings.
    :param lane: 0, or the number of one among several such ladders that lead to the same delivery
        side. The broker then spreads the leaders of its queues over the nodes of a cluster.
    :param urgent: whether it is the one for messages of a priority above 4, on releases of RabbitMQ
        where these would hold up the others: 4.0 to 4.2.
    """

    ladder: Ladder = field(default_factory=Ladder.uniform)
    namespace: str = "kbd"
    queue_type: str = "quorum"
    layout: str = "chain"
    lane: int = 0
    urgent: bool = False

    #: Whether bindings made by users are repeated on the delivery side.
    mirrors = True
    #: The form of its names and keys.
    version = VERSION
    numerals = Ladder

    @property
    def delay_header(self) -> str | None:
        """A header that says the delay in whole seconds, where somebody else's tools read it."""
        return None

    def lanes(self, count: int) -> list[Topology]:
        """Return the ladders of this kind, side by side; one alone has no number."""
        if count == 1:
            return [self]
        return [replace(self, lane=number) for number in range(1, count + 1)]

    def keeps_urgent_apart(self, server: Mapping[str, Any]) -> bool:
        """Whether messages of a high priority have a ladder of their own, beside this one.

        :param server: the properties that the broker sends when a connection opens.
        """
        return self.mirrors and self.queue_type == "quorum" and lets_urgent_hold_up(server)

    @cached_property
    def can_have_relays(self) -> bool:
        """Whether what a queue refuses comes back, and would hold up others without a relay."""
        # Only at least once does it.
        return self.mirrors and self.queue_type == "quorum"

    def wants_relay(self, queue: str, patterns: Iterable[str]) -> bool:
        """Whether a queue is to have a relay whoever declares it.

        :param patterns: of such queues' names, as the setting ``relays`` has them.
        """
        return self.can_have_relays and any(fnmatchcase(queue, each) for each in patterns)

    def for_urgent(self) -> Topology:
        """Return the ladder beside this one for messages of a high priority."""
        return replace(self, lane=0, urgent=True)

    # -- names ---------------------------------------------------------------------------------

    @cached_property
    def prefix(self) -> str:
        """What the names of the levels begin with; the ladder can be read back from it."""
        layout = "" if self.layout == "chain" else f"-{self.layout}"
        lane = f"-lane{self.lane}" if self.lane else ""
        urgent = "-urgent" if self.urgent else ""
        return (
            f"{self.namespace}.{self.version}-{self.ladder.name}{layout}{lane}{urgent}{self._kind}"
        )

    @cached_property
    def delivery_prefix(self) -> str:
        """What the names of the delivery side begin with."""
        return f"{self.namespace}.{self.version}{self._kind}"

    @cached_property
    def delivery(self) -> str:
        """The name of the delivery exchange."""
        return f"{self.delivery_prefix}.delivery"

    @cached_property
    def to_queues(self) -> str:
        """The name of the exchange that leads straight to queues, by their names.

        It is the alternate of the delivery exchange, so it sees what finds no way there: a queue
        with a relay is reached by the relay, and never both ways.
        """
        return f"{self.delivery_prefix}.to-queues"

    @cached_property
    def parking(self) -> str:
        """The name of the parking queue, and of the exchange before it."""
        return f"{self.delivery_prefix}.parking"

    def level_name(self, level: int) -> str:
        """Name the exchange of a level; 0 is the lowest, -1 what is below it: delivery."""
        return self._level_names[level]

    @cached_property
    def _level_names(self) -> tuple[str, ...]:
        names = (f"{self.prefix}.level-{level:02d}" for level in range(self.ladder.levels))
        return (*names, self.delivery)

    def mirror_name(self, exchange: str) -> str:
        """Name the mirror of an exchange."""
        return self._behind("mirror", exchange)

    def exchange_relay_name(self, exchange: str) -> str:
        """Name the queue that leads back to an exchange."""
        return self._behind("relay-to-exchange", exchange)

    def owns(self, name: object) -> bool:
        """Whether an exchange or queue is a part of any ladder in this namespace, of any form."""
        return isinstance(name, str) and name.startswith(self._owned)

    def is_named_in(self, text: str) -> bool:
        """Whether the broker's words are about a ladder of this namespace, or its delivery side."""
        return any(f"'{owned}" in text for owned in self._owned)

    # -- the ladder side -----------------------------------------------------------------------

    @cached_property
    def base(self) -> Part:
        """The parking queue and the delivery exchange, which all levels need."""
        parking = Queue(self.parking, (("x-queue-type", self.queue_type),))
        to_queues = (("alternate-exchange", self.to_queues),)
        return Part(
            (
                Exchange(self.parking, "fanout"),
                self._exchange(self.to_queues),
                Exchange(self.delivery, "topic", to_queues),
            ),
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

    def entry_exchange(self, digits: tuple[str, ...]) -> str:
        """Name the exchange where a message enters: that before the queue of its first digit."""
        return f"{self._level_names[len(digits) - 1]}.{digits[0]}" if digits else self.delivery

    def level_of(self, digits: tuple[str, ...]) -> str:
        """Name the exchange of the level where a message enters, which leads to the same queue."""
        return self.level_name(self.height(digits))

    def height(self, digits: tuple[str, ...]) -> int:
        """Return the level where a message enters: that of its first digit; -1 without digits."""
        return len(digits) - 1

    def needs(self, digits: tuple[str, ...]) -> int:
        """Return the highest level that has to exist for a message."""
        return len(digits) - 1

    def address(
        self,
        digits: tuple[str, ...],
        destination: Destination,
        *,
        topic: bool = False,
    ) -> str:
        """Write the routing key with which a message enters.

        :param topic: whether the destination is a topic exchange, or may be one.
        :raises AddressError: where the destination cannot be written.
        """
        return format_address(digits, destination, topic=topic)

    def parse(
        self, key: str, carried: Destination | None = None
    ) -> tuple[tuple[str, ...], Destination]:
        """Read a routing key of this ladder: the inverse of :meth:`address`.

        :raises AddressError: where ``key`` is none, or has digits that this ladder has not.
        """
        digits, destination = read_address(key, carried)
        try:
            self.ladder.delay(digits)
        except LadderError as exc:
            raise AddressError(f"{key!r} is not an address of the ladder: {exc}") from exc
        return digits, destination

    def destination(self, key: str, carried: Destination | None = None) -> Destination:
        """Read the destination in a routing key of any ladder with this delivery side.

        :raises AddressError: where ``key`` is no address.
        """
        return read_address(key, carried)[1]

    # -- direct queues: one for a whole delay --------------------------------------------------

    @cached_property
    def direct(self) -> str:
        """The name of the exchange before the direct queues, which serve one whole delay each."""
        return f"{self.prefix}.direct"

    @cached_property
    def direct_fallback(self) -> str:
        """The name of the exchange that leads delays without a direct queue to the levels."""
        return f"{self.prefix}.fallback"

    @cached_property
    def direct_base(self) -> Part:
        """The exchange before the direct queues, and the one for delays that have none.

        The latter is the alternate exchange of the former, and every address enters the ladder from
        it at its level: so a delay without a queue, or whose queue has been pruned, walks as any
        other does.
        """
        alternate = (("alternate-exchange", self.direct_fallback),)
        return Part(
            (self._exchange(self.direct_fallback), Exchange(self.direct, "topic", alternate))
        )

    def direct_bindings(self, level: int) -> tuple[Binding, ...]:
        """Let delays without a direct queue, whose highest digit is at ``level``, enter there."""
        lower = "*." * level
        return tuple(
            Binding(
                self.direct_fallback,
                self.level_name(level),
                f"{lower}{digit}.{MARK}.#",
                to_queue=False,
            )
            for digit in self._words(level)[1:]
        )

    def direct_queue(self, digits: tuple[str, ...]) -> Part:
        """Lead one delay through one queue, straight to delivery."""
        delay = self.ladder.delay(digits)
        queue = self._waiting(f"{self.direct}.{delay}ms", delay, self.delivery)
        lowest_first = "".join(f"{digit}." for digit in reversed(digits))
        return Part((), (queue,), (Binding(self.direct, queue.name, f"{lowest_first}{MARK}.#"),))

    # -- the delivery side ---------------------------------------------------------------------

    def unwrap(self, destination: Destination, carried: Destination | None = None) -> Destination:
        """Start from the destination of what is an address already, so that retries never grow.

        A key is taken for an address only where the exchange is a ladder's: a user's own key that
        looks like an address stays what it is.
        """
        if not self.owns(destination.exchange):
            return destination
        try:
            return self.destination(destination.routing_key, carried)
        except AddressError:
            return destination

    def to_queue(self, queue: str) -> Part:
        """Lead straight to a queue that is addressed through the default exchange."""
        return Part(
            bindings=(Binding(self.to_queues, queue, f"#.{route(Destination('', queue))}"),)
        )

    def queue_relay_name(self, queue: str) -> str:
        """Name the relay of a queue, and the exchange behind it."""
        return self._behind("relay-to-queue", queue)

    def queue_relay(self, queue: str) -> Part:
        """Lead from delivery to a queue through its relay, at least once.

        The exchange behind the relay has this one queue, so that the routing key, which says
        where the message was published to, stays as it is.
        """
        name = self.queue_relay_name(queue)
        relay = self._waiting(name, 0, name)
        way = f"#.{route(Destination('', queue))}"
        # Where the queue was made anew, a program that knows its arguments leads straight to it.
        behind = Exchange(name, "fanout", (("alternate-exchange", self.to_queues),))
        return Part(
            (behind,), (relay,), (Binding(self.delivery, name, way), Binding(name, queue, ""))
        )

    def mirror(self, exchange: str) -> Part:
        """Lead from delivery to the mirror of an exchange."""
        name = self.mirror_name(exchange)
        key = f"#.{MARK}.{exchange_word(exchange)}.#"
        return Part(
            (self._exchange(name),), (), (Binding(self.delivery, name, key, to_queue=False),)
        )

    def exchange_relay(self, exchange: str) -> Part:
        """Lead from the mirror of an exchange back to the exchange itself, at most once."""
        relay = Queue(
            self.exchange_relay_name(exchange),
            (
                ("x-queue-type", self.queue_type),
                ("x-message-ttl", 0),
                ("x-dead-letter-exchange", exchange),
            ),
            wait=0,
        )
        binding = Binding(self.mirror_name(exchange), relay.name, "#")
        return self.mirror(exchange) + Part((), (relay,), (binding,))

    def mirror_bindings(
        self, exchange: str, exchange_type: str, destination: str, key: str, *, to_queue: bool
    ) -> tuple[Binding, ...]:
        """Repeat a binding of an exchange on its mirror.

        :param exchange_type: one of :data:`~kombu_binary_delay.model.topology.IMITABLE`.
        :param destination: a queue, or an exchange, whose mirror is then bound.
        :raises AddressError: where a topic pattern is too long to be written behind the digits.
        """
        target = destination if to_queue else self.mirror_name(destination)
        source = self.mirror_name(exchange)
        if exchange_type == "fanout":
            # A fanout ignores its keys, yet each is a binding of its own, to be undone by itself.
            arguments = (("x-binary-delay-key", key),)
            return (Binding(source, target, "#", to_queue, arguments),)
        patterns = self._patterns(exchange, key, topic=exchange_type == "topic")
        return tuple(Binding(source, target, pattern, to_queue) for pattern in patterns)

    # -- how they are made ---------------------------------------------------------------------

    @cached_property
    def _kind(self) -> str:
        # Queues of two types cannot share a name, and an upgraded broker may come to have both.
        return "" if self.queue_type == "quorum" else f"-{self.queue_type}"

    @cached_property
    def _owned(self) -> tuple[str, ...]:
        return tuple(f"{self.namespace}.{each}{end}" for each in VERSIONS for end in "-.")

    def _patterns(self, exchange: str, key: str, *, topic: bool) -> list[str]:
        # On a mirror, the exchange's word may be that of another one, bound to this one.
        behind = f"{MARK}.*"
        if not topic:
            whole = route(Destination(exchange, key))
            return [f"#.{behind}{whole.removeprefix(f'{MARK}.{exchange_word(exchange)}')}"]
        words = pattern_words(key)
        if words.split(".").count("#") < 2:
            patterns = [f"#.{behind}{words}"]
        else:
            # RabbitMQ 4.3 takes two # in a binding key at most, so ours is spelled out: one
            # pattern for each number of digits.
            patterns = ["*." * digits + behind + words for digits in range(1, MAX_DIGITS // 2 + 1)]
        excess = len(patterns[-1].encode()) - MAX_KEY
        if excess > 0:
            raise AddressError(
                f"the binding key {key!r} of the exchange {exchange!r} is {excess} bytes too long "
                f"behind the digits; delayed messages for it will be parked"
            )
        return patterns

    def _behind(self, what: str, exchange: str) -> str:
        prefix = f"{self.delivery_prefix}.{what}."
        name = prefix + exchange
        # So that a broker can say that it is not there, see can_be_denied.
        room = MAX_KEY if name.isascii() else _MAX_NAME_NOT_ASCII
        return name if len(name.encode()) <= room else prefix + digest(exchange)

    def _exchange(self, name: str) -> Exchange:
        return Exchange(name, "topic", (("alternate-exchange", self.parking),))

    def _level(self, level: int) -> Part:
        name, below = self.level_name(level), self.level_name(level - 1)
        weight = self.ladder.weights[-1 - level]
        queues = tuple(
            self._waiting(f"{name}.{word}", digit * weight, below)
            for digit, word in enumerate(self._words(level))
            if digit
        )
        fanouts = tuple(replace(self._exchange(each.name), type="fanout") for each in queues)
        enter = tuple(Binding(each.name, each.name, "") for each in queues)
        if self.layout == "skip":
            waits = [each for lower in range(level, -1, -1) for each in self._waits(level, lower)]
            down = Binding(name, self.delivery, f"{self._zeros(0, level)}#", to_queue=False)
        else:
            waits = self._waits(level, level)
            key = f"{'*.' * level}{self._zeros(level, level)}#"
            down = Binding(name, below, key, to_queue=False)
        # The level last: where it exists, publishers rely on all else.
        return Part((*fanouts, self._exchange(name)), queues, (*waits, down, *enter))

    def _waits(self, level: int, lower: int) -> list[Binding]:
        """Bind a level to the queues of a lower one, or its own, past the zeros in between."""
        name, zeros = self.level_name(level), self._zeros(lower + 1, level)
        return [
            Binding(name, f"{self.level_name(lower)}.{word}", f"{'*.' * lower}{word}.{zeros}#")
            for word in self._words(lower)[1:]
        ]

    def _words(self, level: int) -> list[str]:
        """List the digits of a level, zero first."""
        radix = self.ladder.radices[-1 - level]
        return [self.ladder.word(level, digit) for digit in range(radix)]

    def _zeros(self, lowest: int, highest: int) -> str:
        """Write the digit zero for each level from ``lowest`` to ``highest``."""
        return "".join(f"{self.ladder.word(level, 0)}." for level in range(lowest, highest + 1))

    def _ttl(self, wait: int) -> int:
        """Return the ``x-message-ttl`` of a queue whose messages are to wait, in milliseconds."""
        # A quorum queue takes both the time of a message's arrival and the time now in whole
        # milliseconds, cut off, so its messages leave up to one millisecond before their TTL is
        # over. A relay waits for nothing.
        return wait + 1 if wait and self.queue_type == "quorum" else wait

    def _waiting(self, name: str, wait: int, below: str) -> Queue:
        arguments: Arguments = (
            ("x-queue-type", self.queue_type),
            ("x-message-ttl", self._ttl(wait)),
            ("x-dead-letter-exchange", below),
        )
        if self.queue_type == "quorum":
            # At least once needs reject-publish, or RabbitMQ falls back to at most once.
            arguments += (
                ("x-dead-letter-strategy", "at-least-once"),
                ("x-overflow", "reject-publish"),
            )
            if self.lane:
                arguments += (("x-queue-leader-locator", "balanced"),)
        return Queue(name, arguments, wait)
