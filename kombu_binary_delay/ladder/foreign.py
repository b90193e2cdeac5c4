"""The ladders of NServiceBus and Celery, in their own wire formats. Pure.

Both have 28 binary levels of whole seconds, with names, arguments and keys of their own. A
:class:`ForeignLadder` can be declared, walked, exported and read like ours, so that a program can
send through it, receive from it, and move its messages.

Its key has 28 digits, the *highest first*, with leading zeros, and then the address: the name of a
queue or, for Celery, a routing key. It has no parking queue, does not know exchanges, and binds
``#.<address>``, so a message for ``a.b`` also reaches the address ``b``.

Since Kombu 5.7, the names of Celery's ladder can have a prefix. :func:`ladder_of_name` finds the
ladder by the exact name of a part: a user's queue ``celery_delayed_emails`` is no part of one.

Sources: NServiceBus.Transport.RabbitMQ, ``DelayInfrastructure``, in its versions before and since
8; Kombu, ``kombu.transport.native_delayed_delivery``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from kombu_binary_delay.errors import AddressError

from .address import Destination, length
from .ladder import MAX_KEY, Ladder
from .parts import Arguments, Binding, Exchange, Part, Queue
from .topology import Topology

#: The longest delay is ``2**28 - 1`` seconds: 8.5 years.
LEVELS = 28
_KEY = re.compile(rf"((?:[01]\.){{{LEVELS}}})(.+)", re.DOTALL)


@dataclass(frozen=True)
class ForeignLadder(Topology):
    """Another system's ladder. The constants of this module are its instances.

    :param namespace: the prefix of all its names.
    :param level: what follows the prefix in the name of a level's exchange and queue, with the
        level's number.
    :param arguments: of each level's queue, in addition to its TTL and dead-letter exchange.
    :param enters_at_top: whether messages of any delay enter at the highest level.
    :param seconds_header: see :attr:`delay_header`.
    """

    ladder: Ladder = field(default_factory=lambda: Ladder.binary(LEVELS, 1000))
    level: str = ""
    arguments: Arguments = ()
    enters_at_top: bool = False
    seconds_header: str | None = None

    is_ours = False

    @property
    def delay_header(self) -> str | None:
        """The header with the delay in whole seconds that the system's tools read, if any."""
        return self.seconds_header

    @cached_property
    def prefix(self) -> str:
        """The prefix of every name."""
        return self.namespace

    @cached_property
    def delivery(self) -> str:
        """The name of the delivery exchange."""
        return f"{self.namespace}delivery"

    @property
    def parking(self) -> str:
        """The empty name: there is no parking queue."""
        return ""

    def level_name(self, level: int) -> str:
        """Return the name of a level's exchange and queue; -1 is the delivery exchange."""
        return self.namespace + self.level.format(level) if level >= 0 else self.delivery

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all its exchanges, which are those of its queues, too."""
        return frozenset(exchange.name for exchange in self.whole.exchanges)

    def owns(self, name: object) -> bool:
        """Whether an exchange or queue is a part of this ladder."""
        return isinstance(name, str) and name in self.names

    def is_named_in(self, text: str) -> bool:
        """Whether an error text of the broker is about this ladder."""
        return any(f"'{name}'" in text for name in self.names)

    @cached_property
    def base(self) -> Part:
        """The delivery exchange."""
        return Part((Exchange(self.delivery),))

    def height(self, digits: tuple[str, ...]) -> int:
        """Return the level where a message enters."""
        return LEVELS - 1 if self.enters_at_top else max(len(digits) - 1, 0)

    def entry_exchange(self, digits: tuple[str, ...]) -> str:
        """Return the exchange where a message enters: a level's."""
        return self.level_of(digits)

    def needs(self, digits: tuple[str, ...]) -> int:
        """Return the highest level that has to exist: the top one, since its programs need all."""
        del digits
        return LEVELS - 1

    def address(
        self,
        digits: tuple[str, ...],
        destination: Destination,
        *,
        topic: bool = False,
    ) -> str:
        """Write a delay and a queue's name (for Celery, a routing key) as a routing key.

        :raises AddressError: for an exchange, or a name that is empty or too long.
        """
        del topic
        # Its own delivery exchange leads by the same names.
        if destination.exchange not in ("", self.delivery):
            raise AddressError(
                f"the ladder {self.namespace}* reaches queues by name only, not the exchange "
                f"{destination.exchange!r}; publish to the default exchange ''"
            )
        name = destination.routing_key
        room = MAX_KEY - 2 * LEVELS
        if not 0 < length(name) <= room:
            raise AddressError(
                f"the name {name!r} takes {length(name)} bytes; an address of the ladder "
                f"{self.namespace}* has room for 1 to {room}; use another name"
            )
        zeros = ("0",) * (LEVELS - len(digits))
        return "".join(f"{digit}." for digit in (*zeros, *digits)) + name

    def parse(
        self, key: str, carried: Destination | None = None
    ) -> tuple[tuple[str, ...], Destination]:
        """Read a routing key: the inverse of :meth:`address`.

        :raises AddressError: if ``key`` is not an address of this ladder.
        """
        del carried
        match = _KEY.fullmatch(key)
        if match is None:
            raise AddressError(f"{key!r} is not an address of the ladder {self.namespace}*")
        digits = tuple(match[1].split(".")[:-1])
        first = digits.index("1") if "1" in digits else LEVELS
        return digits[first:], Destination("", match[2])

    def destination(self, key: str, carried: Destination | None = None) -> Destination:
        """Read the destination in a routing key of this ladder.

        :raises AddressError: if ``key`` is not an address of this ladder.
        """
        return self.parse(key, carried)[1]

    def to_queue(self, queue: str) -> Part:
        """Return the binding from delivery to a queue, as an endpoint of that system makes it.

        :raises AddressError: if the name is too long, or a pattern for the names of other queues.
        """
        key = f"#.{queue}"
        if length(key) > MAX_KEY or not {"*", "#"}.isdisjoint(queue.split(".")):
            raise AddressError(
                f"the ladder {self.namespace}* cannot lead to the queue {queue!r}: its name must "
                f"have at most {MAX_KEY - 2} bytes, and no word '*' or '#'; use another name"
            )
        return Part(bindings=(Binding(self.delivery, queue, key),))

    def _level(self, level: int) -> Part:
        name, below = self.level_name(level), self.level_name(level - 1)
        above = "*." * (LEVELS - 1 - level)
        wait = self.ladder.weights[-1 - level]
        waiting = (*self.arguments, ("x-message-ttl", wait), ("x-dead-letter-exchange", below))
        queue = Queue(name, waiting, wait)
        down = Binding(name, below, f"{above}0.#", to_queue=False)
        return Part((Exchange(name),), (queue,), (Binding(name, name, f"{above}1.#"), down))


_AT_LEAST_ONCE = (
    ("x-queue-type", "quorum"),
    ("x-dead-letter-strategy", "at-least-once"),
    ("x-overflow", "reject-publish"),
)
_SECONDS = "NServiceBus.Transport.RabbitMQ.DelayInSeconds"

#: NServiceBus.Transport.RabbitMQ 8 and later.
NSERVICEBUS = ForeignLadder(
    namespace="nsb.v2.delay-",
    level="level-{:02d}",
    arguments=_AT_LEAST_ONCE,
    seconds_header=_SECONDS,
)
#: NServiceBus.Transport.RabbitMQ before 8. Its queues ask to be lazy, which RabbitMQ 4.3 refuses.
NSERVICEBUS_V1 = ForeignLadder(
    namespace="nsb.delay-",
    queue_type="classic",
    level="level-{:02d}",
    arguments=(("x-queue-mode", "lazy"),),
    seconds_header=_SECONDS,
)
_CELERY = "celery_delayed_"
_PREFIXED = re.compile(rf"(.+)_{_CELERY}(?:[0-9]+|delivery)", re.ASCII | re.DOTALL)


# Few prefixes are in use, and any user may invent more.
@lru_cache(maxsize=16)
def celery(prefix: str = "") -> ForeignLadder:
    """Return Celery's native ladder, of Celery 5.5 and later.

    :param prefix: as for Kombu's functions; its names then begin with it and an underscore.
    """
    return ForeignLadder(
        namespace=f"{prefix}_{_CELERY}" if prefix else _CELERY,
        level="{}",
        arguments=_AT_LEAST_ONCE,
        enters_at_top=True,
    )


#: Celery's native ladder, without a prefix.
CELERY = celery()

#: By the names that the setting ``foreign_ladder`` takes.
FOREIGN_LADDERS = {
    "nservicebus": NSERVICEBUS,
    "nservicebus-v1": NSERVICEBUS_V1,
    "celery": CELERY,
}
_BY_NAME = {name: ladder for ladder in FOREIGN_LADDERS.values() for name in ladder.names}


def ladder_of_name(name: str) -> ForeignLadder | None:
    """Return the other system's ladder that has an exchange or queue of this name, or None."""
    ladder = _BY_NAME.get(name)
    if ladder is None and (prefixed := _PREFIXED.fullmatch(name)):
        ladder = celery(prefixed[1])
    return ladder if ladder and ladder.owns(name) else None
