"""A world without a broker: messages walk by `kombu_binary_delay.model.simulate`.

What the transport decides on a connection is decided here from the same values: how a message is
packed, where it enters, which bindings stand behind the delivery exchange. Time does not pass; a
message walks when it is asked for, through what stands by then.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from kombu_binary_delay.model.address import Destination
from kombu_binary_delay.model.delay import X_DELAY, due_time
from kombu_binary_delay.model.envelope import carried, further_keys, unwrap, wrap
from kombu_binary_delay.model.simulate import Walk, matches_topic, walk
from kombu_binary_delay.model.topology import IMITABLE, Part
from tests.conformance.world import Arrival, World

if TYPE_CHECKING:
    from kombu_binary_delay import Settings

NOW = 1_700_000_000.0
_HEADERS = "application_headers"


@dataclass(frozen=True)
class _Binding:
    source: str
    destination: str
    key: str
    arguments: tuple[tuple[str, Any], ...] = ()
    _: KW_ONLY
    to_queue: bool


@dataclass(frozen=True)
class _Message:
    body: Any
    entry: str | None  # None where it was published without a delay
    destination: Destination
    key: str
    properties: dict[str, Any]


class WalkWorld(World):
    """The topology as a table, and nothing else."""

    is_pure = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._queue_per_delay = settings.queue_per_delay
        self._asked: Counter[tuple[int, ...]] = Counter()
        self._kinds: dict[str, str] = {}
        self._queues: dict[str, None] = {}
        self._bindings: dict[_Binding, None] = {}
        self._ahead: list[_Message] = []
        self._parked = 0

    def exchange(self, name: str, kind: str) -> None:
        self._kinds[name] = kind

    def queue(self, name: str, **_: Any) -> None:
        self._queues[name] = None

    def bind(self, queue: str, exchange: str, key: str = "", **arguments: Any) -> None:
        self._bindings[_Binding(exchange, queue, key, tuple(arguments.items()), to_queue=True)] = (
            None
        )

    def unbind(self, queue: str, exchange: str, key: str = "") -> None:
        del self._bindings[_Binding(exchange, queue, key, to_queue=True)]

    def bind_exchange(self, destination: str, source: str, key: str = "") -> None:
        self._bindings[_Binding(source, destination, key, to_queue=False)] = None

    def unbind_exchange(self, destination: str, source: str, key: str = "") -> None:
        del self._bindings[_Binding(source, destination, key, to_queue=False)]

    def delete_queue(self, name: str) -> None:
        del self._queues[name]
        self._forget(lambda each: each.to_queue and each.destination == name)

    def delete_exchange(self, name: str) -> None:
        del self._kinds[name]
        self._forget(
            lambda each: name in (each.source, None if each.to_queue else each.destination)
        )

    def new_process(self, **_: Any) -> None:
        """There is no state of a connection here."""

    def now(self) -> float:
        return NOW

    def parked(self, count: int) -> int:
        return self._parked

    def waiting(self, count: int) -> int:
        return len(self._ahead)

    # -- publish, as the channel does ----------------------------------------------------------

    def _publish(
        self,
        body: Any,
        exchange: str,
        key: str,
        headers: dict[str, Any],
        properties: dict[str, Any],
    ) -> None:
        properties = {**copy.deepcopy(properties), _HEADERS: copy.deepcopy(headers)}
        if "expiration" in properties:
            properties["expiration"] = str(int(properties["expiration"] * 1000))
        now = int(NOW * 1_000_000)
        due = due_time(headers, now)
        destination = Destination(exchange, key)
        if due is None or due <= now:
            properties[_HEADERS].pop(X_DELAY, None)
            self._ahead.append(_Message(body, None, destination, key, properties))
            return
        digits = self.topology.ladder.digits((due - now) / 1000)
        topic = bool(exchange) and self._kinds.get(exchange, "topic") == "topic"
        properties, address = wrap(
            properties,
            destination,
            -(-due // 1000),
            lambda each: self.topology.address(digits, each, topic=topic),
            self.topology.owns,
        )
        self._asked[digits] += 1
        # By turns: no lane leads anywhere else than the others.
        lane = self.lanes[self._asked.total() % len(self.lanes)]
        entry = lane.own if self._queue_per_delay else lane.entry(digits)
        self._ahead.append(_Message(body, entry, destination, address, properties))

    # -- arrive --------------------------------------------------------------------------------

    def _arrivals(self, count: int) -> list[Arrival]:
        arrived = [each for message in self._ahead for each in self._follow(message)]
        self._ahead.clear()
        assert len(arrived) >= count
        for each in arrived:
            latest = self.delay_of(each.body) + self.topology.ladder.tick
            assert each.waited < latest, f"late: {each}"
        return sorted(arrived, key=lambda each: each.waited)

    def _follow(self, message: _Message) -> list[Arrival]:
        headers = message.properties[_HEADERS]
        if message.entry is None:
            keys = [message.key, *further_keys(headers)]
            reached, waited = self._route(message.destination.exchange, keys, headers), 0
            properties, destination = message.properties, message.destination
        else:
            walks = [
                walk(self._part(), message.entry, key)
                for key in (message.key, *further_keys(headers))
            ]
            reached, waited = self._rest(walks, message), walks[0].total
            properties = self._delivered(message.properties, walks[0])
            _, destination = self.topology.parse(message.key, carried(headers))
        # RabbitMQ takes it off by itself.
        properties[_HEADERS].pop("BCC", None)
        return [
            Arrival(
                queue,
                message.body,
                waited,
                destination.exchange,
                destination.routing_key,
                properties[_HEADERS],
                properties,
            )
            for queue in sorted(reached)
        ]

    def _rest(self, walks: list[Walk], message: _Message) -> set[str]:
        """Tell the user's queues in which a message comes to rest; count it where it is parked."""
        reached = {queue for each in walks for queue in each.arrived}
        # The alternate exchange takes what no key finds a way for.
        others = reached - {self.topology.parking}
        if not others:
            self._parked += 1
        found = set()
        relays = {self.topology.exchange_relay_name(each): each for each in self._kinds}
        for queue in others:
            if queue in relays:
                found |= self._route(relays[queue], [message.key], message.properties[_HEADERS])
            else:
                found.add(queue)
        return found

    def _delivered(self, properties: dict[str, Any], path: Walk) -> dict[str, Any]:
        """Add what RabbitMQ adds on the way, and take off what the transport takes off."""
        properties = copy.deepcopy(properties)
        headers = properties[_HEADERS]
        if path.waits:
            # RabbitMQ takes it off with the first death, so that it acts once.
            properties.pop("expiration", None)
            deaths = [{"queue": wait.queue, "reason": "expired"} for wait in reversed(path.waits)]
            headers["x-death"] = deaths
            for end, death in (("first", deaths[-1]), ("last", deaths[0])):
                headers[f"x-{end}-death-queue"] = death["queue"]
                headers[f"x-{end}-death-reason"] = death["reason"]
        unwrap(properties, self.topology.owns)
        return properties

    # -- what stands ---------------------------------------------------------------------------

    def _part(self) -> Part:
        """Build the topology with all that the transport puts behind the delivery exchange."""
        part = self._queues_for_delays()
        for lane in self.lanes:
            part += lane.whole
        for queue in self._queues:
            part += self.topology.to_queue(queue)
        for exchange, kind in self._kinds.items():
            # Without the relay itself, so that the walk ends there.
            by_headers = kind == "headers"
            stands = (
                self.topology.exchange_relay(exchange)
                if by_headers
                else self.topology.mirror(exchange)
            )
            part += Part(stands.exchanges, (), stands.bindings)
        for each in self._bindings:
            if self._kinds[each.source] in IMITABLE:
                part += Part(
                    bindings=self.topology.mirror_bindings(
                        each.source,
                        self._kinds[each.source],
                        each.destination,
                        each.key,
                        to_queue=each.to_queue,
                    )
                )
        return part

    def _queues_for_delays(self) -> Part:
        """Give a queue of its own to each delay that was asked for again."""
        if not self._queue_per_delay:
            return Part()
        levels = range(self.topology.ladder.levels)
        enter = (binding for level in levels for binding in self.topology.own_enter(level))
        part = self.topology.own_base + Part(bindings=tuple(enter))
        for digits, times in self._asked.items():
            if times > 1:
                part += self.topology.own_queue(digits)
        return part

    def _route(self, exchange: str, keys: list[str], headers: dict[str, Any]) -> set[str]:
        """Route as a broker does without any delay."""
        if not exchange:
            return {key for key in keys if key in self._queues}
        reached: set[str] = set()
        for each in self._bindings:
            if each.source == exchange and any(
                _matches(self._kinds[exchange], each, key, headers) for key in keys
            ):
                onward = {each.destination}
                reached |= onward if each.to_queue else self._route(each.destination, keys, headers)
        return reached

    def _forget(self, gone: Any) -> None:
        for each in [each for each in self._bindings if gone(each)]:
            del self._bindings[each]


def _matches(kind: str, binding: _Binding, key: str, headers: dict[str, Any]) -> bool:
    if kind == "fanout":
        return True
    if kind == "headers":
        arguments = dict(binding.arguments)
        mode = any if arguments.pop("x-match", "all") == "any" else all
        return mode(headers.get(name) == value for name, value in arguments.items())
    return matches_topic(binding.key, key) if kind == "topic" else binding.key == key
