"""What an app's schedules are on the broker, and how it is declared, read and written.

* A stream of definitions. Its last record has all schedules; whoever changes them holds a lock.
* A stream of progress. Its last record says how far each schedule has come; only the active
  scheduler writes it.
* A queue of occurrences, to which they come from the ladder. It has a single active consumer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import amqp
from amqp.exceptions import ResourceLocked

from kombu_binary_delay.errors import AmendmentError, ScheduleError
from kombu_binary_delay.ladder.delay import JITTER, X_DELAY
from kombu_binary_delay.ladder.envelope import HEADERS
from kombu_binary_delay.ladder.parts import Part, Queue
from kombu_binary_delay.publishing import PublishBatch
from kombu_binary_delay.routing.commands import Ensure
from kombu_binary_delay.wire import streams
from kombu_binary_delay.wire.mechanism import Mechanism, mechanism_of, without_transport

from . import definitions, series
from .definitions import Definitions
from .listing import Names, count, read_definitions
from .series import Occurrence

_PURPOSE = "the schedules"
#: How long to wait for another program that changes schedules, in seconds, and how often to try.
_PATIENCE, _AGAIN = 30.0, 0.2
#: How much of a stream is kept, in bytes, and the size of what RabbitMQ deletes at once. Not by
#: age: the last record must stay.
_KEPT = ("x-max-length-bytes", 20_000_000), ("x-stream-max-segment-size-bytes", 1_000_000)


class Store:
    """The schedules of an app on one connection.

    :param app: of Celery.
    :param client: a :class:`kombu.Connection` with our transport.
    :raises ScheduleError: if the connection has another transport.
    """

    def __init__(self, app: Any, client: Any) -> None:
        mechanism = mechanism_of(client.connection)
        if mechanism is None:
            raise ScheduleError(without_transport(client))
        self.mechanism: Mechanism = mechanism
        self.client, self.connection = client, client.connection
        self._topology = mechanism.router.topology
        self.names = Names(self._topology.namespace, app.main)

    def require(self) -> None:
        """Check that schedules can be kept.

        :raises ScheduleError: if the broker has no streams, or amendments are off.
        """
        try:
            self.mechanism.amendments.require()
        except AmendmentError as exc:
            raise ScheduleError(f"schedules need streams, as amendments do: {exc}") from exc

    def declare(self) -> None:
        """Declare all that is missing; call it with the lock.

        New streams get a first record, since readers would wait for one.

        :raises TopologyError: if the broker refuses.
        """
        names = self.names
        empty = {names.definitions: definitions.to_line({}), names.progress: series.to_line({})}
        missing = [name for name in empty if count(self.connection, name) is None]
        kept = (("x-queue-type", "stream"), *_KEPT)
        part = Part(queues=tuple(Queue(name, kept) for name in missing))
        streams.declare(self.mechanism.executor, Ensure(part, _PURPOSE))
        self.declare_queue()
        self.publish([(name, empty[name]) for name in missing])

    def declare_queue(self) -> None:
        """Declare the queue of occurrences, so that this connection leads straight to it."""
        arguments = {
            "x-queue-type": self._topology.queue_type,
            "x-single-active-consumer": True,
        }
        self.client.default_channel.queue_declare(
            queue=self.names.queue, durable=True, auto_delete=False, arguments=arguments
        )

    # -- read and write ------------------------------------------------------------------------

    def definitions(self) -> Definitions:
        """Return the schedules."""
        return read_definitions(self.connection, self.names) or {}

    def write(self, after: Definitions) -> None:
        """Write the schedules; return when the broker has confirmed it."""
        self.publish([(self.names.definitions, definitions.to_line(after))])

    def publish(self, lines: Iterable[tuple[str, str]]) -> None:
        """Publish records to streams; return when the broker has confirmed them.

        :raises UnconfirmedError: if it does not.
        """
        with PublishBatch(self.client.default_channel) as batch:
            for stream, line in lines:
                batch.publish(message(line), "", stream, mandatory=True)

    def arm(self, batch: PublishBatch, occurrences: Iterable[Occurrence]) -> None:
        """Publish occurrences, which come to the queue when they are due."""
        longest = self._topology.ladder.maximum - 1000
        for occurrence in occurrences:
            delay = min(max(occurrence.due - time.time_ns() // 1_000_000, 0), longest)
            name = f"schedule:{occurrence.schedule}:{occurrence.due}"
            # Jitter of the settings is not for them.
            headers = {X_DELAY: delay, JITTER: 0}
            armed = message(occurrence.to_line(), message_id=name, **{HEADERS: headers})
            batch.publish(armed, "", self.names.queue)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the definitions, which ends with this connection.

        :raises ScheduleError: if another program holds it for too long.
        """
        end = time.monotonic() + _PATIENCE
        while True:
            channel = amqp.Channel(self.connection)
            channel.open()
            try:
                channel.queue_declare(self.names.lock, exclusive=True, auto_delete=False)
            except ResourceLocked:
                if time.monotonic() > end:
                    raise ScheduleError(
                        f"another program has been changing the schedules for {_PATIENCE:g} s"
                    ) from None
                time.sleep(_AGAIN)
                continue
            try:
                yield
            finally:
                if self.connection.connected and channel.is_open:
                    channel.queue_delete(self.names.lock)
                    channel.close()
            return


def message(line: str, **properties: Any) -> Any:
    """Return a persistent message with a line of JSON."""
    return amqp.Message(
        line,
        content_type="application/json",
        content_encoding="utf-8",
        delivery_mode=2,
        **properties,
    )
