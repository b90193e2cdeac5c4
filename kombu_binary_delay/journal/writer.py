"""The journal of one connection: which events it writes, and where."""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import amqp
from kombu.log import get_logger

from kombu_binary_delay.errors import BinaryDelayError, TopologyError
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.envelope import HEADERS
from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.ladder.versions import why_no_streams
from kombu_binary_delay.settings import STREAM, Settings
from kombu_binary_delay.wire import alarms
from kombu_binary_delay.wire.executor import Executor
from kombu_binary_delay.wire.repeating import Warnings

from . import events, files
from .stream import Stream

warnings = Warnings(get_logger(__package__))

#: After a failure, for how long to write nothing, in seconds.
_REST = 30.0
#: The most events to keep in memory, of those that are written later: since the broker blocks
#: publishers, or has returned them.
_MOST_LATER = 10_000
#: Those events, by the broker, the virtual host and the stream: a connection may end meanwhile.
_later: dict[tuple[str, str, str], deque[dict[str, Any]]] = {}
if hasattr(os, "register_at_fork"):
    # The parent writes them.
    os.register_at_fork(after_in_child=_later.clear)


class Journal:
    """One connection's journal.

    :param executor: of this connection; the journal publishes on its channel.
    :param server: the properties that the broker sent when the connection opened.
    """

    def __init__(
        self,
        settings: Settings,
        topology: Topology,
        executor: Executor,
        server: dict[str, Any],
    ) -> None:
        self.stream = Stream(settings, executor, self._take_back)
        #: The folder for events; None if they go to the stream.
        self.folder = None if settings.journal == STREAM else settings.journal
        self._topology = topology
        self._arguments = settings.journal_arguments
        self._connection = executor.connection
        #: Until when nothing is written, after a failure.
        self._rests_until = float("-inf")
        #: Whether the stream has got events of this connection's consumers.
        self._follows = False
        #: Such events that wait until the broker does not block publishers any more, and events of
        #: any connection that the broker has returned.
        place = self._connection.host, self._connection.virtual_host, self.stream.name
        self._later = _later.setdefault(place, deque(maxlen=_MOST_LATER))
        self._connection.is_held_up = bool(self._later)
        why = why_no_streams(server, self._connection.host)
        if self.folder is None and why:
            self.folder = str(Path(tempfile.gettempdir(), f"{settings.namespace}-journal"))
            warnings.warn(
                f"the journal is written to {self.folder}, since {why}; set journal to a folder "
                f"that is kept"
            )

    @property
    def is_ready(self) -> bool:
        """Whether an event can be written without another question to the broker."""
        return self._is_resting or self.folder is not None or self.stream.is_declared

    def prepare(self) -> None:
        """Declare the stream, before the message that the first event is about.

        :raises OSError, RecoverableConnectionError: if the connection broke, or the broker does not
            answer in time.
        """
        try:
            self.stream.declare()
        except BinaryDelayError as exc:
            self._begin_to_rest(exc)

    def scheduled(self, *messages: tuple[dict[str, Any], str, str]) -> None:
        """Record that messages were published to the ladder, or were already due at the publish.

        :param messages: the properties, the exchange and the routing key of each, as published.
        """
        read = (
            events.scheduled(self._topology, *message, arguments=self._arguments)
            for message in messages
        )
        self._note(*(_dated(events.SCHEDULED, event) for event in read if event is not None))
        # Not by `release`, which may end the connection: the message is published.
        while not (self._is_stopped or alarms.is_recent(self._connection)):
            later = self._next()
            if later is None:
                break
            self._note(later)
            if self._is_resting:
                self._later.appendleft(later)

    def _next(self) -> dict[str, Any] | None:
        """Remove and return the first event that waits; None if none does."""
        try:
            # Other threads write them, too.
            return self._later.popleft()
        except IndexError:
            return None

    def released(
        self, properties: dict[str, Any], destination: Destination, left: int | None = None
    ) -> None:
        """Record that a consumer got a message; its properties still have the ladder's header.

        :param left: when it left its last level, in whole seconds since the epoch; None if that is
            not known.
        """
        more = {} if left is None else {"left": left * 1_000_000}
        self._follow(events.RELEASED, properties, destination, **more)

    def received(self, properties: dict[str, Any], destination: Destination) -> None:
        """Record that a consumer got a message from no ladder, if it was due when published."""
        due = events.due(properties.get(HEADERS) or {})
        # A message that is not due yet comes from a program without the transport.
        if due is not None and due <= time.time_ns() // 1000:
            self.released(properties, destination)

    def taken_back(
        self, properties: dict[str, Any], destination: Destination, *, again: bool
    ) -> None:
        """Record that a message was dropped or delayed again instead of delivered.

        :param again: whether it is delayed again.
        """
        self._follow(events.POSTPONED if again else events.CANCELLED, properties, destination)

    @property
    def is_holding(self) -> bool:
        """Whether events wait to be written later."""
        return bool(self._later)

    @property
    def rest(self) -> float:
        """For how long they wait before they are tried, in seconds."""
        return max(alarms.rest(self._connection), self._rests_until - time.monotonic(), 0.0)

    def end_if_blocked(self) -> None:
        """End the connection if the events of its consumers may be why the broker blocks it.

        :raises RecoverableConnectionError: then; see :mod:`~kombu_binary_delay.wire.alarms`.
        """
        if self._follows and self._connection.is_blocked:
            alarms.end(self._connection)

    def release(self) -> bool:
        """Write the events that wait, if the broker takes them; return whether there were any.

        :raises RecoverableConnectionError: if it does not, and blocks the connection.
        """
        has_written, follows = False, self._follows
        #: Written, and perhaps not read by the broker.
        unread: list[dict[str, Any]] = []
        try:
            while not (self._is_stopped or alarms.is_recent(self._connection)):
                event = self._next()
                if event is None:
                    break
                self._follows = True
                unread.append(event)
                self._note(event)
                if not has_written:
                    self._wait_for(unread)
                has_written = True
            if unread and not self._is_stopped:
                self._wait_for(unread)
        finally:
            # An audit counts an event that is written twice as one.
            self._later.extendleft(reversed(unread))
            # The next alarm must not end a connection that only publishes.
            self._follows = follows
        return has_written

    def _wait_for(self, unread: list[dict[str, Any]]) -> None:
        """Wait until the broker has read these, and remove them from the list.

        It answers no more if it blocks the connection for them.
        """
        try:
            self.stream.wait()
        except TopologyError as exc:
            self._begin_to_rest(exc)
        if not self._is_resting:
            unread.clear()

    @property
    def _is_stopped(self) -> bool:
        connection = self._connection
        return self._is_resting or connection.is_blocked or not connection.connected

    @property
    def _is_resting(self) -> bool:
        return time.monotonic() < self._rests_until

    def write(self, *lines: str) -> None:
        """Write the lines of events, without waiting for the broker.

        :raises OSError, amqp.AMQPError, BinaryDelayError: if they cannot be written.
        """
        if self.folder is None:
            self.stream.publish(lines)
            return
        for line in lines:
            files.append(self.folder, line)

    def _follow(
        self, kind: str, properties: dict[str, Any], destination: Destination, **more: Any
    ) -> None:
        """Note an event of a consumer, now or when the broker does not block publishers."""
        about = events.about(properties, destination.exchange, destination.routing_key)
        event = _dated(kind, {**about, **more})
        connection = self._connection
        if self.folder is None and (alarms.is_recent(connection) or not connection.connected):
            self._write_later(event)
            return
        self._follows = self.folder is None
        self._note(event)

    def _take_back(self, event: dict[str, Any]) -> None:
        """Take an event that the broker has returned."""
        warnings.warn(
            f"the stream {self.stream.name!r} was deleted, with the events in it; later events are "
            f"written to a new one"
        )
        self._write_later(event)

    def _write_later(self, event: dict[str, Any]) -> None:
        if len(self._later) == _MOST_LATER:
            warnings.warn(f"the journal misses events: more than {_MOST_LATER} wait to be written")
        self._later.append(event)
        self._connection.is_held_up = True

    def _note(self, *noted: dict[str, Any]) -> None:
        if self._is_resting:
            return
        lines: list[str] = []
        for event in noted:
            try:
                lines.append(events.to_line(event))
            except (TypeError, ValueError) as exc:
                # Only for this message, because of a value in its properties.
                warnings.warn(f"an event is missing in the journal, as it cannot be written: {exc}")
        if not lines:
            return
        try:
            self.write(*lines)
        except (OSError, amqp.AMQPError, BinaryDelayError) as exc:
            # The message itself is published; an error of the connection will show by itself.
            self._begin_to_rest(exc)

    def _begin_to_rest(self, exc: BaseException) -> None:
        self._rests_until = time.monotonic() + _REST
        warnings.warn(f"the journal misses events, and is tried again in {_REST:g} s: {exc}")


def _dated(kind: str, event: dict[str, Any]) -> dict[str, Any]:
    return {"event": kind, "at": time.time_ns() // 1000, **event}
