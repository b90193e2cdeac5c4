"""A program on a real broker: a virtual host, and connections through our transport."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kombu import Connection, Producer
from kombu import Queue as KombuQueue

from kombu_binary_delay import Settings
from tests.conformance.program import Arrival, Program, TooSlowError
from tests.waits import PATIENCE

if TYPE_CHECKING:
    from dev.broker import VHost

OURS = "kombu_binary_delay:Transport"
#: For a message that should not have come.
MORE = 0.2


class RealProgram(Program):
    """One program with one connection, or one after the other.

    :param options: the transport's settings, as a user writes them.
    """

    def __init__(self, options: dict[str, Any], vhost: VHost) -> None:
        super().__init__(Settings(**options))
        self.settings = options
        self._opened: list[Connection] = []
        self._more_hosts: list[VHost] = []
        self._begin(vhost)

    def _begin(self, vhost: VHost) -> None:
        self.vhost = vhost
        self._queues: list[str] = []
        self._delays = {}
        self._published: dict[str, float] = {}
        #: Until when a case is to have done all that it does while messages wait.
        self._until = float("inf")
        self.new_process()

    def begin_again(self, factor: float) -> None:
        """Go back to the beginning, in another virtual host.

        :param factor: for so many times as long, messages are to wait from now on.
        """
        self.later *= factor
        self._more_hosts.append(self.vhost.broker.vhost())
        self._begin(self._more_hosts[-1])

    def connect(self, transport: str = OURS, **options: Any) -> Connection:
        """Open a connection that lasts as long as the program."""
        if transport == OURS:
            options["binary_delay"] = self.settings
        connection = Connection(
            self.vhost.url, transport=transport, transport_options=options, connect_timeout=PATIENCE
        )
        self._opened.append(connection)
        return connection

    def close(self) -> None:
        for connection in self._opened:
            connection.release()
        for vhost in self._more_hosts:
            vhost.delete()

    @property
    def _channel(self) -> Any:
        return self._connection.default_channel

    def exchange(self, name: str, kind: str) -> None:
        self._channel.exchange_declare(name, kind, durable=True, auto_delete=False)

    def queue(self, name: str, **arguments: Any) -> None:
        self._channel.queue_declare(name, durable=True, auto_delete=False, arguments=arguments)
        if name not in self._queues:
            self._queues.append(name)

    def bind(self, queue: str, exchange: str, key: str = "", **arguments: Any) -> None:
        self._channel.queue_bind(queue, exchange, key, arguments=arguments)

    def unbind(self, queue: str, exchange: str, key: str = "") -> None:
        self._channel.queue_unbind(queue, exchange, key)

    def bind_exchange(self, destination: str, source: str, key: str = "") -> None:
        self._channel.exchange_bind(destination, source, key)

    def unbind_exchange(self, destination: str, source: str, key: str = "") -> None:
        self._channel.exchange_unbind(destination, source, key)

    def delete_queue(self, name: str) -> None:
        self._channel.queue_delete(name)
        self._queues.remove(name)

    def delete_exchange(self, name: str) -> None:
        self._channel.exchange_delete(name)

    def new_process(self, **options: Any) -> None:
        self._connection = self.connect(**options)

    def now(self) -> float:
        return time.time()

    def parked(self, count: int) -> int:
        return self._wait_for(count, self.topology.parking)

    def waiting(self, count: int) -> int:
        parts = (level for lane in self.lanes for level in lane.levels)
        levels = [queue.name for part in parts for queue in part.queues]
        return self._wait_for(count, *levels)

    def ready(self, queue: str, count: int) -> None:
        """Wait until so many messages are in a queue, without taking them."""
        assert self._wait_for(count, queue) == count

    def take(self, queue: str) -> Any:
        """Take a message by basic.get."""
        message = self._channel.basic_get(queue, no_ack=True)
        return self._channel.message_to_python(message)

    def _wait_for(self, count: int, *queues: str) -> int:
        end = time.monotonic() + PATIENCE
        while (count_now := self._count(*queues)) < count and time.monotonic() < end:
            time.sleep(0.02)
        return count_now

    def _count(self, *queues: str) -> int:
        return sum(self.vhost.waiting(*queues).values())

    def _publish(
        self,
        body: Any,
        exchange: str,
        key: str,
        headers: dict[str, Any],
        properties: dict[str, Any],
    ) -> None:
        now = time.time()
        self._published[repr(body)] = now
        if self.delay_of(body) == self.later:
            self._until = min(self._until, now + self.later / 1000)
        Producer(self._channel).publish(
            body, exchange=exchange, routing_key=key, headers=headers, **properties
        )

    def _arrivals(self, count: int) -> list[Arrival]:
        arrivals: list[Arrival] = []
        connection = self._connection
        with connection.channel() as channel:
            for name in self._queues:
                self._consume(channel, name, arrivals)
            # What a new process has bound leads delayed messages as soon as it consumes.
            if time.time() > self._until:
                raise TooSlowError
            self._until = float("inf")
            self._drain(connection, lambda: len(arrivals) >= count, PATIENCE)
            self._drain(connection, lambda: False, MORE)
        assert len(arrivals) >= count, f"{len(arrivals)} of {count} arrived in {PATIENCE} s"
        return arrivals

    def in_order(self, arrivals: list[Arrival], bodies: list[Any]) -> None:
        """They arrived in this order.

        :raises TooSlowError: where they did not, since the machine may have stalled.
        """
        if [arrival.body for arrival in arrivals] != bodies:
            raise TooSlowError(f"{[arrival.body for arrival in arrivals]} and not {bodies}")

    def _consume(self, channel: Any, name: str, arrivals: list[Arrival]) -> None:
        def receive(body: Any, message: Any) -> None:
            waited = (time.time() - self._published[repr(body)]) * 1000
            info = message.delivery_info
            arrivals.append(
                Arrival(
                    name,
                    body,
                    waited,
                    info["exchange"],
                    info["routing_key"],
                    message.headers,
                    message.properties,
                )
            )
            message.ack()

        queue = KombuQueue(name, no_declare=True)
        consumer = self._connection.Consumer(queue, callbacks=[receive], channel=channel)
        consumer.accept = None
        consumer.consume()

    @staticmethod
    def _drain(connection: Connection, done: Any, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done() and (left := end - time.monotonic()) > 0:
            with suppress(TimeoutError):
                connection.drain_events(timeout=min(left, 0.1))
