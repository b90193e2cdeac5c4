"""Ask a broker what exists and how many messages it holds. It only reads."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Self

import amqp
from amqp.exceptions import AccessRefused, NotFound, ResourceLocked

from kombu_binary_delay.errors import TopologyError
from kombu_binary_delay.ladder.envelope import OFFSET
from kombu_binary_delay.ladder.versions import can_be_denied
from kombu_binary_delay.wire.draining import within
from kombu_binary_delay.wire.executor import is_deleted

from .errors import OperationError

#: A quorum queue whose leader is too busy to answer within 250 ms is reported as empty (see
#: rabbit_quorum_queue:stat/1). An answer that took less than this, in seconds, is the leader's own.
_NO_ANSWER = 0.2
_ATTEMPTS = 60
#: How many round trips to measure before the fastest counts as the broker's usual time. A single
#: slow one would hide a leader that did not answer.
_ROUND_TRIPS = 10
#: The longest time to wait for the answer to a close, in seconds.
_ANSWER = 15.0
#: How much longer than that an answer may take, in seconds.
_ALIKE = 0.1


class Probe:
    """Passive declarations on a separate channel.

    A passive declaration that fails closes its channel, and py-amqp then opens the same one again,
    so one channel is enough. It is a channel of py-amqp, since the transport's would follow the
    declarations.

    :param connection: a :class:`kombu.Connection`.
    """

    def __init__(self, connection: Any) -> None:
        channel = amqp.Channel(connection.connection)
        channel.open()
        self._set(channel)

    @classmethod
    def using(cls, channel: Any) -> Probe:
        """Return a probe on an open :class:`amqp.Channel`, which answers in order."""
        probe = cls.__new__(cls)
        probe._set(channel)  # noqa: SLF001 - its own
        return probe

    def _set(self, channel: Any) -> None:
        self._channel = channel
        #: The fastest round trip so far, in seconds, and the number of round trips.
        self._fastest, self._measured = float("inf"), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel."""
        connection = self._channel.connection
        # If the connection broke, the channel is gone.
        if connection is None:
            return
        try:
            with within(connection, _ANSWER):
                self._channel.close()
        except (OSError, amqp.AMQPError):
            # After an interrupt within a frame, no answer can be read, not even to a close.
            connection.collect()

    def can_ask(self, name: str) -> bool:
        """Return whether the broker can answer that an exchange or queue does not exist."""
        # Without a connection, the question itself raises the error.
        return can_be_denied(name, getattr(self._channel.connection, "virtual_host", ""))

    def has_exchange(self, name: str) -> bool:
        """Return whether an exchange exists.

        :raises TopologyError: if the broker cannot answer.
        """
        # RabbitMQ refuses this question for the default exchange, which always exists.
        if not name:
            return True
        self._check_can_ask(name, "exchange")
        try:
            self._channel.exchange_declare(name, "topic", passive=True)
        except NotFound:
            return False
        return True

    def has_queue(self, name: str) -> bool:
        """Return whether a queue exists, even one whose node has stopped or is just starting.

        :raises TopologyError: if the broker cannot answer.
        """
        self._check_can_ask(name, "queue")
        try:
            self._channel.queue_declare(name, passive=True)
        except NotFound as exc:
            return not is_deleted(exc)
        except ResourceLocked:
            # It is exclusive to another connection.
            return True
        return True

    def _check_can_ask(self, name: str, kind: str) -> None:
        if not self.can_ask(name):
            where = self._channel.connection.virtual_host
            of = f"the virtual host {where!r}" if name.isascii() else f"the {kind} {name!r}"
            raise TopologyError(
                f"{of} has a name that is not ASCII, too long for RabbitMQ to report that the "
                f"{kind} {name!r} does not exist; use a shorter one"
            )

    def has_stream(self, name: str) -> bool:
        """Return whether a stream exists; a user that may only read it may ask this, too.

        :raises amqp.AccessRefused: if this user may not read it.
        """
        try:
            return self.has_queue(name)
        except AccessRefused:
            pass
        # RabbitMQ 4.2.6 and 4.3.0 ask for configure, but not from a consumer.
        self._channel.basic_qos(0, 1, a_global=False)
        try:
            tag = self._channel.basic_consume(name, arguments={OFFSET: "next"})
        except NotFound as exc:
            return not is_deleted(exc)
        self._channel.basic_cancel(tag)
        return True

    def ready(self, queue: str) -> int | None:
        """Return the current number of ready messages; never 0 because the queue is busy.

        It is 0 without a leader: see :func:`~.snapshot.unknown`.

        :returns: None if the queue does not exist or its node is down, see :meth:`has_queue`; or if
            it is exclusive to another connection.
        :raises OperationError: if the queue stays too busy to answer.
        """
        soonest = float("inf")
        for _ in range(_ATTEMPTS):
            asked = time.monotonic()
            try:
                count = self._channel.queue_declare(queue, passive=True).message_count
            except (NotFound, ResourceLocked):
                return None
            took = time.monotonic() - asked
            if count or took < _NO_ANSWER:
                return int(count)
            # If the broker is only far away, the fastest of both times are similar.
            soonest = min(soonest, took)
            self._measure_a_round_trip()
            if self._measured >= _ROUND_TRIPS and soonest - self._fastest < _ALIKE:
                return 0
        raise OperationError(
            f"the queue {queue!r} did not report its number of messages in {_ATTEMPTS} attempts; "
            f"the broker is overloaded: try again later"
        )

    def _measure_a_round_trip(self) -> None:
        asked = time.monotonic()
        self._channel.exchange_declare("amq.direct", "direct", passive=True)
        self._fastest = min(self._fastest, time.monotonic() - asked)
        self._measured += 1


def cluster_name(connection: Any) -> str | None:
    """Return the name of the broker's cluster, which it sends when a connection begins.

    :param connection: a :class:`kombu.Connection`.
    """
    name = connection.connection.server_properties.get("cluster_name")
    return None if name is None else str(name)


def ready(connection: Any, queues: Iterable[str]) -> dict[str, int]:
    """Return the current number of messages in queues; the API's figures can be ten seconds old.

    Left out are queues that do not exist, or whose node is down, or that are exclusive to another
    connection. Without a leader, a queue counts as empty.

    :param connection: a :class:`kombu.Connection`.
    :raises OperationError: as :meth:`Probe.ready`.
    """
    with Probe(connection) as probe:
        counts = {queue: probe.ready(queue) for queue in queues}
    return {queue: count for queue, count in counts.items() if count is not None}
