"""The journal on the broker: a stream queue."""

from __future__ import annotations

import time
from typing import Any

import amqp
from amqp.exceptions import NotFound

from kombu_binary_delay.commands import Answer, Ensure
from kombu_binary_delay.errors import TopologyError
from kombu_binary_delay.executor import Executor, declare
from kombu_binary_delay.model.parts import Part, Queue
from kombu_binary_delay.model.topology import VERSION
from kombu_binary_delay.model.versions import has_streams
from kombu_binary_delay.settings import STREAM, Settings

from . import events

_PURPOSE = "the journal"
#: How long to wait, in seconds, until others have declared the stream.
_LOCK_TIMEOUT = 10


def stream_name(namespace: str) -> str:
    """Name the stream queue of a namespace's journal."""
    return f"{namespace}.{VERSION}.journal"


def stream_part(settings: Settings, server: dict[str, Any]) -> Part:
    """Compute what a journal needs on the broker: its stream queue, or nothing.

    :param server: the properties that the broker has sent of itself.
    """
    if settings.journal != STREAM or not has_streams(server):
        return Part()
    arguments = ("x-queue-type", "stream"), ("x-max-age", settings.journal_max_age)
    return Part(queues=(Queue(stream_name(settings.namespace), arguments),))


def to_message(event: dict[str, Any]) -> Any:
    """Make the message of an event."""
    return amqp.Message(
        events.to_line(event), content_type="application/json", content_encoding="utf-8"
    )


class Stream:
    """The stream as one connection writes to it."""

    def __init__(self, settings: Settings, executor: Executor, server: dict[str, Any]) -> None:
        self.name = stream_name(settings.namespace)
        self._part = stream_part(settings, server)
        self._may_declare = settings.declare != "never"
        self._executor = executor
        self._declared = False

    def publish(self, event: dict[str, Any]) -> None:
        """Publish an event, without waiting for the broker.

        :raises amqp.AMQPError, BinaryDelayError: where it cannot be published, or the broker
            refused an earlier one: it would refuse this one as well.
        """
        if self._executor.refused_publish is not None:
            raise self._executor.refused_publish
        self.declare()
        with self._executor.channel(_PURPOSE) as channel:
            # Where the connection has publisher confirms, basic_publish would wait for each.
            amqp.Channel._basic_publish(channel, to_message(event), "", self.name)  # noqa: SLF001

    def declare(self) -> None:
        """Declare the stream, once.

        Of two who declare it at the same time, one is answered before it has started; to publish
        to it then would end the whole connection. So one declares it, and the others wait.

        :raises TopologyError: where the broker refuses, or others take too long; and where it does
            not exist, and is not to be declared.
        """
        if not (self._declared or self._may_declare):
            self._require()
            self._declared = True
        end = time.monotonic() + _LOCK_TIMEOUT
        while not (self._declared or self._is_in_use() or self._declare_alone()):
            if time.monotonic() > end:
                raise TopologyError(
                    f"{self.name} is being declared elsewhere for {_LOCK_TIMEOUT} s"
                )
            time.sleep(0.02)
        self._declared = True

    def _require(self) -> None:
        with self._executor.channel(_PURPOSE) as channel:
            try:
                channel.queue_declare(self.name, passive=True)
            except NotFound:
                raise TopologyError(
                    f"the stream {self.name!r} does not exist, and declare is 'never': make it "
                    f"beforehand, as kombu-binary-delay create does where journal is {STREAM!r}"
                ) from None

    def _is_in_use(self) -> bool:
        """Whether the stream has events, so that it can be declared without the lock."""
        with self._executor.channel(_PURPOSE) as channel:
            try:
                found = channel.queue_declare(self.name, passive=True)
            except NotFound:
                return False
            if found.message_count:
                declare(channel, self._part)
            return bool(found.message_count)

    def _declare_alone(self) -> bool:
        """Declare the stream if nobody else does at the moment."""
        answer = self._executor.do(Ensure(self._part, _PURPOSE, lock=f"{self.name}.lock"))
        return answer is Answer.DONE
