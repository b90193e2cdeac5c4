"""What a case of the conformance suite can do, on a simulated broker and on a real one.

A program holds one user's exchanges, queues and bindings, and messages on their way.
`SimulatedProgram` is pure; `RealProgram` is a virtual host of a real RabbitMQ.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kombu_binary_delay import Settings

#: Milliseconds. A case does nothing more before a message is due.
SOON = 250


class TooSlowError(Exception):
    """The machine has stalled: what a case does took longer than its messages waited."""


@dataclass(frozen=True)
class Arrival:
    """A message as the consumer sees it."""

    queue: str
    body: Any
    waited: float  # milliseconds between publish and arrival
    exchange: str
    key: str
    headers: dict[str, Any]
    properties: dict[str, Any]


class Program(ABC):
    """Declares, publishes and waits; what every case does, whatever it runs on."""

    #: Whether there is no clock, so that any delay can be waited for.
    is_pure = False

    def __init__(self, settings: Settings) -> None:
        self.topology = settings.topology()
        self.lanes = self.topology.lanes(settings.lanes)
        self._delays: dict[str, float] = {}
        #: Long enough for what a case does before a message is due, in milliseconds.
        self.later = 4000.0

    # -- what a user's program does ------------------------------------------------------------

    @abstractmethod
    def exchange(self, name: str, kind: str) -> None:
        """Declare an exchange."""

    @abstractmethod
    def queue(self, name: str, **arguments: Any) -> None:
        """Declare a queue."""

    @abstractmethod
    def bind(self, queue: str, exchange: str, key: str = "", **arguments: Any) -> None:
        """Bind a queue."""

    @abstractmethod
    def unbind(self, queue: str, exchange: str, key: str = "") -> None:
        """Unbind a queue."""

    @abstractmethod
    def bind_exchange(self, destination: str, source: str, key: str = "") -> None:
        """Bind an exchange to another."""

    @abstractmethod
    def unbind_exchange(self, destination: str, source: str, key: str = "") -> None:
        """Unbind an exchange from another."""

    @abstractmethod
    def delete_queue(self, name: str) -> None:
        """Delete a queue."""

    @abstractmethod
    def delete_exchange(self, name: str) -> None:
        """Delete an exchange."""

    @abstractmethod
    def new_process(self, **options: Any) -> None:
        """Go on in a process that has declared nothing yet.

        :param options: transport options of its connection.
        """

    @abstractmethod
    def now(self) -> float:
        """Return the publisher's clock, in seconds since the epoch."""

    def publish(
        self,
        body: Any,
        exchange: str = "",
        key: str = "",
        delay: float | str | None = SOON,
        headers: dict[str, Any] | None = None,
        **properties: Any,
    ) -> None:
        """Publish with a delay in milliseconds; no two bodies of a program may be alike."""
        headers = dict(headers or {})
        if delay is not None:
            headers["x-delay"] = delay
        self._remember(body, float(delay or 0))
        self._publish(body, exchange, key, headers, properties)

    def publish_task(self, body: Any, key: str, countdown: float) -> None:
        """Publish as Celery does with a countdown in milliseconds: task protocol 2."""
        eta = datetime.fromtimestamp(self.now(), UTC) + timedelta(milliseconds=countdown)
        self._remember(body, max(countdown, 0))
        self._publish(body, "", key, {"task": "tasks.add", "eta": eta.isoformat()}, {})

    # -- what comes of it ----------------------------------------------------------------------

    def arrivals(self, count: int) -> list[Arrival]:
        """Consume from every queue until ``count`` messages came, and none of them early."""
        arrived = self._arrivals(count)
        for arrival in arrived:
            assert arrival.waited >= self.delay_of(arrival.body), f"early: {arrival}"
        return arrived

    def expect(self, reached: dict[str, list[Any]], parked: int = 0) -> list[Arrival]:
        """These messages reach these queues once each and nothing else; so many are parked."""
        arrived = self.arrivals(sum(map(len, reached.values())))
        counted = Counter((arrival.queue, json.dumps(arrival.body)) for arrival in arrived)
        wanted = Counter((q, json.dumps(body)) for q, bodies in reached.items() for body in bodies)
        assert counted == wanted
        assert self.parked(parked) == parked
        return arrived

    def in_order(self, arrivals: list[Arrival], bodies: list[Any]) -> None:
        """They arrived in this order."""
        assert [arrival.body for arrival in arrivals] == bodies

    def delay_of(self, body: Any) -> float:
        """Return the delay that this body was published with, in milliseconds."""
        return self._delays[json.dumps(body)]

    def _remember(self, body: Any, delay: float) -> None:
        number = json.dumps(body)
        assert number not in self._delays, f"two messages with the body {number}"
        self._delays[number] = delay

    @abstractmethod
    def parked(self, count: int) -> int:
        """Count the messages in the parking queue, when there are ``count`` at last."""

    @abstractmethod
    def waiting(self, count: int) -> int:
        """Count the messages on the ladder, when there are ``count`` at last."""

    @abstractmethod
    def _publish(
        self,
        body: Any,
        exchange: str,
        key: str,
        headers: dict[str, Any],
        properties: dict[str, Any],
    ) -> None: ...

    @abstractmethod
    def _arrivals(self, count: int) -> list[Arrival]: ...
