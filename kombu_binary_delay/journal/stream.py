"""The journal as a stream on the broker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import amqp
from amqp.exceptions import NotFound

from kombu_binary_delay.errors import TopologyError
from kombu_binary_delay.ladder.parts import Part, Queue
from kombu_binary_delay.ladder.topology import VERSION
from kombu_binary_delay.routing.commands import Answer, Ensure, Look
from kombu_binary_delay.settings import STREAM, Settings
from kombu_binary_delay.wire import streams
from kombu_binary_delay.wire.executor import Executor, wait

from . import events

_PURPOSE = "the journal"
_LOCK_TIMEOUT = streams.DECLARING


def stream_name(namespace: str) -> str:
    """Return the name of the stream of a namespace's journal."""
    return f"{namespace}.{VERSION}.journal"


def stream_part(settings: Settings) -> Part:
    """Return the stream of the journal; nothing if the journal is not on the broker."""
    if settings.journal != STREAM:
        return Part()
    arguments = ("x-queue-type", "stream"), ("x-max-age", settings.journal_max_age)
    return Part(queues=(Queue(stream_name(settings.namespace), arguments),))


def to_message(lines: Iterable[str]) -> Any:
    """Return one message for the lines of events: for the broker, each message is the same work."""
    return amqp.Message(
        "\n".join(lines), content_type="application/x-ndjson", content_encoding="utf-8"
    )


class Stream:
    """The stream, for the publishes of one connection.

    :param returned: called with each event that the broker has returned, since somebody has deleted
        the stream; the next publish declares it again.
    """

    def __init__(
        self,
        settings: Settings,
        executor: Executor,
        returned: Callable[[dict[str, Any]], object] = lambda _: None,
    ) -> None:
        self.name = stream_name(settings.namespace)
        self._part = stream_part(settings)
        self._may_declare = settings.declare != "never"
        self._executor = executor
        self._returned = returned
        #: How long to wait for others that declare it, in seconds.
        self._patience: float = _LOCK_TIMEOUT
        #: Whether it exists, as far as this connection knows.
        self.is_declared = False

    def publish(self, lines: Iterable[str]) -> None:
        """Publish the lines of events as one message, without waiting for the broker.

        :raises amqp.AMQPError, BinaryDelayError: if it cannot be published, or the broker has
            refused one since the last publish.
        """
        refused, self._executor.refused_publish = self._executor.refused_publish, None
        if refused is not None:
            raise refused
        self.declare()
        with self._executor.channel(_PURPOSE) as channel:
            channel.events["basic_return"].add(self._on_return)
            # With publisher confirms on, basic_publish would wait for each event.
            amqp.Channel._basic_publish(  # noqa: SLF001
                channel, to_message(lines), "", self.name, mandatory=True
            )

    def _on_return(self, _: Any, __: str, ___: str, message: Any) -> None:
        # Within a read of anybody: not the place to declare it again.
        self.is_declared = False
        for line in events.lines(message.body):
            self._returned(json.loads(line))

    def wait(self) -> None:
        """Wait until the broker has read what was published."""
        with self._executor.channel(_PURPOSE) as channel:
            wait(channel)

    def declare(self, patience: float | None = None) -> None:
        """Declare the stream, or look whether it is there if ``declare`` is ``"never"``; once.

        A stream that exists stays as it is, with the age that it was made with.

        :param patience: how long to wait for others that declare it, in seconds; by default, for
            ten, or not at all if that was in vain.
        :raises TopologyError: if the broker refuses, or another program or the node takes too long;
            or if the stream does not exist and the setting ``declare`` is ``"never"``.
        """
        if self.is_declared:
            return
        limit, self._patience = self._patience if patience is None else patience, 0
        command: Ensure | Look = Look(queues=(self.name,))
        if self._may_declare:
            # With events, it has started.
            lock = "" if self._has_events() else f"{self.name}.lock"
            command = Ensure(self._part, _PURPOSE, lock=lock)
        if streams.declare(self._executor, command, limit) is Answer.MISSING:
            raise TopologyError(
                f"the stream {self.name!r} does not exist, and declare is 'never'; make it "
                f"with kombu-binary-delay create, with the setting journal {STREAM!r}"
            )
        self.is_declared, self._patience = True, _LOCK_TIMEOUT

    def _has_events(self) -> bool:
        with self._executor.channel(_PURPOSE) as channel, suppress(NotFound):
            return bool(channel.queue_declare(self.name, passive=True).message_count)
        return False
