"""The channel that publishes and reads records."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import takewhile
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import RecoverableConnectionError

from kombu_binary_delay.errors import AmendmentError
from kombu_binary_delay.ladder.envelope import OFFSET
from kombu_binary_delay.publishing.confirm import ConfirmChannel
from kombu_binary_delay.publishing.way_out import encoded
from kombu_binary_delay.wire import alarms
from kombu_binary_delay.wire.draining import drain, within
from kombu_binary_delay.wire.undecodable import undecodable

from . import bulk
from .memory import Memory
from .parts import ENTERED
from .record import from_line

#: The consumer's prefetch; records are acknowledged in groups of half of it.
PREFETCH = 2000
#: How long to wait for the broker's next frame, in seconds.
PATIENCE = 30.0
#: If no frame comes for so long, in seconds, everything has been read.
_QUIET = 1.0
_JSON = {"content_type": "application/json", "content_encoding": "utf-8", "delivery_mode": 2}
PLAIN: Mapping[str, Any] = {}


class BlockedError(Exception):
    """The broker blocks publishers, so a publish would stop the consumer."""


class UnansweredError(AmendmentError):
    """The broker has not answered in time."""


class AmendmentChannel(ConfirmChannel):
    """A channel that publishes and reads records."""

    runs_no_user_code = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sent = 0
        #: The numbers of the unconfirmed messages, ascending.
        self._unconfirmed: dict[int, None] = {}
        #: The routing keys and bodies of the messages that no queue took.
        self._returned: set[tuple[str, str]] = set()
        self._nacked = 0
        self.on_ack = self._confirmed
        self.events["basic_nack"].add(self._on_nack)
        self.events["basic_return"].add(self._on_return)
        #: The number of streams from which our marker has come.
        self.markers = 0
        self.memory = Memory(0)
        self._exchange = b""
        self._marker = b""
        #: The offset and the body of each record up to which to read, in place of a marker.
        self._ends: list[tuple[int, bytes]] = []
        self._read = self._tag = 0
        #: How many records were read since it was last known that the broker held none back.
        self.backlog = 0
        #: Whether no message was judged since the last record, and when that was.
        self.is_alone, self._at = False, 0.0
        #: The streams that have been read to the marker and are still being read.
        self.streams: list[str] = []
        #: The streams that its consumers read, by their tags.
        self._reading: dict[str, str] = {}

    # -- publishing ----------------------------------------------------------------------------

    def send(
        self, line: str, exchange: str, routing_key: str, properties: Mapping[str, Any] = PLAIN
    ) -> None:
        """Publish a line without waiting."""
        message = amqp.Message(line, **_JSON, **properties)
        self.send_message(message, exchange, routing_key, mandatory=True)

    def send_message(
        self, message: Any, exchange: str, routing_key: str, *, mandatory: bool
    ) -> None:
        """Publish a message without waiting.

        :raises DelayError: if it cannot be written; nothing of it is sent.
        """
        if self.refusal is not None:
            raise self.refusal
        message = encoded(self.connection, message.body, message.properties)
        # Not by basic_publish, which reads from the broker first: that may close the channel.
        arguments = (0, exchange, routing_key, mandatory, False)
        self.send_method(spec.Basic.Publish, "Bssbb", arguments, message)
        self._sent += 1
        self._unconfirmed[self._sent] = None

    def wait_for_confirms(self, *, or_blocked: bool = False) -> set[tuple[str, str]]:
        """Wait for all confirms; return the keys and lines of the messages that no queue took.

        :param or_blocked: whether to end the connection if the broker blocks publishers.
        :raises AmendmentError: if the broker refuses a message, or does not answer.
        """
        while self._unconfirmed:
            self.wait_for_next()
            if or_blocked and self.connection.is_blocked:
                alarms.end(self.connection)
        returned, self._returned = self._returned, set()
        nacked, self._nacked = self._nacked, 0
        if nacked:
            raise AmendmentError(f"RabbitMQ refused {nacked} messages")
        return returned

    def wait_for_next(self, patience: float = PATIENCE) -> None:
        """Handle the next frame of the connection.

        :param patience: in seconds.
        :raises AmendmentError: if none comes.
        """
        try:
            if self.connection is not None:
                drain(self.connection, patience)
        except TimeoutError as exc:
            self._unconfirmed.clear()
            raise UnansweredError(f"RabbitMQ did not answer within {patience:g} s") from exc
        if self.refusal is not None:
            raise self.refusal
        if self.connection is None:
            raise RecoverableConnectionError("the channel is closed")

    def is_busy(self, at_most: float = math.inf) -> bool:
        """Handle the next frame; return whether one came soon.

        :param at_most: seconds to wait for it, where that is less.
        """
        try:
            self.wait_for_next(min(_QUIET, at_most))
        except AmendmentError:
            return False
        return True

    def leave(self) -> None:
        """Close the channel without waiting."""
        with suppress(OSError, amqp.AMQPError):
            self.is_closing = True
            self.send_method(spec.Channel.Close, "BsBB", (0, "", 0, 0))

    def _confirmed(self, number: int, multiple: bool) -> int:  # noqa: FBT001 - amqp's own
        """Remove what an ack or nack is for; return the number of messages."""
        unconfirmed = self._unconfirmed
        answered = [number] if number in unconfirmed else []
        if multiple:
            answered = list(takewhile(lambda each: each <= number, unconfirmed))
        for each in answered:
            del unconfirmed[each]
        return len(answered)

    def _on_nack(self, number: int, multiple: bool) -> None:  # noqa: FBT001 - amqp's own
        self._nacked += self._confirmed(number, multiple)

    def _on_return(self, _: Any, __: str, routing_key: str, message: Any) -> None:
        body = message.body
        self._returned.add((routing_key, body if isinstance(body, str) else bytes(body).decode()))

    # -- reading -------------------------------------------------------------------------------

    def begin(
        self, memory: Memory, exchange: str, marker: bytes, ends: Iterable[tuple[int, bytes]] = ()
    ) -> None:
        """Read deliveries into a memory from now on.

        :param ends: of an :class:`EndChannel`; each counts as a marker.
        """
        self.memory, self._exchange, self._marker = memory, exchange.encode(), marker
        self._ends = list(ends)
        self.markers = self._read = self.backlog = 0
        self.streams = []

    def expect(self, marker: bytes) -> None:
        """Expect another marker while reading."""
        self._marker, self.markers = marker, 0

    def read(
        self, streams: list[str], cancelled: Callable[[str], object], begin: str = "first"
    ) -> None:
        """Begin to read streams.

        :param cancelled: called if the broker cancels the consumer.
        :param begin: ``first``, or ``last`` for the last chunk of records.
        """
        self._reading = {}
        try:
            self.basic_qos(0, PREFETCH, a_global=False)
            for stream in streams:
                tag = self.basic_consume(stream, arguments={OFFSET: begin}, on_cancel=cancelled)
                self._reading[tag] = stream
        except RecoverableConnectionError:
            # The channel was closed during the wait, which raises no error of its own.
            if self.refusal is not None:
                raise self.refusal from None
            raise

    def dispatch_method(self, method_sig: tuple[int, int], payload: Any, content: Any) -> Any:
        """Handle a record directly: there may be a hundred thousand."""
        if method_sig != spec.Basic.Deliver:
            return super().dispatch_method(method_sig, payload, content)
        may_have_died = ENTERED in (content.headers or {}) or (
            (odd := undecodable(content)) is not None and ENTERED.encode() in odd.properties
        )
        self._take(*bulk.read_deliver(payload), content.body, lambda: content, may_have_died)
        return None

    def read_until(self, markers: int, end: float = math.inf) -> None:
        """Read until this number of markers has come, or one of the streams is not read any more.

        :param end: until when to read, at most.
        :raises AmendmentError: if no more frames come, or not all markers until ``end``.
        """
        if self.markers >= markers:
            # There may be nothing to read.
            return
        connection, streams = self.connection, len(self._reading)

        def is_over() -> bool:
            return (
                self.markers >= markers
                or self.has_left
                or len(self._reading) < streams
                or time.monotonic() > end
            )

        if bulk.is_possible(connection):
            try:
                with within(connection, PATIENCE):
                    bulk.read(connection, self.channel_id, self._take, is_over)
            except TimeoutError as exc:
                raise AmendmentError(f"RabbitMQ did not answer within {PATIENCE:g} s") from exc
        else:
            while not is_over():
                self.wait_for_next()
        self._check()
        if self.markers < markers and time.monotonic() > end:
            raise AmendmentError("RabbitMQ sent more records than could be read")

    def goes_on_without(self, tag: str) -> bool:
        """Remove a consumer that the broker cancelled; return whether the others still count."""
        self._reading.pop(tag, None)
        if not self.streams:
            # During the catch-up: the marker will not come.
            return False
        self.streams = list(self._reading.values())
        return True

    @property
    def has_left(self) -> bool:
        """Whether the channel is closed, by the broker or by us."""
        return self.is_closing or not self.is_open

    def _check(self) -> None:
        if self.refusal is not None:
            raise self.refusal
        if self.has_left:
            raise AmendmentError("RabbitMQ ended the reading of the amendments")

    def has_caught_up(self) -> None:
        """Acknowledge what was read, and from now on each record immediately.

        RabbitMQ closes a channel that holds a delivery for longer than ``consumer_timeout``.
        """
        self._check()
        self.streams = list(self._reading.values())
        if self._read:
            self.basic_ack(self._tag, multiple=True)

    def _take(
        self,
        tag: int,
        exchange: bytes,
        body: Any,
        decoded: Callable[[], Any],
        may_have_died: bool,  # noqa: FBT001 - as bulk has it
    ) -> None:
        counts, rode = exchange == self._exchange, False
        if counts and may_have_died:
            # It waited on the ladder, or is to look so.
            message = decoded()
            entered = (message.headers or {}).get(ENTERED)
            rode = entered is not None
            counts = not undecodable(message) and entered in (None, self._exchange.decode())
        if counts:
            record = from_line(body)
            if record is not None:
                self.memory.learn(record, time.time_ns() // 1_000_000, rode=rode)
        elif self._marker and _bytes(body) == self._marker:
            self.markers += 1
        # The headers of one record take as long to read as the record.
        if self._ends and any(_bytes(body) == each for _, each in self._ends):
            end = _end(decoded(), body)
            if end in self._ends:
                self._ends.remove(end)
                self.markers += 1
        self._read += 1
        self._tag = tag
        if self.streams:
            now = time.monotonic()
            if self.is_alone and now > self._at + _QUIET:
                # It has come as it was written: what was written before has come, too.
                self.backlog = 0
            self.backlog += 1
            self.is_alone, self._at = True, now
        # RabbitMQ would close the connection for an ack on a channel that is being closed.
        if (self.streams or self._read % (PREFETCH // 2) == 0) and not self.is_closing:
            self.basic_ack(tag, multiple=True)


class EndChannel(AmendmentChannel):
    """A channel that finds the last record of each stream, for who may append no marker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: By the consumer's tag.
        self.ends: dict[bytes, tuple[int, bytes]] = {}

    def dispatch_method(self, method_sig: tuple[int, int], payload: Any, content: Any) -> Any:
        """Note a record."""
        if method_sig != spec.Basic.Deliver:
            return super().dispatch_method(method_sig, payload, content)
        tag, _ = bulk.read_deliver(payload)
        self.ends[bulk.consumer_of(payload)] = _end(content, content.body)
        if not self.is_closing:
            self.basic_ack(tag)
        return None


def _end(message: Any, body: Any) -> tuple[int, bytes]:
    return (message.headers or {}).get(OFFSET, -1), _bytes(body)


def _bytes(body: Any) -> bytes:
    return body.encode() if isinstance(body, str) else bytes(body)
