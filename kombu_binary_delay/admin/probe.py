"""Ask a broker what exists and how much is in it. Nothing here can create or delete anything."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import amqp
from amqp.exceptions import NotFound, ResourceLocked

from .errors import OperationError

#: A quorum queue whose leader is too busy to answer within 250 ms is reported as empty (see
#: rabbit_quorum_queue:stat/1). An answer that took less than this, in seconds, is the leader's own.
_NO_ANSWER = 0.2
_ATTEMPTS = 60
#: How many round trips are measured before the fastest counts as what a far broker always takes. A
#: single one may be slow by chance, and would then excuse a leader that did not answer.
_ROUND_TRIPS = 10
#: So much longer than that, in seconds, an answer of a far broker may take.
_ALIKE = 0.1


class Probe:
    """Passive declarations on one channel of its own.

    A passive declaration that fails closes its channel, and py-amqp then opens the same one again:
    so one channel serves for every question, and there is one to close. The channel is py-amqp's,
    not the transport's, which takes note of what is declared.

    :param connection: a :class:`kombu.Connection`.
    """

    def __init__(self, connection: Any) -> None:
        channel = amqp.Channel(connection.connection)
        channel.open()
        self._set(channel)

    @classmethod
    def using(cls, channel: Any) -> Probe:
        """Ask on an open :class:`amqp.Channel`, after what was sent on it before."""
        probe = cls.__new__(cls)
        probe._set(channel)  # noqa: SLF001 - its own
        return probe

    def _set(self, channel: Any) -> None:
        self._channel = channel
        #: Of the round trips so far: the fastest, in seconds, and how many.
        self._fastest, self._measured = float("inf"), 0

    def __enter__(self) -> Probe:  # noqa: PYI034 - Python 3.10 has no Self
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel."""
        # Where the connection broke, the channel went with it.
        with suppress(OSError, amqp.AMQPError):
            self._channel.close()

    def has_exchange(self, name: str) -> bool:
        """Return whether an exchange exists."""
        # RabbitMQ refuses the question about the default exchange, which always exists.
        if not name:
            return True
        try:
            self._channel.exchange_declare(name, "topic", passive=True)
        except NotFound:
            return False
        return True

    def has_queue(self, name: str) -> bool:
        """Return whether a queue exists."""
        try:
            self._channel.queue_declare(name, passive=True)
        except NotFound:
            return False
        except ResourceLocked:
            # It is exclusive to another connection.
            return True
        return True

    def ready(self, queue: str) -> int | None:
        """Count the messages ready in a queue, now, and never take a busy queue for an empty one.

        :returns: None where the queue does not exist, or is exclusive to another connection.
        :raises OperationError: where it stays too busy to answer.
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
            # Or is it the broker that is far away? Then the fastest of both are alike.
            soonest = min(soonest, took)
            self._measure_a_round_trip()
            if self._measured >= _ROUND_TRIPS and soonest - self._fastest < _ALIKE:
                return 0
        raise OperationError(
            f"the queue {queue!r} did not say how many messages it holds, in {_ATTEMPTS} attempts; "
            f"its broker is overloaded: try again"
        )

    def _measure_a_round_trip(self) -> None:
        asked = time.monotonic()
        self._channel.exchange_declare("amq.direct", "direct", passive=True)
        self._fastest = min(self._fastest, time.monotonic() - asked)
        self._measured += 1


def ready(connection: Any, queues: Iterable[str]) -> dict[str, int]:
    """Count the messages in queues, now: the API's own figures are up to ten seconds old.

    Queues that do not exist, or are exclusive to another connection, are left out.

    :param connection: a :class:`kombu.Connection`.
    :raises OperationError: see :meth:`Probe.ready`.
    """
    with Probe(connection) as probe:
        counts = {queue: probe.ready(queue) for queue in queues}
    return {queue: count for queue, count in counts.items() if count is not None}
