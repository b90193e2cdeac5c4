"""What one connection knows about the broker, and every decision taken from it. Pure.

Asked for a publish, the router answers with a :class:`Plan`; told of a delivery, with its
:class:`Delivery`; told of what a program declares, binds or deletes, with the commands that this
calls for (:mod:`.commands`). What exists on the broker is one set, :attr:`Router.existing`: a plan
needs what is missing from it, which is nearly always nothing.

It must not do I/O, read a clock, or know Kombu, py-amqp or Celery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

from .commands import Answer, AskType, Delete, Ensure, Look, Steps, Unbind, Warn
from .errors import AddressError, TopologyError
from .model.address import Destination
from .model.delay import X_DELAY
from .model.envelope import HEADER, carried, further_keys, unwrap, wrap
from .model.parts import Binding, Part
from .model.recognise import ladder_of_exchange, parking_of
from .model.topology import IMITABLE, Topology
from .model.versions import QUORUM_SINCE, URGENT, can_be_denied, is_since
from .settings import Settings

#: After how many microseconds to look whether what existed still does.
LOOK_AGAIN = 30_000_000
#: The most queues for one delay each that a connection makes, and the delays that it counts.
MAX_DIRECT_QUEUES = 64
MAX_DELAYS = 1024
#: How often to begin anew where the ladder is deleted while it is declared.
_ATTEMPTS = 3

_HEADERS = "application_headers"
#: The types of the exchanges that every RabbitMQ has.
_BUILT_IN: dict[str, str | None] = {
    "amq.direct": "direct",
    "amq.fanout": "fanout",
    "amq.headers": "headers",
    "amq.match": "headers",
    "amq.topic": "topic",
}


class Plan(NamedTuple):
    """How to publish a message, and what has to exist before: keys of :attr:`Router.existing`."""

    exchange: str
    routing_key: str
    properties: dict[str, Any]
    lane: int
    needs: frozenset[tuple[Any, ...]]


class Delivery(NamedTuple):
    """Where a message that came by a ladder had been published to."""

    destination: Destination
    properties: dict[str, Any]


class Bound(NamedTuple):
    """A binding of the user's, from an exchange to a queue or another exchange."""

    exchange: str
    destination: str
    key: str
    to_queue: bool


# What can exist, besides the bindings of the user's (:class:`Bound`) and these two, is written as a
# tuple that begins with its kind: its names are in `_KINDS`. No classes: to call one for each
# publish would take longer than all that is decided.

#: What all levels stand on: the delivery exchanges and the parking queue.
_BASE = ("base",)
#: All that this connection has declared and bound is repeated on the delivery side.
_BINDINGS = ("bindings",)
#: They are repeated now, and nothing was found to be gone since that began.
_REPEATING = ("repeating",)
#: In the order in which they are made: the levels after the delivery side, which finds out whether
#: a part of the whole is gone.
_KINDS = (
    "bindings",
    "way",  # queue: from the delivery exchange to a queue that is addressed by its name
    "relay",  # queue: the same by a relay, even if the queue needs none
    "target",  # exchange: one to delay to, with a relay where it routes by headers
    "level",  # lane, height: a level, and all below it, of one of the connection's ladders
    "direct",  # lane, digits: the queue that serves one whole delay
    "mirror",  # exchange: its mirror
)

_NOTHING: frozenset[tuple[Any, ...]] = frozenset()


class Router:
    """The mind of one connection.

    :param settings: of the transport.
    :param server: the properties that the broker sent when the connection opened.
    :param vhost: the virtual host that the connection is in.
    """

    def __init__(self, settings: Settings, server: Mapping[str, Any], vhost: str = "/") -> None:
        self._settings, self._server, self._vhost = settings, server, vhost
        self._can_quorum = is_since(server, QUORUM_SINCE)
        self.topology: Topology = settings.topology(can_quorum=self._can_quorum)
        self._declares = settings.declare != "never"
        self._queue_per_delay = settings.queue_per_delay
        self._ladders = self.topology.lanes(settings.lanes)
        self._lanes = len(self._ladders)
        self._keeps_urgent_apart = self.topology.keeps_urgent_apart(server)
        if self._keeps_urgent_apart:
            self._ladders.append(self.topology.for_urgent())
        #: What is known to exist on the broker.
        self.existing: set[tuple[Any, ...]] = set()
        #: The types of exchanges; None for one that delayed messages cannot reach.
        self._types = dict(_BUILT_IN)
        #: Of queues that this connection declared, whether they refuse messages while full.
        self._refusing: dict[str, bool] = {}
        #: Queues that can be addressed by their names, and bindings: those made here, in order.
        self._queues: dict[str, None] = {}
        self._bound: dict[Bound, None] = {}
        self._heights: dict[int, int] = {}
        self._looked = 0
        #: Whether a level that exists may be taken to have all that is below it.
        self._trusts = True
        self._published = 0
        self._delays: dict[tuple[int, tuple[str, ...]], bool] = {}
        self._warned: set[str] = set()

    def opened(self) -> Steps:
        """Warn of what a connection that has just been opened cannot promise."""
        asked = self._settings.queue_type == "classic"
        if asked or (self._settings.queue_type is None and not self._can_quorum):
            product = f"{self._server.get('product')} {self._server.get('version', '')}"
            reason = "the settings ask for it" if asked else f"{product} has no better"
            yield Warn(
                f"delayed messages wait in classic queues, since {reason}: a broker that crashes "
                f"can lose those that are moving between levels; quorum queues (RabbitMQ 3.10 and "
                f"later) do not",
                once=True,
            )

    # -- a publish -----------------------------------------------------------------------------

    def publish(
        self,
        properties: dict[str, Any],
        due: int | None,
        destination: Destination,
        now: int,
        lane: int | None = None,
    ) -> Plan:
        """Plan how to publish a message that asks for a delay.

        :param due: microseconds since the epoch; None for a delay of zero.
        :param now: the same, of the publisher's clock.
        :param lane: that of a plan for the same message, whose needs exist by now.
        :raises DelayError: where the delay is longer than the ladder.
        :raises AddressError: where the destination does not fit into the routing key.
        :raises TopologyError: where a delayed message cannot reach the exchange.
        """
        headers = properties.get(_HEADERS) or {}
        if due is None or due <= now:
            if X_DELAY in headers:
                headers = {name: headers[name] for name in headers if name != X_DELAY}
                properties = {**properties, _HEADERS: headers}
            return Plan(*destination, properties, 0, _NOTHING)
        if destination.exchange:
            destination = self._unwrapped(destination, headers)
            self._refuse_unreachable(destination.exchange)
        if lane is None:
            lane = self._lane(properties)
        ladder = self._ladders[lane]
        digits = ladder.ladder.digits((due - now) / 1000)
        # To be safe, an exchange whose type is not known is taken for one that reads wildcards.
        exchange = destination.exchange
        topic = bool(exchange) and self._types.get(exchange, "topic") == "topic"
        properties, key = wrap(
            properties,
            destination,
            -(-due // 1000),
            lambda each: ladder.address(digits, each, topic=topic),
            ladder.owns,
        )
        if ladder.delay_header:
            properties[_HEADERS][ladder.delay_header] = ladder.ladder.delay(digits) // 1000
        needs = self._missing(lane, digits, destination, headers, now)
        return Plan(self._entry(ladder, digits), key, properties, lane, needs)

    def _unwrapped(self, destination: Destination, headers: dict[str, Any]) -> Destination:
        """Read what a retry of a delayed message is published to.

        A foreign ladder leads to queues by their names; a retry to such a name takes our own.
        """
        ladder = ladder_of_exchange(destination.exchange, self.topology)
        if ladder is None or ladder is self.topology:
            return self.topology.unwrap(destination, carried(headers))
        try:
            return ladder.destination(destination.routing_key)
        except AddressError:
            return Destination("", destination.routing_key)

    def _lane(self, properties: Mapping[str, Any]) -> int:
        """Choose the ladder for a message: by its id, so that a message keeps its lane."""
        if self._keeps_urgent_apart and (properties.get("priority") or 0) >= URGENT:
            return self._lanes
        if self._lanes == 1:
            return 0
        name = properties.get("message_id") or properties.get("correlation_id")
        self._published += 1
        return (crc32(str(name).encode()) if name else self._published) % self._lanes

    def _entry(self, ladder: Topology, digits: tuple[str, ...]) -> str:
        """Name the exchange to publish a message to."""
        if self._queue_per_delay:
            return ladder.direct
        if self._declares:
            return ladder.entry_exchange(digits)
        # Who may do no more than publish does that where RabbitMQ checks topic permissions.
        return ladder.level_of(digits)

    def _missing(
        self,
        lane: int,
        digits: tuple[str, ...],
        destination: Destination,
        headers: dict[str, Any],
        now: int,
    ) -> frozenset[tuple[Any, ...]]:
        if not self._declares:
            return _NOTHING
        exchange, key = destination
        wanted: tuple[tuple[Any, ...], ...] = (
            _BINDINGS,
            ("level", lane, self._ladders[lane].needs(digits)),
            ("target", exchange) if exchange else ("way", key),
        )
        if not exchange and (copies := further_keys(headers)):
            # An alternate exchange gets what no key of a message finds a way for. So beside a queue
            # with a relay, one without would get nothing.
            wanted += tuple(("relay", each) for each in (key, *copies))
        if self._queue_per_delay:
            wanted += (("direct", lane, digits),)
        # A clock that was set back makes it look sooner, never later.
        if 0 <= now - self._looked < LOOK_AGAIN and self.existing.issuperset(wanted):
            return _NOTHING
        return frozenset(wanted)

    def _refuse_unreachable(self, exchange: str) -> None:
        kind = self._types.get(exchange, "topic")
        if kind not in (*IMITABLE, "headers"):
            raise TopologyError(
                f"the exchange {exchange!r} is of {f'the type {kind!r}' if kind else 'a type'} "
                f"that reads routing keys in its own way, while a delayed message arrives with "
                f"another; delay to a direct, topic, fanout or headers exchange instead"
            )
        if kind != "headers":
            return
        for bound in self._bound:
            reads_keys = self._types.get(bound.destination) in ("direct", "topic")
            if bound.exchange == exchange and not bound.to_queue and reads_keys:
                raise TopologyError(
                    f"the headers exchange {exchange!r} is bound to {bound.destination!r}, which "
                    f"reads routing keys, and a delayed message arrives there with another; bind "
                    f"queues to {exchange!r} itself, or delay to {bound.destination!r}"
                )

    def prepare(self, needs: Iterable[tuple[Any, ...]], now: int) -> Steps:
        """Let all exist that a plan needs.

        :raises TopologyError: where the broker refuses.
        """
        wanted = set(needs)
        if not 0 <= now - self._looked < LOOK_AGAIN:
            yield from self._look_again(now)
        makers: dict[str, Callable[..., Steps]] = {
            "bindings": self._repeat_bindings,
            "way": self._lead_to,
            "relay": partial(self._lead_to, by_relay=True),
            "target": self._reach,
            "level": self._raise_to,
            "direct": self._serve,
        }
        for _ in range(_ATTEMPTS):
            for each in sorted(wanted - self.existing, key=lambda each: _KINDS.index(each[0])):
                yield from makers[each[0]](*each[1:])
            if _BINDINGS in self.existing:
                return
        raise TopologyError("a part of the ladder is deleted as fast as it is declared")

    def _look_again(self, now: int) -> Steps:
        """Look whether what this connection relies on still exists: nobody else would tell."""
        if (
            self._heights
            and (yield self._look_at(self._heights, self.topology.base)) is Answer.MISSING
        ):
            self.lost()
        self._looked = now
        # A queue may have been deleted, and made anew, by a program that we do not see.
        self.existing = {
            each for each in self.existing if each[0] not in ("way", "relay", "target")
        }

    def _look_at(self, heights: Mapping[int, int], base: Part) -> Look:
        """Return the command to look whether levels exist, and what they stand on.

        :param heights: the highest of them for each lane.
        """
        exchanges, queues = _names(base)
        for lane, height in heights.items():
            ladder = self._ladders[lane]
            exchanges += [ladder.level_name(level) for level in range(height + 1)]
            queues += [each.name for part in ladder.levels[: height + 1] for each in part.queues]
            if self._queue_per_delay:
                exchanges += _names(ladder.direct_base)[0]
        return Look(tuple(exchanges), tuple(queues))

    def lost(self) -> None:
        """Forget what exists: the broker has shown that something of ours is gone."""
        self.existing.clear()
        self._delays.clear()
        self._trusts = False

    # -- the ladder side -----------------------------------------------------------------------

    def _raise_to(self, lane: int, wanted: int) -> Steps:
        """Declare the levels up to a height, lowest first, and as high as they once were.

        A level's exchange is declared after all that is below it. So where all of them exist, and
        the highest takes its own bindings again, the rest exists too: one question for a new
        connection. Unless somebody has deleted a part of it: then all are declared again.
        """
        if ("level", lane, wanted) in self.existing:
            return
        ladder = self._ladders[lane]
        height = max(wanted, self._heights.get(lane, wanted))
        what = f"the levels up to {height}"
        levels = ladder.levels
        part: Part = sum(levels[1 : height + 1], levels[0]) if height >= 0 else Part()
        found: Any = Answer.MISSING
        if self._trusts:
            base = Part() if _BASE in self.existing else self.topology.base
            found = yield self._look_at({lane: height}, base)
            if found is Answer.DONE and height >= 0:
                # The lowest one, too: the delivery exchange alone may have been made anew.
                bindings = levels[0].bindings + levels[height].bindings
                found = yield Ensure(Part(bindings=bindings), what)
        if found is Answer.MISSING:
            self.existing.discard(_BASE)
            yield from self._lay_base()
            found = yield Ensure(part, what)
            # Whoever makes a level sees to it that the one above leads there, if it exists.
            for above in levels[height + 1 :] if found is Answer.DONE else ():
                if (yield Ensure(Part(bindings=above.bindings), what)) is Answer.MISSING:
                    break
        if self._queue_per_delay and found is Answer.DONE:
            enter = sum((ladder.direct_bindings(level) for level in range(height + 1)), ())
            ways = ladder.direct_base + Part(bindings=enter)
            found = yield Ensure(ways, "the ways into the levels")
        if found is Answer.MISSING:
            # Somebody deletes it at the same time.
            self.lost()
            return
        self._heights[lane] = height
        self.existing.update(("level", lane, each) for each in range(-1, height + 1))

    def _serve(self, lane: int, digits: tuple[str, ...]) -> Steps:
        """Give a delay a queue of its own, from its second use on, and to the first few only.

        An application whose delays hardly ever repeat would litter the broker with queues.
        """
        delay = lane, digits
        if delay not in self._delays:
            if len(self._delays) == MAX_DELAYS:
                self._delays = {each: True for each, served in self._delays.items() if served}
            self._delays[delay] = False
        elif sum(self._delays.values()) < MAX_DIRECT_QUEUES:
            ladder = self._ladders[lane]
            # Held by whoever makes such a queue or prunes one: none is pruned while it is made.
            part, lock = ladder.direct_queue(digits), f"{ladder.direct}.lock"
            if (yield Ensure(part, "a queue for one delay", lock=lock)) is Answer.DONE:
                self._delays[delay] = True
                self.existing.add(("direct", *delay))

    def _lay_base(self) -> Steps:
        if _BASE not in self.existing:
            yield Ensure(self.topology.base, "the delivery exchange and the parking queue")
            self.existing.add(_BASE)

    # -- the delivery side ---------------------------------------------------------------------

    def _refuses(self, queue: str) -> bool:
        """Whether a queue is to be reached by a relay, since it may refuse messages.

        One whose arguments are not known may; so may one that the settings name, by a policy.
        """
        return self.topology.can_have_relays and (
            self._refusing.get(queue, True)
            or self.topology.wants_relay(queue, self._settings.relays)
        )

    def _lead_to(self, queue: str, *, by_relay: bool = False) -> Steps:
        """Lead to a queue that is addressed through the default exchange.

        :param by_relay: whether by a relay even if the queue needs none.
        """
        # No queue has an empty name; to bind, that is the one that a channel declared last.
        if not queue or ("relay" if by_relay else "way", queue) in self.existing:
            return
        if queue not in self._queues and not can_be_denied(queue, self._vhost):
            raise TopologyError(
                f"the queue {queue!r} has a name of {len(queue.encode())} bytes that is not ASCII: "
                f"if it does not exist, RabbitMQ cannot say so, and may close the connection; "
                f"declare the queue on this connection before you delay to it"
            )
        by_relay = self.topology.can_have_relays and (by_relay or self._refuses(queue))
        way = self.topology.queue_relay(queue) if by_relay else self.topology.to_queue(queue)
        answer = Answer.DONE
        if by_relay and queue not in self._queues:
            # A queue that does not exist is not to leave a relay behind.
            answer = yield Look(queues=(queue,))
        if answer is Answer.DONE:
            what, needs = f"the way to the queue {queue!r}", f"write on the queue {queue!r}"
            answer = yield from self._on_the_base(Ensure(way, what, needs))
        if answer is Answer.DONE:
            self.existing.add(("way", queue))
            if by_relay or not self.topology.can_have_relays:
                self.existing.add(("relay", queue))
            self._warned.discard(queue)
        elif answer is Answer.LOCKED:
            raise TopologyError(
                f"the queue {queue!r} is exclusive to another connection, which RabbitMQ lets "
                f"nobody else bind; delay to a queue that is not exclusive"
            )
        elif not self.topology.parking:
            raise TopologyError(
                f"the queue {queue!r} does not exist, and this ladder has no place where a "
                f"message without a destination could wait; declare the queue first"
            )
        else:
            self._queues.pop(queue, None)
            yield from self._warn_parked(
                queue, f"the queue {queue!r} does not exist", "it is declared and bound"
            )

    def _reach(self, exchange: str) -> Steps:
        """See to it that an exchange exists, and has a relay where it routes by headers."""
        if not can_be_denied(exchange, self._vhost):
            # To ask for one that does not exist could end the connection.
            self.existing.add(("target", exchange))
            return
        if (yield Look((exchange,))) is Answer.MISSING:
            self._types.pop(exchange, None)
            yield from self._warn_parked(
                exchange, f"the exchange {exchange!r} does not exist", "it is declared, with queues"
            )
            return
        # Who may not ask for its type may still publish.
        with suppress(TopologyError):
            yield from self._type_of(exchange)
        if self._types.get(exchange) == "headers" and self.topology.mirrors:
            # The mirrors of others are for those who bind queues to them.
            yield from self._mirror_exchange(exchange)
        self.existing.add(("target", exchange))
        self._warned.discard(exchange)

    def _warn_parked(self, name: str, why: str, unless: str) -> Steps:
        if name not in self._warned:
            self._warned.add(name)
            yield Warn(
                f"{why}: delayed messages for it are parked in {self.topology.parking!r} unless "
                f"{unless} before they are due"
            )

    def _mirror_exchange(self, exchange: str) -> Steps:
        if ("mirror", exchange) in self.existing:
            return
        by_headers = self._types.get(exchange) == "headers"
        topology = self.topology
        command = Ensure(
            topology.exchange_relay(exchange) if by_headers else topology.mirror(exchange),
            f"the way to the exchange {exchange!r}",
            f"write on the exchange {exchange!r}" if by_headers else "",
        )
        yield from self._on_the_base(command)
        self.existing.add(("mirror", exchange))

    def _mirror_binding(self, bound: Bound) -> Steps:
        """Repeat a binding of the user's on the mirror of its exchange."""
        if bound in self.existing:
            return
        kind = yield from self._type_of(bound.exchange)
        if not bound.to_queue:
            yield from self._type_of(bound.destination)
            yield from self._mirror_exchange(bound.destination)
        yield from self._mirror_exchange(bound.exchange)
        if kind is not Answer.MISSING and kind not in IMITABLE:
            self.existing.add(bound)
            return
        by_relay = bound.to_queue and self._refuses(bound.destination)
        mirrors = self._mirrors_of(bound, by_relay=by_relay)
        part = self.topology.queue_relay(bound.destination) if by_relay else Part()
        command = Ensure(
            part + Part(bindings=mirrors),
            f"the binding of {bound.destination!r}",
            f"write on {bound.destination!r}" if bound.to_queue else "",
        )
        answer = yield from self._on_the_base(command)
        if answer is not Answer.DONE:
            # What it binds went away since, and its bindings with it.
            self._bound.pop(bound, None)
            return
        if bound.to_queue and self.topology.can_have_relays:
            # By one of the two ways only: somebody who knew less, or more, may have made the other.
            other = self._mirrors_of(bound, by_relay=not by_relay)
            yield Unbind(other, command.what)
        self.existing.add(bound)

    def _unmirror(self, bound: Bound) -> Steps:
        """Undo what :meth:`_mirror_binding` did, here or in another process."""
        self.existing.discard(bound)
        kind = yield from self._type_of(bound.exchange)
        if kind is not Answer.MISSING and kind not in IMITABLE:
            return
        for by_relay in {False, bound.to_queue and self.topology.can_have_relays}:
            yield Unbind(
                self._mirrors_of(bound, by_relay=by_relay), f"the removal of the binding {bound}"
            )

    def _mirrors_of(self, bound: Bound, *, by_relay: bool) -> tuple[Binding, ...]:
        topology, target = self.topology, bound.destination
        return topology.mirror_bindings(
            bound.exchange,
            self._types.get(bound.exchange) or "topic",
            topology.queue_relay_name(target) if by_relay else target,
            bound.key,
            to_queue=bound.to_queue,
        )

    def _on_the_base(self, command: Ensure) -> Any:
        """Ensure a part that the delivery side carries; where that is gone, make it first."""
        yield from self._lay_base()
        answer = yield command
        if answer is not Answer.MISSING:
            return answer
        exchanges, queues = _names(self.topology.base)
        sources = {each.source for each in command.part.bindings}
        declared = {each.name for each in command.part.exchanges}
        exchanges += [name for name in sources - declared if self.topology.owns(name)]
        if (yield Look(tuple(dict.fromkeys(exchanges)), tuple(queues))) is Answer.DONE:
            return Answer.MISSING
        self.lost()
        yield from self._lay_base()
        return (yield command)

    def _type_of(self, exchange: str) -> Any:
        """Ask for the type of an exchange, if nobody here has declared it."""
        if exchange not in self._types:
            answer = yield AskType(exchange)
            if answer is Answer.MISSING:
                return answer
            self._types[exchange] = answer
        return self._types[exchange]

    # -- what the program declares, binds and deletes ------------------------------------------

    @property
    def _is_active(self) -> bool:
        return _BINDINGS in self.existing

    def consuming(self) -> Steps:
        """Repeat what was bound so far for delayed messages: the connection begins to consume."""
        if not self._declares or self._is_active:
            return
        try:
            yield from self._repeat_bindings()
        except TopologyError as exc:
            # Once is enough: what is consumed next would only be refused the same again.
            self.existing.add(_BINDINGS)
            yield Warn(f"delayed messages may not reach the queues bound here: {exc}")

    def _repeat_bindings(self) -> Steps:
        for _ in range(_ATTEMPTS):
            self.existing.add(_REPEATING)
            if self._bound or self._queues:
                yield from self._lay_base()
            for queue in list(self._queues):
                yield from _quietly(self._lead_to(queue))
            for bound in list(self._bound):
                yield from _quietly(self._mirror_binding(bound))
            # Else a part of the whole was found to be gone, and what came before is missing.
            if _REPEATING in self.existing:
                break
        self.existing.add(_BINDINGS)

    def declared_exchange(self, exchange: str, exchange_type: str) -> None:
        """Take note of an exchange's type."""
        if exchange:
            self._types[exchange] = exchange_type

    def declared_queue(
        self,
        queue: str,
        arguments: Mapping[str, Any] | None,
        *,
        passive: bool,
        mailbox: bool = False,
    ) -> Steps:
        """Take note of a queue, and lead to it.

        :param passive: whether it was only looked for, so that its arguments are not known.
        :param mailbox: whether nobody else addresses it by its name.
        """
        if self._is_private(queue):
            return
        if not mailbox:
            self._queues[queue] = None
        if not passive:
            refuses = str((arguments or {}).get("x-overflow")).startswith("reject-publish")
            self._refusing[queue] = refuses
            # Whoever declares it may have made it anew; whoever looks has not.
            self.existing -= {("way", queue), ("relay", queue)}
            if refuses and self.topology.queue_type == "classic":
                yield Warn(
                    f"the queue {queue!r} rejects messages while it is full: delayed ones that "
                    f"come from classic queues are lost then; quorum queues keep them",
                    once=True,
                )
        if not mailbox:
            yield from self._followed(self._lead_to(queue))

    def bound(self, exchange: str, destination: str, key: str, *, to_queue: bool) -> Steps:
        """Take note of a binding, and repeat it if this connection delays or consumes."""
        if self._mirrors(exchange, destination):
            bound = Bound(exchange, destination, key, to_queue)
            self._bound[bound] = None
            # Whoever binds again may know that what we made has gone meanwhile.
            self.existing -= {bound, ("mirror", exchange), ("mirror", destination)}
            yield from self._followed(self._mirror_binding(bound))

    def unbound(self, exchange: str, destination: str, key: str, *, to_queue: bool) -> Steps:
        """Undo what :meth:`bound` did, here or in another process."""
        if self._mirrors(exchange, destination):
            bound = Bound(exchange, destination, key, to_queue)
            self._bound.pop(bound, None)
            if self._declares:
                yield from _quietly(self._unmirror(bound))

    def deleted_queue(self, queue: str) -> Steps:
        """Forget a queue; the broker has removed its bindings, but not those of its relay."""
        self._queues.pop(queue, None)
        self._refusing.pop(queue, None)
        self.existing -= {("way", queue), ("relay", queue)}
        bound = [each for each in self._bound if each.to_queue and each.destination == queue]
        self._forget(bound)
        if self._declares and self.topology.can_have_relays:
            # Its relay outlives it, and would hand on to a queue that is made anew.
            for each in bound:
                yield from _quietly(self._unmirror(each))

    def deleted_exchange(self, exchange: str) -> Steps:
        """Remove the mirror of an exchange that is gone."""
        self._types.pop(exchange, None)
        if not self._mirrors(exchange):
            return
        self.existing -= {("mirror", exchange), ("target", exchange)}
        self._forget(
            each
            for each in self._bound
            if exchange in (each.exchange, None if each.to_queue else each.destination)
        )
        if self._declares:
            # What a relay held would expire into nothing, now that its exchange is gone.
            command = Delete(
                (self.topology.mirror_name(exchange),),
                (self.topology.exchange_relay_name(exchange),),
                f"the removal of the way to {exchange!r}",
            )
            yield from _quietly(_one(command))

    def _followed(self, steps: Steps) -> Steps:
        """Do what the program's own call, which has succeeded already, does not depend on."""
        if not self._is_active:
            return
        # What is interrupted is left to the next publish.
        self.existing -= {_BINDINGS}
        self.existing |= {_REPEATING}
        yield from _quietly(steps)
        if _REPEATING in self.existing:
            self.existing.add(_BINDINGS)
        else:
            # It has shown that a part of the whole is gone.
            yield from _quietly(self._repeat_bindings())

    def _forget(self, gone: Iterable[Bound]) -> None:
        for bound in list(gone):
            del self._bound[bound]
            self.existing.discard(bound)

    def _mirrors(self, *names: str) -> bool:
        """Whether what is between these exchanges and queues is repeated on the delivery side."""
        return self.topology.mirrors and not any(self._is_private(name) for name in names)

    def _is_private(self, name: str) -> bool:
        """Whether it is no business of ours: the ladder itself, or Celery's control and events."""
        return (
            not name
            or self.topology.owns(name)
            or name.endswith(".pidbox")
            or name == "celeryev"
            or name.startswith("celeryev.")
        )

    # -- a delivery ----------------------------------------------------------------------------

    def received(
        self, exchange: str, routing_key: str, properties: dict[str, Any], queue: str
    ) -> Delivery | None:
        """Return how a message was published that came by a ladder; None where it came by none.

        :param queue: the queue that it was taken from, so far as that is known.
        """
        headers = properties.get(_HEADERS)
        # A ladder of another system, of an older form, or of another namespace may lead here, too.
        by = ladder_of_exchange(exchange, self.topology)
        if by is None:
            if not (headers and HEADER in headers):
                return None
            if parking_of(exchange):
                by = replace(self.topology, namespace=exchange.partition(".")[0])
        ladder, on_ladder = by or self.topology, by is not None
        found = Destination(exchange, routing_key)
        try:
            destination = ladder.destination(routing_key, carried(headers or {}))
        except AddressError:
            pass
        else:
            # Elsewhere, the exchange is the user's: a relay led to it, or a dead letter.
            found = Destination(exchange, destination.routing_key)
            if on_ladder:
                found = self._published_to(ladder, destination, found, queue)
        if headers:
            properties = {**properties, _HEADERS: dict(headers)}
            unwrap(properties, ladder.owns)
            if on_ladder and ladder.delay_header:
                properties[_HEADERS].pop(ladder.delay_header, None)
        return Delivery(found, properties)

    def _published_to(
        self, ladder: Topology, written: Destination, arrived: Destination, queue: str
    ) -> Destination:
        """Choose what the consumer is told: a retry is published there.

        A foreign ladder's key has no exchange: it is a queue's name, or a topic exchange's key. So
        a retry of what came that way goes to the queue that it came from, by our own ladder.
        """
        if ladder.mirrors or written.routing_key in self._queues:
            return written
        return Destination("", queue) if queue else arrived


def _names(part: Part) -> tuple[list[str], list[str]]:
    return [each.name for each in part.exchanges], [each.name for each in part.queues]


def _one(command: Delete) -> Steps:
    yield command


def _quietly(steps: Steps) -> Steps:
    try:
        yield from steps
    except (TopologyError, AddressError) as exc:
        yield Warn(f"delayed messages may not arrive as others do: {exc}")
