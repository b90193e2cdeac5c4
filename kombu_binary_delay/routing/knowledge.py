"""The router's state: what one connection knows about the broker. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kombu_binary_delay.errors import AddressError, TopologyError
from kombu_binary_delay.ladder.parts import Binding, Part
from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.ladder.versions import can_have_type_told
from kombu_binary_delay.settings import Settings

from .commands import Delete, Ensure, Look, OutOfReachError, Pause, Steps, Warn

#: How often to start again if the ladder is deleted while it is declared.
ATTEMPTS = 3
#: Seconds from the news that something was deleted until it is declared again. Who deletes one part
#: deletes others next, and RabbitMQ 4.3 can lose the route of a binding that is made while its
#: exchange is deleted: the binding is listed, another declaration changes nothing, and messages
#: for it are parked.
SETTLE = 0.5

#: The types of the exchanges that exist in every virtual host.
_BUILT_IN: dict[str, str | None] = {
    "amq.direct": "direct",
    "amq.fanout": "fanout",
    "amq.headers": "headers",
    "amq.match": "headers",
    "amq.topic": "topic",
}


class Bound(NamedTuple):
    """A binding of the user's, from an exchange to a queue or another exchange."""

    exchange: str
    destination: str
    key: str
    to_queue: bool

    @property
    def ends(self) -> tuple[str, ...]:
        """The exchanges at its ends."""
        return (self.exchange,) if self.to_queue else (self.exchange, self.destination)


# What can exist, besides the bindings of the user's (:class:`Bound`) and these two, is written as a
# tuple that begins with its kind: its names are in `KINDS`. No classes: calling one for each
# publish would take longer than the decision itself.

#: What all levels need: the delivery exchanges and the parking queue.
BASE = ("base",)
#: The delivery side repeats everything that this connection has declared and bound.
BINDINGS = ("bindings",)
#: The repetition is in progress, and nothing was found to be missing since it began.
REPEATING = ("repeating",)
#: The exchange of a ladder that somebody else makes, to which a message is published.
FIRST = "first"
#: What the first message of a connection needs of the levels: lane, digits.
PATH = "path"
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


class Bindings:
    """The bindings that a connection made, in order."""

    def __init__(self) -> None:
        self._all: dict[Bound, None] = {}
        self._behind: dict[str, dict[Bound, None]] = {}

    def __iter__(self) -> Iterator[Bound]:
        """Return an iterator over all of them."""
        return iter(self._all)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._all)

    def behind(self, exchange: str) -> Iterable[Bound]:
        """Return those that lead from an exchange to another exchange."""
        return self._behind.get(exchange, ())

    def add(self, bound: Bound) -> None:
        """Remember a binding."""
        self._all[bound] = None
        if not bound.to_queue:
            self._behind.setdefault(bound.exchange, {})[bound] = None

    def discard(self, bound: Bound) -> None:
        """Forget a binding, if it is known."""
        self._all.pop(bound, None)
        behind = self._behind.get(bound.exchange, {})
        behind.pop(bound, None)
        if not behind:
            self._behind.pop(bound.exchange, None)


class Found(NamedTuple):
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
        self.found: Found | None = None
        #: How often one of them found that something was deleted, or deleted it.
        self.losses = 0

    def forget(self) -> None:
        """Forget what was found, and what connections are finding: something of it is gone."""
        self.losses += 1
        self.found = None


class Knowledge:
    """What one connection knows.

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
        self._settings, self._server, self._vhost = settings, server, vhost
        self._shared = shared or Shared()
        #: Whether the first message relies on what another connection has found. Then its publisher
        #: waits until the broker has taken it.
        self.relies_on_others = False
        self.topology: Topology = settings.topology()
        #: How a message of ours is read, whichever ladder this connection publishes to.
        self._ours = (
            self.topology if self.topology.mirrors else Topology(namespace=settings.namespace)
        )
        #: In milliseconds, for messages that do not say it themselves.
        self.jitter = settings.jitter
        self._declares = settings.declare != "never"
        self._queue_per_delay = settings.queue_per_delay
        self._ladders = self.topology.lanes(settings.lanes)
        self._lanes = len(self._ladders)
        self._keeps_urgent_apart = self.topology.keeps_urgent_apart(server)
        if self._keeps_urgent_apart:
            self._ladders.append(self.topology.for_urgent())
        #: The parts that are known to exist on the broker.
        self.existing: set[tuple[Any, ...]] = set()
        #: The types of exchanges; None for one that delayed messages cannot reach.
        self._types = dict(_BUILT_IN)
        #: The exchanges whose types may have changed since, so they are asked for again.
        self._doubted: set[str] = set()
        #: Whether the queues that this connection declared reject messages while they are full.
        self._refusing: dict[str, bool] = {}
        #: The queues and bindings that this connection made, in order; mailboxes are left out.
        self._queues: dict[str, None] = {}
        self._bound = Bindings()
        #: Those of them that could not be repeated, since a node was down.
        self._unreached: set[Bound] = set()
        #: The queues that the broker deletes when their last consumer leaves.
        self._temporary: set[str] = set()
        #: The queues that this connection may have created.
        self._perhaps_new: set[str] = set()
        #: The queues that no other connection addresses by their names.
        self._mailboxes: set[str] = set()
        self._heights: dict[int, int] = {}
        #: The time of the last check that everything still exists, and the number of checks.
        self._looked = 0
        self._looks = 0
        #: Whether an existing level proves that everything below it exists.
        self._trusts = True
        #: Whether the parking queue could not be declared, since its node was down.
        self._lacks_parking = False
        #: Whether something was deleted, and nothing was declared since.
        self._disturbed = False
        #: How often something was found to be deleted.
        self._losses = 0
        #: Whether this connection repeats what it has bound: not for its first delayed messages, if
        #: they are for queues and it does not consume.
        self._repeats = False
        self._published = 0
        self._delays: dict[tuple[int, tuple[str, ...]], bool] = {}
        #: The warnings about a queue or an exchange that does not exist.
        self._warned: dict[str, set[str]] = {}

    def lost(self) -> None:
        """Forget what exists: the broker has reported that something of ours is missing."""
        self.existing.clear()
        # What was deleted may be the way to an exchange that another one has replaced.
        self._doubted |= {each for each in self._types if self._can_ask(each)}
        self._delays.clear()
        self._trusts = False
        self._disturbed = True
        self._losses += 1
        self._shared.forget()

    def cut_off(self) -> None:
        """Forget what connections share: the broker of one that broke may come back without it."""
        self._shared.forget()

    def _can_ask(self, exchange: str) -> bool:
        """Whether the broker can be asked again for the type of an exchange."""
        return exchange not in _BUILT_IN and can_have_type_told(exchange, self._vhost)

    def _settle(self) -> Steps:
        """Pause, once, after something was deleted."""
        if self._disturbed:
            yield Pause(SETTLE)
            self._disturbed = False

    def _past_parking(self, command: Ensure | Look) -> Any:
        """Do a command; without the parking queue if its node is down, as all else works without.

        :returns: the answer.
        """
        if isinstance(command, Look) and self._lacks_parking:
            return (yield self._but_parking(command))
        try:
            return (yield command)
        except OutOfReachError as exc:
            queues = command.queues if isinstance(command, Look) else names_of(command.part)[1]
            if self.topology.parking not in queues:
                raise
            if isinstance(command, Ensure):
                self._lacks_parking = True
            answer = yield self._but_parking(command)
            yield Warn(f"messages that should be parked can be lost: {exc}")
            return answer

    def _but_parking(self, command: Ensure | Look) -> Ensure | Look:
        """Return a command without the parking queue.

        Also without its exchange, which proves to others that all of the base is whole.
        """
        parking = self.topology.parking
        if isinstance(command, Ensure):
            kept = tuple(each for each in command.part.exchanges if each.name != parking)
            return replace(command, part=Part(kept))
        exchanges, queues = (
            tuple(each for each in names if each != parking)
            for names in (command.exchanges, command.queues)
        )
        return replace(command, exchanges=exchanges, queues=queues)

    def _look_at(self, heights: Mapping[int, int], base: Part) -> Look:
        """Return the command that checks whether levels, and what they need, exist.

        :param heights: the highest level of each lane.
        """
        exchanges, queues = names_of(base)
        bindings: tuple[Binding, ...] = ()
        for lane, height in heights.items():
            ladder = self._ladders[lane]
            for part in ladder.levels[: height + 1]:
                exchanges += [each.name for each in part.exchanges]
                queues += [each.name for each in part.queues]
            bindings += ladder.unproven(height)
            if self._queue_per_delay:
                exchanges += names_of(ladder.direct_base)[0]
                # A connection with fewer levels may have made the exchange anew.
                bindings += ladder.direct_ways(height).bindings
        return Look(tuple(exchanges), tuple(queues), bindings)


def names_of(part: Part) -> tuple[list[str], list[str]]:
    """Return the names of the exchanges and the names of the queues of a part."""
    return [each.name for each in part.exchanges], [each.name for each in part.queues]


def one(command: Delete) -> Steps:
    """Yield one command."""
    yield command


def quietly(steps: Steps, *, once: bool = False) -> Steps:
    """Run steps; if the broker refuses one, warn and skip the rest.

    :param once: as of :class:`~kombu_binary_delay.routing.commands.Warn`.
    """
    try:
        yield from steps
    except (TopologyError, AddressError) as exc:
        yield Warn(
            f"delayed messages may not reach every destination that others reach: {exc}", once=once
        )
