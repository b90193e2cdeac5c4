"""The exchanges, queues and bindings of a ladder, computed from its numeral system. Pure.

The code that declares, exports, draws, verifies and simulates a ladder reads this one table.

The ladder side has one topic exchange per level. Each level has one queue per digit above 0, whose
messages expire after the digit's wait into the exchange of the level below. Each of these queues
has an *entry exchange* before it, a fanout exchange of the same name: the publisher knows the first
digit, and for a topic exchange to read it from the address takes as long as to store the message.

The delivery side, which all ladders of a namespace share, is the delivery exchange and everything
behind it. For a destination on the default exchange, that is the queue itself; for any other
exchange its *mirror*, a topic exchange with the same bindings behind the digits. A topic exchange
cannot imitate a headers exchange, so behind the mirror of one is a *relay*: a queue whose messages
expire at once into the real exchange. A destination queue that may reject messages also has a
relay: rejected messages wait there, and not in the levels, where they would hold up all others. The
alternate exchange of every exchange here leads to the parking queue: messages that cannot be routed
wait there, and never block the level that they came from.
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
    key_forms,
    length,
    pattern_words,
    read_address,
    route,
)
from .ladder import MAX_DIGITS, MAX_KEY, Ladder
from .parts import Arguments, Binding, Exchange, Part, Queue
from .versions import lets_urgent_hold_up

#: Changes when names, keys or arguments do, so that an upgrade redeclares nothing with differences.
VERSION = "v2"
QUEUE_TYPES = ("quorum", "classic")
#: How a message gets to the next level where it waits: through every level between, or directly.
LAYOUTS = ("chain", "skip")
#: The exchange types whose bindings a topic exchange can imitate.
IMITABLE = ("direct", "topic", "fanout")
#: The most unconfirmed messages that a quorum queue's dead-letter worker has, unless the broker is
#: configured otherwise: see :mod:`kombu_binary_delay.export.broker_config`.
WORKER_HOLDS = 32
#: A node that has fewer bytes of free disk above its limit is about to block publishers: two
#: write-ahead logs of the default size, of which one is written while the other is copied.
LEAST_DISK = 1 << 30

#: RabbitMQ repeats names in its errors, and cuts long ones, which is not safe within a character.
_MAX_NAME_NOT_ASCII = 128


@dataclass(frozen=True)
class Topology:
    """A ladder as declared on a broker. Equal topologies have equal names on every machine.

    :param ladder: the numeral system; by default :meth:`Ladder.default`.
    :param namespace: the first word of every name: letters, digits, ``-`` and ``_``.
    :param queue_type: ``"quorum"`` or ``"classic"``.
    :param layout: ``"chain"``, where a digit 0 is a binding to the level below, or ``"skip"``,
        where each level is bound directly to the queues of every level below: fewer exchanges to
        pass, more bindings.
    :param lane: 0, or the number of this lane among several ladders with the same delivery side.
        RabbitMQ then spreads the leaders of its queues over the nodes of a cluster.
    :param urgent: whether this is the ladder for messages of a priority above 4, which would hold
        up the others on RabbitMQ 4.0 to 4.2.
    """

    ladder: Ladder = field(default_factory=Ladder.default)
    namespace: str = "kbd"
    queue_type: str = "quorum"
    layout: str = "chain"
    lane: int = 0
    urgent: bool = False

    #: Whether it is a ladder of this package, and of no other system: only beside ours are bindings
    #: made by users repeated on the delivery side.
    is_ours = True

    @property
    def delay_header(self) -> str | None:
        """The header with the delay in whole seconds that another system's tools read, if any."""
        return None

    def lanes(self, count: int) -> list[Topology]:
        """Return ``count`` lanes of this ladder; a single one has no number."""
        if count == 1:
            return [self]
        return [replace(self, lane=number) for number in range(1, count + 1)]

    def keeps_urgent_apart(self, server: Mapping[str, Any]) -> bool:
        """Whether messages of a high priority use a separate ladder.

        :param server: the properties that the broker sends when a connection opens.
        """
        return self.is_ours and self.queue_type == "quorum" and lets_urgent_hold_up(server)

    @cached_property
    def can_have_relays(self) -> bool:
        """Whether messages that a queue rejects come back, and hold up others without a relay."""
        # Only with at-least-once dead-lettering.
        return self.is_ours and self.queue_type == "quorum"

    def wants_relay(self, queue: str, patterns: Iterable[str]) -> bool:
        """Whether a queue needs a relay even if the connection declares it without reject-publish.

        :param patterns: glob patterns of queue names, as in the setting ``relays``.
        """
        return self.can_have_relays and any(fnmatchcase(queue, pattern) for pattern in patterns)

    def for_urgent(self) -> Topology:
        """Return the separate ladder for messages of a high priority."""
        return replace(self, lane=0, urgent=True)

    # -- names ---------------------------------------------------------------------------------

    @cached_property
    def prefix(self) -> str:
        """The prefix of the names of the levels; the ladder can be read back from it."""
        layout = "" if self.layout == "chain" else f"-{self.layout}"
        lane = f"-lane{self.lane}" if self.lane else ""
        urgent = "-urgent" if self.urgent else ""
        return f"{self.namespace}.{VERSION}-{self.ladder.name}{layout}{lane}{urgent}{self._kind}"

    @cached_property
    def delivery_prefix(self) -> str:
        """The prefix of the names of the delivery side."""
        return f"{self.namespace}.{VERSION}{self._kind}"

    @cached_property
    def delivery(self) -> str:
        """The name of the delivery exchange."""
        return f"{self.delivery_prefix}.delivery"

    @cached_property
    def to_queues(self) -> str:
        """The name of the exchange that routes directly to queues, by their names.

        It is the alternate exchange of the delivery exchange, so it gets only messages that have no
        route there: a queue with a relay is reached by its relay, and never by both.
        """
        return f"{self.delivery_prefix}.to-queues"

    @cached_property
    def parking(self) -> str:
        """The name of the parking queue, and of the exchange before it."""
        return f"{self.delivery_prefix}.parking"

    def level_name(self, level: int) -> str:
        """Return the name of a level's exchange; 0 is the lowest, -1 the delivery exchange."""
        return self._level_names[level]

    @cached_property
    def _level_names(self) -> tuple[str, ...]:
        names = (f"{self.prefix}.level-{level:02d}" for level in range(self.ladder.levels))
        return (*names, self.delivery)

    def mirror_name(self, exchange: str) -> str:
        """Return the name of the mirror of an exchange."""
        return self._behind("mirror", exchange)

    def exchange_relay_name(self, exchange: str) -> str:
        """Return the name of the relay of an exchange."""
        return self._behind("relay-to-exchange", exchange)

    def owns(self, name: object) -> bool:
        """Whether an exchange or queue belongs to a ladder of this namespace."""
        return isinstance(name, str) and name.startswith(self._owned)

    def is_named_in(self, text: str) -> bool:
        """Whether an error text of the broker is about this namespace's ladders or delivery."""
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
        """One part per level, lowest first, in the order of declaration."""
        return tuple(self._level(level) for level in range(self.ladder.levels))

    @cached_property
    def whole(self) -> Part:
        """The base and every level in one part."""
        return sum(self.levels, self.base)

    def parts(self, *, direct: bool = False) -> dict[int, Part]:
        """Return the part of each level, lowest first, after the base, which is level -1.

        :param direct: whether to include what leads to direct queues, and past them to the levels.
        """
        parts = {-1: self.base, **dict(enumerate(self.levels))}
        if direct and self.is_ours:
            parts[-1] += self.direct_base
            for level in range(self.ladder.levels):
                parts[level] += Part(bindings=self.direct_bindings(level))
        return parts

    def entry_exchange(self, digits: tuple[str, ...]) -> str:
        """Return the exchange where a message enters: the one before its first digit's queue."""
        return f"{self._level_names[len(digits) - 1]}.{digits[0]}" if digits else self.delivery

    def level_of(self, digits: tuple[str, ...]) -> str:
        """Return the exchange of the level where a message enters; it leads to the same queue."""
        return self.level_name(self.height(digits))

    def height(self, digits: tuple[str, ...]) -> int:
        """Return the level where a message enters: that of its first digit; -1 without digits."""
        return len(digits) - 1

    def needs(self, digits: tuple[str, ...]) -> int:
        """Return the highest level that has to exist for a message."""
        return len(digits) - 1

    def passed(
        self, digits: tuple[str, ...], *, direct: bool = False
    ) -> tuple[list[str], list[str], tuple[Binding, ...]]:
        """Return the exchanges, queues and bindings of the levels that a message passes.

        If these exchanges and queues exist, so does each binding between them, but for the given
        ones: that into the delivery exchange, since that alone may have been made anew, and those
        by which a message enters where direct queues are.

        :param direct: whether it enters where direct queues are.
        """
        waits = [
            level
            for level, word in enumerate(reversed(digits))
            if word != self.ladder.word(level, 0)
        ]
        queues = [f"{self.level_name(level)}.{digits[-1 - level]}" for level in waits]
        # It does not pass its own level's exchange; but that is declared after all others. Before
        # the first of its queues is an exchange of the same name.
        exchanges = [self.level_name(level) for level in range(len(digits))] + queues[-1:]
        bindings: tuple[Binding, ...] = ()
        if waits and waits[0]:
            bindings += (self._down(waits[0] - 1 if self.layout == "skip" else 0),)
        if direct and waits:
            level = waits[-1]
            first = f"{'*.' * level}{digits[0]}."
            enter = (*self.direct_bindings(level), *self._waits(level, level))
            bindings += tuple(binding for binding in enter if binding.key.startswith(first))
            exchanges += [exchange.name for exchange in self.direct_base.exchanges]
        return exchanges, queues, bindings

    def unproven(self, height: int) -> tuple[Binding, ...]:
        """Return the bindings of the levels up to ``height`` that exchanges do not prove.

        These are the ones that are declared after the last exchange, and the ones into the delivery
        exchange, since that alone may have been made anew.
        """
        if height < 0:
            return ()
        top = self.levels[height]
        last = top.exchanges[-1].name
        into = [binding for level in self.levels[: height + 1] for binding in level.bindings]
        return tuple(
            dict.fromkeys(
                [binding for binding in into if binding.destination == self.delivery]
                + [binding for binding in top.bindings if binding.source == last]
            )
        )

    def address(
        self,
        digits: tuple[str, ...],
        destination: Destination,
        *,
        topic: bool = False,
    ) -> str:
        """Return the routing key with which a message enters.

        :param topic: whether the destination is a topic exchange, or may be one.
        :raises AddressError: if the destination does not fit.
        """
        return format_address(digits, destination, topic=topic)

    def parse(
        self, key: str, carried: Destination | None = None
    ) -> tuple[tuple[str, ...], Destination]:
        """Read a routing key of this ladder: the inverse of :meth:`address`.

        :raises AddressError: if ``key`` is not an address, or has digits of another ladder.
        """
        digits, destination = read_address(key, carried)
        try:
            self.ladder.delay(digits)
        except LadderError as exc:
            raise AddressError(f"{key!r} is not an address of the ladder: {exc}") from exc
        return digits, destination

    def destination(self, key: str, carried: Destination | None = None) -> Destination:
        """Read the destination in a routing key of any ladder with this delivery side.

        :raises AddressError: if ``key`` is not an address.
        """
        return read_address(key, carried)[1]

    # -- direct queues: one for a whole delay --------------------------------------------------

    @cached_property
    def direct(self) -> str:
        """The name of the exchange before the direct queues, which hold one whole delay each."""
        return f"{self.prefix}.direct"

    @cached_property
    def direct_fallback(self) -> str:
        """The name of the exchange that leads delays without a direct queue to the levels."""
        return f"{self.prefix}.fallback"

    @cached_property
    def direct_base(self) -> Part:
        """The exchange before the direct queues, and the one for delays without a direct queue.

        The second is the alternate exchange of the first, and routes each address to its level. So
        a delay without a queue, or whose queue has been pruned, passes the levels as usual.
        """
        alternate = (("alternate-exchange", self.direct_fallback),)
        return Part(
            (self._exchange(self.direct_fallback), Exchange(self.direct, "topic", alternate))
        )

    def direct_bindings(self, level: int) -> tuple[Binding, ...]:
        """Return the bindings by which delays without a direct queue enter at ``level``."""
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

    def direct_ways(self, height: int) -> Part:
        """Return the exchanges before the direct queues, with the ways into levels up to a height.

        :param height: of the highest of these levels.
        """
        levels = range(height + 1)
        return self.direct_base + Part(bindings=sum(map(self.direct_bindings, levels), ()))

    def direct_queue(self, digits: tuple[str, ...]) -> Part:
        """Return the direct queue of one delay, with the binding that leads to it."""
        delay = self.ladder.delay(digits)
        queue = self._waiting(f"{self.direct}.{delay}ms", delay, self.delivery)
        lowest_first = "".join(f"{digit}." for digit in reversed(digits))
        return Part((), (queue,), (Binding(self.direct, queue.name, f"{lowest_first}{MARK}.#"),))

    # -- the delivery side ---------------------------------------------------------------------

    def unwrap(self, destination: Destination, carried: Destination | None = None) -> Destination:
        """Return the destination in an address, so that an address never contains another one.

        A key is read as an address only if the exchange is a ladder's. A key of the user's that
        looks like an address stays as it is.
        """
        if not self.owns(destination.exchange):
            return destination
        try:
            return self.destination(destination.routing_key, carried)
        except AddressError:
            return destination

    def to_queue(self, queue: str) -> Part:
        """Return the direct binding to a queue that is addressed through the default exchange."""
        return Part(
            bindings=(Binding(self.to_queues, queue, f"#.{route(Destination('', queue))}"),)
        )

    def queue_relay_name(self, queue: str) -> str:
        """Return the name of the relay of a queue, and of the exchange behind it."""
        return self._behind("relay-to-queue", queue)

    def queue_relay(self, queue: str) -> Part:
        """Return the relay of a queue and its bindings; it delivers at least once.

        The exchange behind the relay has this one queue, so that the routing key, which is the
        address, does not change.
        """
        name = self.queue_relay_name(queue)
        relay = self._waiting(name, 0, name)
        way = f"#.{route(Destination('', queue))}"
        # If the queue was recreated, a program that knows its arguments binds it directly.
        behind = Exchange(name, "fanout", (("alternate-exchange", self.to_queues),))
        return Part(
            (behind,), (relay,), (Binding(self.delivery, name, way), Binding(name, queue, ""))
        )

    def mirror(self, exchange: str) -> Part:
        """Return the mirror of an exchange, and its binding to delivery."""
        name = self.mirror_name(exchange)
        key = f"#.{MARK}.{exchange_word(exchange)}.#"
        return Part(
            (self._exchange(name),), (), (Binding(self.delivery, name, key, to_queue=False),)
        )

    def exchange_relay(self, exchange: str) -> Part:
        """Return the relay from the mirror of an exchange to the exchange; at most once."""
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
        """Return the bindings of a mirror that repeat a binding of its exchange.

        :param exchange_type: one of :data:`~kombu_binary_delay.ladder.topology.IMITABLE`.
        :param destination: a queue, or an exchange, whose mirror is then bound.
        :raises AddressError: if a topic pattern is too long to be written behind the digits.
        """
        target = destination if to_queue else self.mirror_name(destination)
        source = self.mirror_name(exchange)
        if exchange_type == "fanout":
            # A fanout ignores keys, but a binding with another key is unbound separately.
            arguments = (("x-binary-delay-key", key),)
            return (Binding(source, target, "#", to_queue, arguments),)
        patterns = self._patterns(exchange, key, topic=exchange_type == "topic")
        return tuple(Binding(source, target, pattern, to_queue) for pattern in patterns)

    # -- how they are made ---------------------------------------------------------------------

    @cached_property
    def _kind(self) -> str:
        # Queues of two types cannot share a name, and a broker can have both.
        return "" if self.queue_type == "quorum" else f"-{self.queue_type}"

    @cached_property
    def _owned(self) -> tuple[str, ...]:
        return tuple(f"{self.namespace}.{VERSION}{end}" for end in "-.")

    def _patterns(self, exchange: str, key: str, *, topic: bool) -> list[str]:
        # The exchange's word may be that of another exchange, which is bound to this one.
        behind = f"{MARK}.*"
        if not topic:
            return [f"#.{behind}{words}" for words in key_forms(key)]
        words = pattern_words(key)
        if words.split(".").count("#") < 2:
            patterns = [f"#.{behind}{words}"]
        else:
            # RabbitMQ 4.3 allows at most two # in a binding key, so ours is replaced by one
            # pattern for each number of digits.
            patterns = ["*." * digits + behind + words for digits in range(1, MAX_DIGITS // 2 + 1)]
        excess = length(patterns[-1]) - MAX_KEY
        if excess > 0:
            raise AddressError(
                f"the binding key {key!r} of the exchange {exchange!r} is {excess} bytes too long "
                f"to follow the digits; delayed messages for it will be parked; use a shorter key"
            )
        return patterns

    def _behind(self, what: str, exchange: str) -> str:
        prefix = f"{self.delivery_prefix}.{what}."
        name = prefix + exchange
        # So that the broker can report that it does not exist, see can_be_denied.
        room = MAX_KEY if name.isascii() else _MAX_NAME_NOT_ASCII
        return name if length(name) <= room else prefix + digest(exchange)

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
        fanouts = tuple(replace(self._exchange(queue.name), type="fanout") for queue in queues)
        enter = tuple(Binding(queue.name, queue.name, "") for queue in queues)
        lowest = 0 if self.layout == "skip" else level
        lowers = range(level, lowest - 1, -1)
        waits = [binding for lower in lowers for binding in self._waits(level, lower)]
        # The level last: if it exists, publishers rely on all the others.
        bindings = (*waits, self._down(level), *enter)
        return Part((*fanouts, self._exchange(name)), queues, bindings)

    def _down(self, level: int) -> Binding:
        """Return the binding of a level for what does not wait in it, nor, if it skips, below."""
        skips = self.layout == "skip"
        key = self._zeros(0, level) if skips else "*." * level + self._zeros(level, level)
        below = self.delivery if skips else self.level_name(level - 1)
        return Binding(self.level_name(level), below, f"{key}#", to_queue=False)

    def _waits(self, level: int, lower: int) -> list[Binding]:
        """Return the bindings of a level to the queues of a lower level, or its own."""
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
        """Return the ``x-message-ttl`` of a queue with this wait, in milliseconds."""
        # A quorum queue truncates both the time of arrival and the current time to whole
        # milliseconds, so a message can leave up to one millisecond before its TTL is over. A
        # relay has no wait.
        return wait + 1 if wait and self.queue_type == "quorum" else wait

    def _waiting(self, name: str, wait: int, below: str) -> Queue:
        arguments: Arguments = (
            ("x-queue-type", self.queue_type),
            ("x-message-ttl", self._ttl(wait)),
            ("x-dead-letter-exchange", below),
        )
        if self.queue_type == "quorum":
            # Without reject-publish, RabbitMQ falls back to at-most-once dead-lettering.
            arguments += (
                ("x-dead-letter-strategy", "at-least-once"),
                ("x-overflow", "reject-publish"),
            )
            # All lanes share the relays, which have no wait.
            if self.lane and wait:
                arguments += (("x-queue-leader-locator", "balanced"),)
        return Queue(name, arguments, wait)
