"""What one connection knows of the broker, and how far it is with what it makes there. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.settings import Settings

from .commands import Pause, Steps, Warn
from .exchange_types import ExchangeTypes

#: How often to start again if the ladder is deleted while it is declared.
ATTEMPTS = 3
#: Seconds from the news that something was deleted until it is declared again. Who deletes one part
#: deletes others next, and RabbitMQ 4.3 can lose the route of a binding that is made while its
#: exchange is deleted: the binding is listed, another declaration changes nothing, and messages
#: for it are parked.
PAUSE_AFTER_DELETION = 0.5
#: The interval, in microseconds, at which to check that what existed still exists.
LOOK_AGAIN = 30_000_000

# What can exist, besides the program's bindings (:class:`UserBinding`), is a tuple that begins with
# its kind, and then has what is named beside the kind. A plan needs such facts, and `BINDINGS`. No
# classes: calling one for each publish would take longer than the decision itself.

#: What all levels need: the delivery exchanges and the parking queue.
BASE = ("base",)
#: The exchange of a ladder that somebody else makes, to which a message is published.
FIRST = "first"
#: What the first message of a connection needs of the levels: lane, digits.
PATH = "path"
#: A need, and no fact: that this connection has repeated what it declared and bound.
BINDINGS = ("bindings",)
#: In the order of declaration: the levels after the delivery side, which shows whether a part of
#: the topology is missing.
KINDS = (
    "bindings",
    "way",  # queue: from the delivery exchange to a queue that is addressed by its name
    "relay",  # queue: the same by a relay, even if the queue needs none
    "target",  # exchange: one to delay to, with a relay if it is a headers exchange
    "level",  # lane, height: a level, and all below it, of one of the connection's ladders
    "direct",  # lane, digits: the queue that serves one whole delay
    "mirror",  # exchange: its mirror
)


class Repetition(Enum):
    """How far this connection has repeated what it declared and bound, for delayed messages."""

    NEEDED = "needed"
    #: Nothing was found to be missing since it began.
    UNDER_WAY = "under way"
    DONE = "done"


class UserBinding(NamedTuple):
    """A binding that the program made, from an exchange to a queue or another exchange.

    Those that differ only in arguments are one, as they are for delayed messages.
    """

    exchange: str
    destination: str
    key: str
    to_queue: bool

    @property
    def ends(self) -> tuple[str, ...]:
        """The exchanges at its ends."""
        return (self.exchange,) if self.to_queue else (self.exchange, self.destination)


class UserBindings:
    """The bindings that a connection made, in order; those of private names are left out."""

    def __init__(self) -> None:
        #: Each with the arguments with which it was made.
        self._all: dict[UserBinding, set[str]] = {}
        self._behind: dict[str, dict[UserBinding, None]] = {}

    def __iter__(self) -> Iterator[UserBinding]:
        """Return an iterator over all of them."""
        return iter(self._all)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._all)

    def behind(self, exchange: str) -> Iterable[UserBinding]:
        """Return those that lead from an exchange to another exchange."""
        return self._behind.get(exchange, ())

    def of_queue(self, queue: str) -> list[UserBinding]:
        """Return those of a queue."""
        return [
            binding for binding in self._all if binding.to_queue and binding.destination == queue
        ]

    def add(self, binding: UserBinding, arguments: Mapping[str, Any] | None) -> None:
        """Remember a binding."""
        self._all.setdefault(binding, set()).add(_as_text(arguments))
        if not binding.to_queue:
            self._behind.setdefault(binding.exchange, {})[binding] = None

    def remove(self, binding: UserBinding, arguments: Mapping[str, Any] | None) -> bool:
        """Forget a binding with some arguments; return whether none with others is left."""
        left = self._all.get(binding, set()) - {_as_text(arguments)}
        if left:
            self._all[binding] = left
        else:
            self.discard(binding)
        return not left

    def discard(self, binding: UserBinding) -> None:
        """Forget a binding with all arguments, if it is known."""
        self._all.pop(binding, None)
        behind = self._behind.get(binding.exchange, {})
        behind.pop(binding, None)
        if not behind:
            self._behind.pop(binding.exchange, None)


def _as_text(arguments: Mapping[str, Any] | None) -> str:
    return repr(sorted((arguments or {}).items()))


@dataclass
class KnownQueue:
    """What a connection knows of a queue whose arguments it knows."""

    #: Whether it rejects messages while it is full.
    rejects: bool
    #: Whether the broker deletes it when its last consumer leaves.
    is_temporary: bool
    #: Whether no other connection addresses it by its name.
    is_mailbox: bool = False
    #: Whether this connection may have created it.
    may_be_new: bool = False


class Findings(NamedTuple):
    """What a connection has found or declared, and the time of its last look."""

    looked: int
    existing: frozenset[tuple[Any, ...]]
    heights: Mapping[int, int]
    types: Mapping[str, str | None]


class Shared:
    """What the connections of a process that have the same broker and settings tell each other.

    Programs may open a connection for each publish.
    """

    def __init__(self) -> None:
        #: By the connection that has looked last. It is replaced and never changed, so threads and
        #: forks need no lock.
        self.findings: Findings | None = None
        #: How often one of them found that something was deleted, or deleted it.
        self.losses = 0

    def forget(self) -> None:
        """Forget the findings, and those that connections are making: something of it is gone."""
        self.losses += 1
        self.findings = None


class Knowledge:
    """The state of one connection's router.

    :param settings: of the transport.
    :param server: the properties that the broker sent when the connection opened.
    :param vhost: the virtual host that the connection is in.
    :param shared: with other connections.
    """

    def __init__(
        self,
        settings: Settings,
        server: Mapping[str, Any],
        vhost: str = "/",
        shared: Shared | None = None,
    ) -> None:
        # -- what stays as it is while the connection lasts ------------------------------------
        self.settings, self.server, self.vhost = settings, server, vhost
        self.shared = shared or Shared()
        self.topology: Topology = settings.topology()
        self.declares = settings.declare != "never"
        #: The ladders that messages are published to: one for each lane, and then one for urgent
        #: messages if ``keeps_urgent_apart``.
        self.ladders = self.topology.lanes(settings.lanes)
        self.keeps_urgent_apart = self.topology.keeps_urgent_apart(server)
        if self.keeps_urgent_apart:
            self.ladders.append(self.topology.for_urgent())

        # -- facts of the broker ---------------------------------------------------------------
        #: The parts that are known to exist, and the program's bindings that are repeated.
        self.existing: set[tuple[Any, ...]] = set()
        #: The highest known level of each lane.
        self.heights: dict[int, int] = {}
        #: By lane and digits, the delays that may have a queue of their own, and whether they do.
        self.delays: dict[tuple[int, tuple[str, ...]], bool] = {}
        self.exchanges = ExchangeTypes(vhost)
        #: The queues whose arguments this connection knows.
        self.queues: dict[str, KnownQueue] = {}
        #: The queues that this connection declared, in order; mailboxes are left out.
        self.declared: dict[str, None] = {}
        self.bindings = UserBindings()

        # -- what steers the flow --------------------------------------------------------------
        #: The time of the last check that everything still exists, in microseconds; 0 before.
        self.looked = 0
        #: Whether an existing level proves that everything below it exists.
        self.trusts_levels = True
        #: Whether something was deleted, and nothing was declared since.
        self.is_disturbed = False
        #: How often something was found to be deleted.
        self.losses = 0
        #: Whether this connection repeats what it has bound: not for its first delayed messages, if
        #: they are for queues and it does not consume.
        self.repeats = False
        self.repetition = Repetition.NEEDED
        #: The warnings about a queue or an exchange that does not exist.
        self.warned: dict[str, set[str]] = {}

    def lost(self) -> None:
        """Forget what exists: the broker has reported that something of ours is missing."""
        self.existing.clear()
        self.repetition = Repetition.NEEDED
        # What was deleted may be the way to an exchange that another one has replaced.
        self.exchanges.distrust()
        self.delays.clear()
        self.trusts_levels = False
        self.is_disturbed = True
        self.losses += 1
        self.shared.forget()

    def pause_after_deletion(self) -> Steps:
        """Pause, once, after something was deleted."""
        if self.is_disturbed:
            yield Pause(PAUSE_AFTER_DELETION)
            self.is_disturbed = False

    def warn_once(self, name: str, text: str) -> Steps:
        """Warn about a queue or an exchange, once for each text until it is reached."""
        texts = self.warned.setdefault(name, set())
        if text not in texts:
            texts.add(text)
            yield Warn(text)

    def needs_relay(self, queue: str) -> bool:
        """Whether a queue needs a relay, since it may reject messages.

        That is so if it is declared with reject-publish, if the connection does not know its
        arguments, or if it matches the setting ``relays``.
        """
        if not self.topology.can_have_relays:
            return False
        known = self.queues.get(queue)
        if known is None or known.rejects:
            return True
        # What ends by itself would leave its relay behind.
        ends = known.is_mailbox or known.is_temporary
        return not ends and self.topology.wants_relay(queue, self.settings.relays)

    def exchange_behind(self, exchange: str, types: tuple[str, ...]) -> str | None:
        """Return an exchange of some types that this connection has bound behind an exchange."""
        ahead, seen = [exchange], set[str]()
        while ahead:
            source = ahead.pop()
            if self.exchanges.types.get(source) in types:
                return source
            seen.add(source)
            behind = (binding.destination for binding in self.bindings.behind(source))
            ahead += [destination for destination in behind if destination not in seen]
        return None

    def facts_of(self, *kinds: str) -> list[tuple[Any, ...]]:
        """Return what exists of some kinds that have one name, in order."""
        # A binding of the program's is longer, and begins with an exchange, whatever its name is.
        return sorted(fact for fact in self.existing if fact[0] in kinds and len(fact) == 2)


def is_recent(looked: int, now: int) -> bool:
    """Whether a check need not be made again yet; both times are in microseconds.

    A clock that was set back causes the check sooner, never later.
    """
    return 0 <= now - looked < LOOK_AGAIN
