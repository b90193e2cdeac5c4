"""Every decision of one connection, and what it knows about the broker. Pure.

For a publish, the router returns a :class:`Plan`; for a delivery, a :class:`Delivery`; for what a
program declares, binds or deletes, the commands to run, see :mod:`.commands`. The set
:attr:`Router.existing` has what exists on the broker; a plan's needs are what is missing from it,
which is nearly always nothing.

The state is in :mod:`.knowledge`; the decisions about levels and about destinations are in
:mod:`.ladder_side` and :mod:`.delivery_side`. The router must not do I/O, read a clock, or know
Kombu, py-amqp or Celery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

from kombu_binary_delay.errors import AddressError, DelayError, TopologyError
from kombu_binary_delay.ladder.address import Destination, check_names, has_digest, route
from kombu_binary_delay.ladder.delay import JITTER, X_DELAY, due_time, jitter_of
from kombu_binary_delay.ladder.envelope import (
    HEADER,
    HEADERS,
    carried,
    further_keys,
    name_deaths,
    published_as,
    unwrap,
    wrap,
)
from kombu_binary_delay.ladder.parts import Binding, Exchange, Part, Queue
from kombu_binary_delay.ladder.recognise import ladder_of_exchange, parking_of
from kombu_binary_delay.ladder.topology import IMITABLE, Topology
from kombu_binary_delay.ladder.versions import OLDEST, URGENT, is_since

from .commands import Answer, Look, Steps, Warn
from .delivery_side import REPLY_TO, DeliverySide
from .knowledge import ATTEMPTS, BASE, BINDINGS, FIRST, KINDS, PATH, quietly

#: The interval, in microseconds, at which to check that what existed still exists.
LOOK_AGAIN = 30_000_000
#: The number of destinations whose routes are declared again after each check, in rotation, and of
#: bindings that are repeated again.
MAX_RENEWED = 16
#: The same for the mirrors of exchanges. They are led to at once, within one publish.
MAX_MIRRORS = 4


class Plan(NamedTuple):
    """How to publish a message, and what must exist before (keys of :attr:`Router.existing`)."""

    exchange: str
    routing_key: str
    properties: dict[str, Any]
    lane: int
    needs: frozenset[tuple[Any, ...]]


class Delivery(NamedTuple):
    """The destination and properties with which a message that a ladder delivers was published."""

    destination: Destination
    properties: dict[str, Any]


_NOTHING: frozenset[tuple[Any, ...]] = frozenset()
_T = TypeVar("_T")


class Router(DeliverySide):
    """The decisions of one connection.

    :param settings: of the transport.
    :param server: the properties that the broker sent when the connection opened.
    :param vhost: the virtual host that the connection is in.
    """

    def opened(self) -> Steps:
        """Warn about the guarantees that a new connection cannot give."""
        if is_since(self._server, (0,)) and not is_since(self._server, OLDEST):
            yield Warn(
                f"RabbitMQ {self._server.get('version')} is not supported: delayed messages need "
                f"RabbitMQ {'.'.join(map(str, OLDEST))} or later",
                once=True,
            )
        if self._settings.queue_type == "classic":
            yield Warn(
                "delayed messages wait in classic queues, since queue_type is 'classic': a broker "
                "that crashes can lose messages that move between levels; use quorum queues",
                once=True,
            )

    # -- a publish -----------------------------------------------------------------------------

    def due(self, asked: Mapping[str, Any], now: int, name: str) -> int | None:
        """Return when a message is due, with its jitter; None if it asks for no delay.

        :param asked: the headers that ask for the delay.
        :param now: microseconds since the epoch, as the result.
        :param name: what decides the jitter of a message that has no task id.
        :raises DelayError: if the headers cannot be read, or the longest possible wait is longer
            than the ladder's maximum: whether a message is refused must not depend on its name.
        """
        due = due_time(asked, now, name)
        if due is None or JITTER not in asked:
            return due
        ladder = self.topology.ladder
        wait = max((due_time({**asked, JITTER: 0}, now) or now) - now, 0) / 1000
        jitter = jitter_of(asked) / 1000
        if wait <= ladder.maximum < wait + jitter:
            raise DelayError(
                f"{JITTER} of {jitter:.0f} ms on top of a delay of {wait:.0f} ms is longer than "
                f"{ladder.maximum} ms, the longest delay of the ladder {ladder.name}; use less "
                f"jitter, a shorter delay, or a ladder with more levels"
            )
        return due

    def publish(
        self,
        properties: dict[str, Any],
        due: int | None,
        destination: Destination,
        now: int,
        lane: int | None = None,
    ) -> Plan:
        """Return the plan for a delayed publish.

        :param due: microseconds since the epoch; None for a delay of zero.
        :param now: microseconds since the epoch, by the publisher's clock.
        :param lane: the lane of an earlier plan for the same message, whose needs exist by now. The
            plan then needs only what the shorter delay passes and the earlier one did not.
        :raises DelayError: if the delay is longer than the ladder's maximum.
        :raises AddressError: if the destination does not fit into the routing key.
        :raises TopologyError: if a delayed message cannot reach the exchange.
        """
        headers = properties.get(HEADERS) or {}
        if due is None or due <= now:
            if X_DELAY in headers:
                headers = {name: headers[name] for name in headers if name != X_DELAY}
                properties = {**properties, HEADERS: headers}
            return Plan(*destination, properties, 0, _NOTHING)
        if destination.exchange:
            check_names(destination.exchange, (destination.routing_key,))
            destination = self._unwrapped(destination, headers)
        try:
            return self._delayed(properties, due, destination, now, lane)
        except (AddressError, TopologyError):
            if lane is not None or not self._forget_type(destination.exchange, now):
                raise
            return self._delayed(properties, due, destination, now, lane)

    def check(
        self, properties: dict[str, Any], due: int | None, destination: Destination, now: int
    ) -> None:
        """Raise the errors of :meth:`publish`; the next message has the same lane as without it."""
        published = self._published
        try:
            self.publish(properties, due, destination, now)
        finally:
            self._published = published

    def _delayed(
        self,
        properties: dict[str, Any],
        due: int,
        destination: Destination,
        now: int,
        lane: int | None,
    ) -> Plan:
        headers = properties.get(HEADERS) or {}
        keys = destination.routing_key, *further_keys(headers)
        check_names(destination.exchange, keys)
        topic, planned = False, lane is not None
        if not destination.exchange:
            _refuse_reply_to(keys)
        else:
            self._refuse_unreachable(destination.exchange)
            topic = self._is_topic(destination.exchange, planned=planned)
        if lane is None:
            lane = self._lane(properties)
        ladder = self._ladders[lane]
        digits = ladder.ladder.digits((due - now) / 1000)
        properties, key = wrap(
            properties,
            destination,
            -(-due // 1000),
            lambda each: ladder.address(digits, each, topic=topic),
            ladder.owns,
        )
        is_written = not topic and (keys[1:] or has_digest(key))
        if destination.exchange and is_written and self._leads_to(destination.exchange, ("topic",)):
            # A topic exchange cannot read a digest.
            for each in keys:
                ladder.address(digits, Destination(destination.exchange, each), topic=True)
        if ladder.delay_header:
            properties[HEADERS][ladder.delay_header] = ladder.ladder.delay(digits) // 1000
        needs = self._missing(lane, digits, destination, keys, now)
        if planned:
            needs = frozenset(each for each in needs if each[0] in ("level", FIRST))
        return Plan(self._first_exchange(ladder, digits), key, properties, lane, needs)

    def plan_through(
        self, exchange: str, destination: Destination, due: int, now: int
    ) -> tuple[Plan, Binding]:
        """Return the plan for a delayed message of ours through an exchange of ours.

        The levels are bound behind that exchange. So a user that may write to the levels but not to
        the exchange cannot forge such a message: its first death names the exchange it entered by.

        :param due: microseconds since the epoch.
        :returns: the plan, and the binding that it requires in addition to its needs.
        :raises DelayError: if the delay is longer than the ladder's maximum.
        """
        ladder = self._ladders[0]
        digits = ladder.ladder.digits((due - now) / 1000)
        properties, key = wrap(
            {},
            destination,
            -(-due // 1000),
            lambda each: ladder.address(digits, each),
            ladder.owns,
        )
        pattern = "*." * len(digits) + route(destination)
        enter = Binding(exchange, ladder.level_of(digits), pattern, to_queue=False)
        needs = frozenset((BINDINGS, ("level", 0, ladder.needs(digits))))
        return Plan(exchange, key, properties, 0, needs), enter

    def _unwrapped(self, destination: Destination, headers: dict[str, Any]) -> Destination:
        """Return the destination of a publish, also if it is a retry to a ladder's address.

        A foreign ladder reaches queues by name; a retry to such a name uses our own ladder.
        """
        ladder = ladder_of_exchange(destination.exchange, self.topology)
        if ladder is None or ladder is self.topology:
            return self.topology.unwrap(destination, carried(headers))
        try:
            return ladder.destination(destination.routing_key)
        except AddressError:
            return Destination("", destination.routing_key)

    def _lane(self, properties: Mapping[str, Any]) -> int:
        """Return the lane for a message; it depends on the id, so that a message keeps its lane."""
        if self._keeps_urgent_apart and _is_urgent(properties.get("priority")):
            return self._lanes
        if self._lanes == 1:
            return 0
        name = properties.get("message_id") or properties.get("correlation_id")
        self._published += 1
        if not (name and isinstance(name, str)):
            return self._published % self._lanes
        return crc32(name.encode("utf-8", "surrogatepass")) % self._lanes

    def _first_exchange(self, ladder: Topology, digits: tuple[str, ...]) -> str:
        """Return the exchange of the ladder to publish a message to."""
        if self._queue_per_delay:
            return ladder.direct
        if self._declares:
            return ladder.entry_exchange(digits)
        # For users that may only publish: RabbitMQ checks topic permissions at a topic exchange.
        return ladder.level_of(digits)

    def _missing(
        self,
        lane: int,
        digits: tuple[str, ...],
        destination: Destination,
        keys: tuple[str, ...],
        now: int,
    ) -> frozenset[tuple[Any, ...]]:
        if not self._declares:
            if not self._disturbed:
                return _NOTHING
            first = (FIRST, self._first_exchange(self._ladders[lane], digits))
            return _NOTHING if first in self.existing else frozenset({first})
        exchange, key = destination
        ladder = self._ladders[lane]
        # A clock that was set back causes the check sooner, never later.
        is_recent = 0 <= now - self._looked < LOOK_AGAIN
        levels: tuple[Any, ...] = ("level", lane, ladder.needs(digits))
        if levels not in self.existing and ladder.mirrors:
            path = (PATH, lane, digits)
            if not self._looked or (is_recent and path in self.existing):
                levels = path
        wanted: tuple[tuple[Any, ...], ...] = (
            levels,
            ("target", exchange) if exchange else ("way", key),
        )
        if not exchange and len(keys) > 1:
            # The alternate exchange gets a message only if none of its keys matches. So with one
            # key for a queue with a relay, a queue without a relay would get nothing.
            wanted = (levels, *(("relay", each) for each in keys))
        if exchange or self._repeats or (self._looked and not is_recent):
            wanted += (BINDINGS,)
        if self._queue_per_delay:
            wanted += (("direct", lane, digits),)
        if is_recent and self.existing.issuperset(wanted):
            return _NOTHING
        return frozenset(wanted)

    def _refuse_unreachable(self, exchange: str) -> None:
        kind = self._types.get(exchange, "topic")
        if kind not in (*IMITABLE, "headers"):
            raise TopologyError(
                f"the exchange {exchange!r} is of {f'the type {kind!r}' if kind else 'a type'} "
                f"that delayed messages cannot reach, since their routing key is an address; "
                f"delay to a direct, topic, fanout or headers exchange instead"
            )
        reader = self._leads_to(exchange, ("direct", "topic")) if kind == "headers" else None
        if reader is not None:
            raise TopologyError(
                f"the headers exchange {exchange!r} leads to {reader!r}, which reads routing keys, "
                f"but the key of a delayed message is an address; bind queues to {exchange!r} "
                f"itself, or delay to {reader!r}"
            )

    def _forget_type(self, exchange: str, now: int) -> bool:
        """Forget the type by which a message is refused, if it was asked for long ago.

        Another program may have deleted the exchange and declared it with another type.
        """
        is_old = self._looked and not 0 <= now - self._looked < LOOK_AGAIN
        if not (is_old and self._declares and exchange in self._types and self._can_ask(exchange)):
            return False
        del self._types[exchange]
        self.existing.discard(("target", exchange))
        return True

    def _is_topic(self, exchange: str, *, planned: bool) -> bool:
        """Whether to treat an exchange as a topic exchange; to be safe, also if it is unknown.

        :param planned: whether an earlier plan's needs exist. Otherwise they include the type, and
            the next plan is by that.
        """
        if exchange in self._types:
            return self._types[exchange] == "topic"
        asks = self._declares and not planned and ("target", exchange) not in self.existing
        return bool(exchange) and not asks

    def prepare(self, needs: Iterable[tuple[Any, ...]], now: int) -> Steps:
        """Declare what a plan needs.

        :raises TopologyError: if the broker refuses.
        """
        wanted = set(needs)
        if not self._declares:
            yield from self._find(wanted)
            return
        losses = self._shared.losses
        if not self._looked:
            self._rely_on_others(now)
        if not (self._looked and 0 <= now - self._looked < LOOK_AGAIN):
            yield from self._look_again(now, is_first=not self._looked)
        makers: dict[str, Callable[..., Steps]] = {
            "bindings": self._repeat_bindings,
            "way": self._lead_to,
            "relay": partial(self._lead_to, by_relay=True),
            "target": self._reach,
            "level": self._raise_to,
            "direct": self._serve,
        }
        for _ in range(ATTEMPTS):
            yield from self._settle()
            lost = self._losses
            for path in [each for each in wanted - self.existing if each[0] == PATH]:
                _, lane, digits = path
                ways = [each[1] for each in wanted if each[0] == "way"]
                # Nobody whose look it relies on has looked at this path.
                begins = not self.relies_on_others
                if not (begins and (yield from self._begin(lane, digits, ways))):
                    wanted.remove(path)
                    wanted.add(("level", lane, self._ladders[lane].needs(digits)))
            for each in sorted(wanted - self.existing, key=lambda each: KINDS.index(each[0])):
                yield from makers[each[0]](*each[1:])
            if self._losses == lost:
                self._share(losses)
                return
        raise TopologyError(
            f"a part of the ladder was deleted during {ATTEMPTS} attempts to declare it; stop the "
            f"program that deletes it, and publish again"
        )

    def _rely_on_others(self, now: int) -> None:
        """Begin with what another connection of this process found less than half a minute ago."""
        found = self._shared.found
        # One that consumes could run the program's code while it waits for `relies_on_others`.
        if found is None or self._repeats or not 0 <= now - found.looked < LOOK_AGAIN:
            return
        self._adopt(found)
        self.relies_on_others = True

    def _find(self, wanted: Iterable[tuple[Any, ...]]) -> Steps:
        """Check that what the broker has reported as missing was made again, by an administrator.

        :raises TopologyError: if it was not: the broker would close the channel of a publish.
        """
        found = Answer.DONE
        # A user that may not ask publishes, and sees.
        with suppress(TopologyError):
            found = yield Look(tuple(exchange for _, exchange in wanted))
        if found is Answer.MISSING:
            names = " and ".join(repr(exchange) for _, exchange in wanted)
            raise TopologyError(
                f"a delayed message needs {names}, which does not exist, and declare is 'never'; "
                f"make the ladder of these settings with kombu-binary-delay create"
            )
        self.existing.update(wanted)

    def look(self, now: int) -> Steps:
        """Check that what a connection's consumers rely on still exists, if it was not lately.

        A connection that only consumes has no publish that would.
        """
        relies = self._declares and (BASE in self.existing or self._looks)
        if relies and not 0 <= now - self._looked < LOOK_AGAIN:
            ways = self._known("way", "relay")
            for each in (self._look_again(now), self.prepare({BINDINGS, *ways}, now)):
                yield from quietly(each, once=True)

    def _look_again(self, now: int, *, is_first: bool = False) -> Steps:
        """Check that what this connection relies on still exists; RabbitMQ reports no deletion."""
        topology = self.topology
        mirrors = [exchange for _, exchange in self._known("mirror")]
        relays = [
            topology.exchange_relay_name(each)
            for each in mirrors
            if self._types.get(each) == "headers"
        ]
        behind = {
            each.destination
            for each in self._bound
            if each.to_queue
            and each in self.existing
            and self._types.get(each.exchange) in IMITABLE
        }
        relays += [topology.queue_relay_name(each) for each in behind if self._refuses(each)]
        part = Part(
            tuple(Exchange(topology.mirror_name(each)) for each in mirrors),
            tuple(Queue(each, ()) for each in relays),
        )
        look = self._look_at(self._heights, topology.base + part)
        # For the first message, what it passes is looked at next.
        known = not is_first and (self._heights or BASE in self.existing)
        if known and (yield from self._past_parking(look)) is Answer.MISSING:
            self.lost()
        self._looked = now
        # What the first message passed was not looked at. A binding of the user's is longer.
        self.existing -= {each for each in self.existing if each[0] == PATH and len(each) == 3}
        if self._lacks_parking:
            self._lacks_parking = False
            self.existing.discard(BASE)
        # Otherwise, all is declared again in any case.
        if BINDINGS in self.existing:
            yield from quietly(self._lay_base())
            self._unreached &= set(self._bound)
            for each in list(self._unreached):
                yield from quietly(self._mirror_binding(each))
        # Another program may have deleted and recreated a queue, without its bindings. So the route
        # to it is declared again: to a few queues after each check, not to hundreds at once.
        ways = self._in_turn(self._known("way", "relay", "target"), MAX_RENEWED)
        self.existing.difference_update(ways)
        if known:
            # Or the delivery exchange, without its bindings to the mirrors, which are there. Those
            # to the levels are in the look.
            found = self._in_turn(self._known("mirror"), MAX_MIRRORS)
            yield from quietly(self._lead_to_mirrors(exchange for _, exchange in found))
            # Or a mirror or a relay, without the bindings of this connection.
            bound = self._in_turn(self._renewable(), MAX_RENEWED)
            yield from quietly(self._renew_bindings(bound), once=True)
        self._looks += 1

    def _known(self, *kinds: str) -> list[tuple[Any, ...]]:
        """Return what exists of some kinds that have one name, in order."""
        # A binding of the user's is longer, and begins with an exchange, whatever its name is.
        return sorted(each for each in self.existing if each[0] in kinds and len(each) == 2)

    def _in_turn(self, known: list[_T], number: int) -> list[_T]:
        """Return some of a list, so that each look takes the next, and the first after the last."""
        first = self._looks * number % max(len(known), 1)
        return (known[first:] + known[:first])[:number]

    # -- a delivery ----------------------------------------------------------------------------

    def received(
        self, exchange: str, routing_key: str, properties: dict[str, Any], queue: str
    ) -> Delivery | None:
        """Return how a message that a ladder delivers was published; None if no ladder did.

        :param queue: the queue that it was taken from; empty if it is not known.
        """
        headers = properties.get(HEADERS)
        by = ladder_of_exchange(exchange, self.topology)
        if by is None:
            if not (headers and HEADER in headers):
                return None
            by = self._ladder_of(exchange)
        ladder, destination = self._written(by, routing_key, headers or {})
        found = Destination(exchange, routing_key)
        if destination is not None:
            # Otherwise the exchange is the user's: it came by a relay, or as a dead letter.
            found = Destination(exchange, destination.routing_key)
            if by is not None:
                found = self._published_to(ladder, destination, found, queue)
        if headers:
            found, copies = published_as(headers) or (found, {})
            properties = {**properties, HEADERS: {**headers, **copies}}
            unwrap(properties, ladder.owns)
            name_deaths(properties[HEADERS], headers, partial(self._came_by, headers))
            if ladder.delay_header:
                properties[HEADERS].pop(ladder.delay_header, None)
        return Delivery(found, properties)

    def _came_by(self, headers: dict[str, Any], exchange: str, key: str) -> Destination | None:
        """Return how a message was published that came by this; None if it came by no ladder."""
        by = self._ladder_of(exchange)
        if by is None:
            # Of what has been dead-lettered before, the key may be the address still.
            written = self._written(None, key, headers)[1]
            found, _ = published_as(headers) or (written, {})
            return written and Destination(exchange, (found or written).routing_key)
        if not by.mirrors:
            return None
        found, _ = published_as(headers) or (None, {})
        return found or self._written(by, key, headers)[1]

    def _ladder_of(self, exchange: str) -> Topology | None:
        """Return the ladder of an exchange: of any system or namespace; None if of none."""
        by = ladder_of_exchange(exchange, self.topology)
        if by is None and parking_of(exchange):
            by = Topology(namespace=exchange.partition(".")[0])
        return by

    def _written(
        self, by: Topology | None, key: str, headers: dict[str, Any]
    ) -> tuple[Topology, Destination | None]:
        """Return the ladder that wrote a routing key, and the destination in it, if any.

        :param by: the ladder that has delivered the message; None for a dead letter, or a relay's.
        """
        ladders = (by,) if by else (self._ours, self.topology)
        for ladder in ladders:
            with suppress(AddressError):
                return ladder, ladder.destination(key, carried(headers))
        return ladders[0], None

    def _published_to(
        self, ladder: Topology, written: Destination, arrived: Destination, queue: str
    ) -> Destination:
        """Return the destination that the consumer sees, and that a retry is published to.

        A foreign ladder's key has no exchange: it is a queue's name, or a topic exchange's key. So
        a retry of such a message goes to the queue that it came from, by our own ladder.
        """
        if ladder.mirrors:
            return written
        if queue:
            return Destination("", queue)
        return written if written.routing_key in self._queues else arrived


def _is_urgent(priority: object) -> bool:
    return isinstance(priority, int) and priority >= URGENT


def _refuse_reply_to(keys: Iterable[str]) -> None:
    for each in keys:
        if each.startswith(REPLY_TO):
            raise TopologyError(
                f"{each!r} is a direct reply-to address, which is no queue that a ladder can lead "
                f"to; delay to a queue, or send the reply without a delay"
            )
