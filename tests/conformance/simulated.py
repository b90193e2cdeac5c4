"""A program on the broker in memory: the real channel and router, in virtual time."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kombu import Connection

from kombu_binary_delay import Settings
from tests.conformance.program import Program
from tests.conformance.real import OURS, RealProgram

if TYPE_CHECKING:
    from kombu_binary_delay.testing import Delayed
    from tests.conformance.program import Arrival


class SimulatedProgram(RealProgram):
    """One program with one connection, or one after the other.

    :param options: the transport's settings, as a user writes them.
    :param delayed: the broker and the clock.
    """

    is_pure = True

    def __init__(self, options: dict[str, Any], delayed: Delayed) -> None:
        Program.__init__(self, Settings(**options))
        self.settings = options
        self.delayed = delayed
        self._opened = []
        self._more_hosts = []
        self._queues: list[str] = []
        self._published: dict[str, float] = {}
        self._until = float("inf")
        self.new_process()

    def connect(self, transport: str = OURS, **options: Any) -> Connection:
        if transport == OURS:
            options["binary_delay"] = self.settings
        connection = Connection("amqp://", transport=transport, transport_options=options)
        self._opened.append(connection)
        return connection

    def _count(self, *queues: str) -> int:
        # The longest delays would never end.
        self.delayed.run()
        return sum(self.delayed.count(queue) for queue in queues)

    def _wait_for(self, count: int, *queues: str) -> int:
        if self.topology.parking in queues:
            self.delayed.run_until_idle()
        return self._count(*queues)

    def _arrivals(self, count: int) -> list[Arrival]:
        arrivals: list[Arrival] = []
        with self._connection.channel() as channel:
            for name in self._queues:
                self._consume(channel, name, arrivals)
            self._receive()
            while (wait := self.delayed.next_event()) is not None:
                self.delayed.advance(wait)
                self._receive()
        assert len(arrivals) >= count, f"{len(arrivals)} of {count} arrived"
        for arrival in arrivals:
            latest = self.delay_of(arrival.body) + self.topology.ladder.tick
            assert arrival.waited < latest, f"late: {arrival}"
        return arrivals

    def _receive(self) -> None:
        """Take what has come."""
        with suppress(TimeoutError):
            while True:
                self._connection.drain_events(timeout=0.001)
