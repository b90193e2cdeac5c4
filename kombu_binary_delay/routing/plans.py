"""How a delayed message is published, and what must exist before. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from zlib import crc32

from kombu_binary_delay.errors import AddressError, TopologyError
from kombu_binary_delay.ladder.address import Destination, check_names, has_digest, route
from kombu_binary_delay.ladder.delay import X_DELAY
from kombu_binary_delay.ladder.envelope import HEADERS, carried, further_keys, wrap
from kombu_binary_delay.ladder.parts import Binding
from kombu_binary_delay.ladder.recognise import ladder_of_exchange
from kombu_binary_delay.ladder.topology import IMITABLE, Topology
from kombu_binary_delay.ladder.versions import URGENT

from .knowledge import BINDINGS, FIRST, PATH, Knowledge, Repetition, is_recent

#: RabbitMQ reports such a name as a queue, and lets nobody bind it:
#: https://www.rabbitmq.com/docs/direct-reply-to
REPLY_TO = "amq.rabbitmq.reply-to"

_NOTHING: frozenset[tuple[Any, ...]] = frozenset()
#: The most delays whose lower digits are kept as text, and the most of each other kind of text.
_MOST_DELAYS, _MOST = 4096, 10_000


class Plan(NamedTuple):
    """How to publish a message, and what must exist before (in :attr:`.Knowledge.existing`)."""

    exchange: str
    routing_key: str
    properties: dict[str, Any]
    lane: int
    needs: frozenset[tuple[Any, ...]]


class _Digits:
    """The digits of delays on one ladder, as text: few patterns, each kept once it was written."""

    def __init__(self, ladder: Topology) -> None:
        self._ladder = ladder
        self._tick = ladder.ladder.tick
        #: How many of the lowest levels are one part of the text, and how many ticks they hold.
        self._lowest, self._span = 0, 1
        for radix in reversed(ladder.ladder.radices[1:]):
            if self._span * radix > _MOST_DELAYS:
                break
            self._lowest, self._span = self._lowest + 1, self._span * radix
        self._low: dict[int, str] = {}
        self._high: dict[int, tuple[str, str, int]] = {}
        self._short: dict[int, tuple[str, str, int]] = {}

    def of(self, ticks: int) -> tuple[str, str, int]:
        """Return the exchange to enter by, the digits as an address has them, and the level."""
        high, low = divmod(ticks, self._span)
        if not high:
            return self._short.get(low) or self._kept(self._short, low, low, 0)
        rest = self._high.get(high) or self._kept(self._high, high, high * self._span, self._lowest)
        text = self._low.get(low)
        if text is None:
            # With a digit above them, they are all written.
            all_digits = self._words(low + self._span)[: self._lowest]
            text = self._low[low] = "".join(all_digits)
        return rest[0], text + rest[1], rest[2]

    def _kept(
        self, kept: dict[int, tuple[str, str, int]], at: int, ticks: int, lowest: int
    ) -> tuple[str, str, int]:
        if len(kept) >= _MOST:
            kept.clear()
        digits = self._ladder.ladder.digits(ticks * self._tick)
        text = "".join(self._words(ticks)[lowest:])
        kept[at] = made = self._ladder.entry_exchange(digits), text, self._ladder.needs(digits)
        return made

    def _words(self, ticks: int) -> list[str]:
        """Return the digits, lowest first, each with the dot after it."""
        digits = self._ladder.ladder.digits(ticks * self._tick)
        return [f"{digit}." for digit in reversed(digits)]


class Plans:
    """Plans what one connection publishes.

    :param known: the state of the connection.
    """

    def __init__(self, known: Knowledge) -> None:
        self._known = known
        self._topology = known.topology
        self._declares = known.declares
        self._queue_per_delay = known.settings.queue_per_delay
        self._ladders = known.ladders
        self._lanes = known.settings.lanes
        self._digits = [_Digits(ladder) for ladder in self._ladders]
        #: By exchange, its type and routing key, what follows the digits of an address.
        self._routes: dict[tuple[str, str | None, str], str] = {}
        #: How many messages there were, if there are several lanes.
        self._published = 0

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
        # What is empty may be no text at all.
        if destination.exchange != "":
            check_names(destination.exchange, (destination.routing_key,))
            destination = self._without_ladder(destination, headers)
        try:
            return self._plan_delayed(properties, due, destination, now, lane)
        except (AddressError, TopologyError):
            if lane is not None or not self._forget_type(destination.exchange, now):
                raise
            return self._plan_delayed(properties, due, destination, now, lane)

    def enter(
        self,
        destination: Destination,
        dues: Iterable[int | None],
        names: Iterable[object],
        now: int,
        priority: object,
    ) -> list[tuple[str, str]]:
        """Return the exchanges and the keys of messages that have no further routing keys.

        They are those of :meth:`publish`, up to the first message that needs a plan: if its
        destination was not planned before, or what it needs is not known to exist.

        :param dues: in microseconds since the epoch; None for a message that does not wait.
        :param names: the messages' ids, by which they have their lanes.
        :param now: microseconds since the epoch, by the publisher's clock.
        :param priority: of all of them, by which they may have a ladder of their own.
        """
        known, lanes = self._known, self._lanes
        exchange, key = destination
        text = self._routes.get((exchange, known.exchanges.types.get(exchange), key), "")
        can_wait = (
            text != ""
            and is_recent(known.looked, now)
            and (("target", exchange) if exchange else ("way", key)) in known.existing
            and not ((exchange or known.repeats) and known.repetition is not Repetition.DONE)
        )
        has_lanes = lanes > 1 or known.keeps_urgent_apart
        lane, ladder = 0, self._topology.ladder
        tick, longest = ladder.tick * 1000, ladder.maximum // ladder.tick
        ways: list[tuple[str, str]] = []
        for due, name in zip(dues, names, strict=False):
            if due is None or due <= now:
                ways.append(destination)
                continue
            # Messages without a name take their lanes in turns.
            if not can_wait or (lanes > 1 and not name):
                break
            if has_lanes:
                lane = self._lane_of({"priority": priority, "correlation_id": name})
            ticks = -((now - due) // tick)
            if ticks > longest:
                break
            first, digits, level = self._digits[lane].of(ticks)
            if ("level", lane, level) not in known.existing:
                break
            ways.append((first, digits + text))
        return ways

    def check(
        self, properties: dict[str, Any], due: int | None, destination: Destination, now: int
    ) -> None:
        """Raise the errors of :meth:`publish`; the next message has the same lane as without it."""
        published = self._published
        try:
            self.publish(properties, due, destination, now)
        finally:
            self._published = published

    def _plan_delayed(
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
            lane = self._lane_of(properties)
        ladder = self._ladders[lane]
        digits = ladder.ladder.digits((due - now) / 1000)
        properties, key = wrap(
            properties,
            destination,
            -(-due // 1000),
            lambda place: ladder.address(digits, place, topic=topic),
            ladder.owns,
        )
        is_written = not topic and (keys[1:] or has_digest(key))
        exchange = destination.exchange
        if exchange and is_written and self._known.exchange_behind(exchange, ("topic",)):
            # A topic exchange cannot read a digest.
            for written in keys:
                ladder.address(digits, Destination(exchange, written), topic=True)
        if ladder.delay_header:
            properties[HEADERS][ladder.delay_header] = ladder.ladder.delay(digits) // 1000
        needs = self._needs(lane, digits, destination, keys, now)
        if planned:
            needs = frozenset(need for need in needs if need[0] in ("level", FIRST))
        if self._declares and ladder.is_ours and not self._queue_per_delay and not has_digest(key):
            self._keep_route(destination, topic=topic)
        return Plan(self._first_exchange(ladder, digits), key, properties, lane, needs)

    def _keep_route(self, destination: Destination, *, topic: bool) -> None:
        """Keep what follows the digits of an address to a destination, for :meth:`enter`."""
        exchange, key = destination
        kind = self._known.exchanges.types.get(exchange)
        # Whether a headers exchange can be reached, depends on more than it.
        if not exchange or (kind in IMITABLE and topic == (kind == "topic")):
            if len(self._routes) >= _MOST:
                self._routes.clear()
            self._routes[exchange, kind, key] = route(destination, topic)

    def through(
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
            lambda place: ladder.address(digits, place),
            ladder.owns,
        )
        pattern = "*." * len(digits) + route(destination)
        enter = Binding(exchange, ladder.level_of(digits), pattern, to_queue=False)
        needs = frozenset((BINDINGS, ("level", 0, ladder.needs(digits))))
        return Plan(exchange, key, properties, 0, needs), enter

    def _without_ladder(self, destination: Destination, headers: dict[str, Any]) -> Destination:
        """Return the destination of a publish, also if it is a retry to a ladder's address.

        A foreign ladder reaches queues by name; a retry to such a name uses our own ladder.
        """
        ladder = ladder_of_exchange(destination.exchange, self._topology)
        if ladder is None or ladder is self._topology:
            return self._topology.unwrap(destination, carried(headers))
        try:
            return ladder.destination(destination.routing_key)
        except AddressError:
            return Destination("", destination.routing_key)

    def _lane_of(self, properties: Mapping[str, Any]) -> int:
        """Return the lane for a message; it depends on the id, so that a message keeps its lane."""
        if self._known.keeps_urgent_apart and _is_urgent(properties.get("priority")):
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

    def _needs(
        self,
        lane: int,
        digits: tuple[str, ...],
        destination: Destination,
        keys: tuple[str, ...],
        now: int,
    ) -> frozenset[tuple[Any, ...]]:
        known = self._known
        if not self._declares:
            if not known.is_disturbed:
                return _NOTHING
            first = (FIRST, self._first_exchange(self._ladders[lane], digits))
            return _NOTHING if first in known.existing else frozenset({first})
        exchange, key = destination
        ladder = self._ladders[lane]
        recent = is_recent(known.looked, now)
        levels: tuple[Any, ...] = ("level", lane, ladder.needs(digits))
        if levels not in known.existing and ladder.is_ours:
            path = (PATH, lane, digits)
            if not known.looked or (recent and path in known.existing):
                levels = path
        needs: tuple[tuple[Any, ...], ...] = (
            levels,
            ("target", exchange) if exchange else ("way", key),
        )
        if not exchange and len(keys) > 1:
            # The alternate exchange gets a message only if none of its keys matches. So with one
            # key for a queue with a relay, a queue without a relay would get nothing.
            needs = (levels, *(("relay", queue) for queue in keys))
        if self._queue_per_delay:
            needs += (("direct", lane, digits),)
        needs_bindings = exchange or known.repeats or (known.looked and not recent)
        has_bindings = not needs_bindings or known.repetition is Repetition.DONE
        if recent and has_bindings and known.existing.issuperset(needs):
            return _NOTHING
        return frozenset((*needs, BINDINGS) if needs_bindings else needs)

    def _refuse_unreachable(self, exchange: str) -> None:
        kind = self._known.exchanges.types.get(exchange, "topic")
        if kind not in (*IMITABLE, "headers"):
            raise TopologyError(
                f"the exchange {exchange!r} is of {f'the type {kind!r}' if kind else 'a type'} "
                f"that delayed messages cannot reach, since their routing key is an address; "
                f"delay to a direct, topic, fanout or headers exchange instead"
            )
        if kind != "headers":
            return
        reader = self._known.exchange_behind(exchange, ("direct", "topic"))
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
        known = self._known
        is_old = known.looked and not is_recent(known.looked, now)
        is_known = exchange in known.exchanges.types
        if not (
            is_old and self._declares and is_known and known.exchanges.can_be_asked_again(exchange)
        ):
            return False
        known.exchanges.forget(exchange)
        known.existing.discard(("target", exchange))
        return True

    def _is_topic(self, exchange: str, *, planned: bool) -> bool:
        """Whether to treat an exchange as a topic exchange; to be safe, also if it is unknown.

        :param planned: whether an earlier plan's needs exist. Otherwise they include the type, and
            the next plan is by that.
        """
        types, existing = self._known.exchanges.types, self._known.existing
        if exchange in types:
            return types[exchange] == "topic"
        asks = self._declares and not planned and ("target", exchange) not in existing
        return bool(exchange) and not asks


def _is_urgent(priority: object) -> bool:
    return isinstance(priority, int) and priority >= URGENT


def _refuse_reply_to(keys: Iterable[str]) -> None:
    for key in keys:
        if key.startswith(REPLY_TO):
            raise TopologyError(
                f"{key!r} is a direct reply-to address, which is no queue that a ladder can lead "
                f"to; delay to a queue, or send the reply without a delay"
            )
