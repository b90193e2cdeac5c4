"""A program whose decisions are those of the real router, on a simulated broker.

Only py-amqp and the clock are left out: what the transport does with a plan and a delivery, and
what it passes on to the router, is done here in its place. Time does not pass; a message is
followed when it is asked for, through what exists by then.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.delay import due_time
from kombu_binary_delay.ladder.envelope import further_keys
from kombu_binary_delay.ladder.parts import Binding, Exchange, Part, Queue
from kombu_binary_delay.routing.router import Router
from tests.conformance.program import Arrival, Program
from tests.simulated_broker import SimulatedBroker

if TYPE_CHECKING:
    from kombu_binary_delay import Settings
    from tests.simulated_broker import Rest

NOW = 1_700_000_000.0
#: The properties by which a broker says what it can.
SERVER = {"product": "RabbitMQ", "version": "4.3.0"}
_HEADERS = "application_headers"


@dataclass(frozen=True)
class _Message:
    body: Any
    exchange: str
    key: str
    properties: dict[str, Any]


class SimulatedProgram(Program):
    """One program with one connection, or one after the other."""

    is_pure = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._settings = settings
        self._broker = SimulatedBroker()
        self._ahead: list[_Message] = []
        self._queues: dict[str, None] = {}
        self._parked = 0
        self.new_process()

    def new_process(self, **_: Any) -> None:
        self._router = Router(self._settings, SERVER)

    # -- topology, as the channel follows it ---------------------------------------------------

    def exchange(self, name: str, kind: str) -> None:
        self._broker.declare(Part((Exchange(name, kind),)))
        self._router.declared_exchange(name, kind)

    def queue(self, name: str, **arguments: Any) -> None:
        self._broker.declare(Part(queues=(Queue(name, tuple(arguments.items())),)))
        self._queues[name] = None
        self._broker.run(self._router.declared_queue(name, arguments))

    def bind(self, queue: str, exchange: str, key: str = "", **arguments: Any) -> None:
        self._bind(Binding(exchange, queue, key, arguments=tuple(arguments.items())))

    def bind_exchange(self, destination: str, source: str, key: str = "") -> None:
        self._bind(Binding(source, destination, key, to_queue=False))

    def unbind(self, queue: str, exchange: str, key: str = "") -> None:
        self._unbind(Binding(exchange, queue, key))

    def unbind_exchange(self, destination: str, source: str, key: str = "") -> None:
        self._unbind(Binding(source, destination, key, to_queue=False))

    def _bind(self, each: Binding) -> None:
        self._broker.declare(Part(bindings=(each,)))
        self._broker.run(
            self._router.bound(each.source, each.destination, each.key, to_queue=each.to_queue)
        )

    def _unbind(self, each: Binding) -> None:
        del self._broker.bindings[each]
        self._broker.run(
            self._router.unbound(each.source, each.destination, each.key, to_queue=each.to_queue)
        )

    def delete_queue(self, name: str) -> None:
        self._broker.delete_queue(name)
        del self._queues[name]
        self._broker.run(self._router.deleted_queue(name))

    def delete_exchange(self, name: str) -> None:
        self._broker.delete_exchange(name)
        self._broker.run(self._router.deleted_exchange(name))

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
        message = properties, due_time(headers, now), Destination(exchange, key), now
        plan = self._router.publish(*message)
        if plan.needs:
            self._broker.run(self._router.prepare(plan.needs, now))
            plan = self._router.publish(*message, plan.lane)
        self._ahead.append(_Message(body, plan.exchange, plan.routing_key, plan.properties))

    # -- arrive --------------------------------------------------------------------------------

    def _arrivals(self, count: int) -> list[Arrival]:
        self._broker.run(self._router.consuming())
        arrived = [each for message in self._ahead for each in self._follow(message)]
        self._ahead.clear()
        assert len(arrived) >= count
        for each in arrived:
            latest = self.delay_of(each.body) + self.topology.ladder.tick
            assert each.waited < latest, f"late: {each}"
        return sorted(arrived, key=lambda each: each.waited)

    def _follow(self, message: _Message) -> list[Arrival]:
        headers = message.properties[_HEADERS]
        keys = [message.key, *further_keys(headers)]
        rests = self._broker.follow(message.exchange, keys, headers)
        self._parked += sum(each.queue == self.topology.parking for each in rests)
        return [
            self._received(message, rest)
            for rest in sorted(rests, key=lambda each: each.queue)
            if rest.queue in self._queues
        ]

    def _received(self, message: _Message, rest: Rest) -> Arrival:
        """Add what RabbitMQ adds on the way, and have the router read it."""
        properties = copy.deepcopy(message.properties)
        headers = properties[_HEADERS]
        # RabbitMQ takes it off by itself.
        headers.pop("BCC", None)
        if rest.waits:
            # So does the first death, so that it acts once.
            properties.pop("expiration", None)
            deaths = [{"queue": wait.queue, "reason": "expired"} for wait in reversed(rest.waits)]
            headers["x-death"] = deaths
            for end, death in (("first", deaths[-1]), ("last", deaths[0])):
                headers[f"x-{end}-death-queue"] = death["queue"]
                headers[f"x-{end}-death-reason"] = death["reason"]
        exchange, key = rest.exchange, message.key
        found = self._router.received(exchange, key, properties, rest.queue)
        if found is not None:
            (exchange, key), properties = found
        return Arrival(
            rest.queue, message.body, rest.waited, exchange, key, properties[_HEADERS], properties
        )
