"""The journal of one connection: which event is written for a message, and where to."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import amqp
from kombu.log import get_logger

from kombu_binary_delay.errors import BinaryDelayError
from kombu_binary_delay.executor import Executor
from kombu_binary_delay.model.address import Destination
from kombu_binary_delay.model.topology import Topology
from kombu_binary_delay.model.versions import has_streams
from kombu_binary_delay.settings import STREAM, Settings

from . import events, files
from .stream import Stream

logger = get_logger(__package__)


class Journal:
    """One connection's journal.

    :param executor: of this connection; the journal's stream is written on its channel.
    :param server: the properties that the broker has sent of itself.
    """

    def __init__(
        self,
        settings: Settings,
        topology: Topology,
        executor: Executor,
        server: dict[str, Any],
    ) -> None:
        self.stream = Stream(settings, executor, server)
        #: The folder that events are written to in place of the stream, if they are.
        self.folder = None if settings.journal == STREAM else settings.journal
        self._topology = topology
        self._arguments = settings.journal_arguments
        self._failed = False
        if self.folder is None and not has_streams(server):
            self.folder = str(Path(tempfile.gettempdir(), f"{settings.namespace}-journal"))
            warn_once(f"this broker has no streams: the journal is written to {self.folder}")

    def scheduled(self, properties: dict[str, Any], exchange: str, key: str) -> None:
        """Note that a message has been handed to the ladder, or gone past it, being due already.

        :param properties: those that it was published with.
        :param exchange: where to.
        :param key: the routing key it went with.
        """
        event = events.scheduled(
            self._topology, properties, exchange, key, arguments=self._arguments
        )
        if event is not None:
            self._note(events.SCHEDULED, event)

    def released(self, properties: dict[str, Any], destination: Destination) -> None:
        """Note that a consumer has got a message, whose properties are as the ladder left them."""
        self._note(
            events.RELEASED,
            events.about(properties, destination.exchange, destination.routing_key),
        )

    def received(self, properties: dict[str, Any], destination: Destination) -> None:
        """Note that a consumer has got a message from no ladder, if that one was due when sent."""
        due = events.due(properties.get(events.HEADERS) or {})
        # One that is not due yet was sent by somebody who does not use the ladder.
        if due is not None and due <= time.time_ns() // 1000:
            self.released(properties, destination)

    def taken_back(
        self, properties: dict[str, Any], destination: Destination, *, again: bool
    ) -> None:
        """Note that a message was amended as it arrived, so that no consumer has got it.

        :param again: whether it is delayed again, and not dropped.
        """
        self._note(
            events.POSTPONED if again else events.CANCELLED,
            events.about(properties, destination.exchange, destination.routing_key),
        )

    def write(self, event: dict[str, Any]) -> None:
        """Write an event, without waiting for the broker.

        :raises OSError, amqp.AMQPError, BinaryDelayError: where it cannot be written.
        :raises TypeError, ValueError: where it has no form in JSON.
        """
        if self.folder is not None:
            files.append(self.folder, events.to_line(event))
        else:
            self.stream.publish(event)

    def _note(self, kind: str, event: dict[str, Any]) -> None:
        if self._failed:
            return
        try:
            self.write({"event": kind, "at": time.time_ns() // 1000, **event})
        except (OSError, amqp.AMQPError, BinaryDelayError) as exc:
            # The message itself is on its way; the connection's own trouble will show by itself.
            self._failed = True
            warn_once(f"the journal ends on this connection: {exc}")
        except (TypeError, ValueError) as exc:
            # Of this message alone, for something in its properties.
            warn_once(f"an event is missing in the journal, as it cannot be written: {exc}")


_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Log a warning, unless this process has logged it before."""
    if text not in _warned:
        _warned.add(text)
        logger.warning(text)
