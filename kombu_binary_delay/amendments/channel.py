"""The channel on which records are published and read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import takewhile
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import RecoverableConnectionError

from kombu_binary_delay.batching.confirm import ConfirmChannel
from kombu_binary_delay.errors import AmendmentError

from . import bulk
from .memory import Memory
from .parts import ENTERED
from .record import from_line

#: So many records may be on their way; half of them are acknowledged at once.
PREFETCH = 2000
#: How long to wait for the broker's next word, in seconds.
PATIENCE = 30.0
#: Where nothing comes for so long, in seconds, all has been read.
_QUIET = 0.25
_JSON = {"content_type": "application/json", "content_encoding": "utf-8", "delivery_mode": 2}
PLAIN: Mapping[str, Any] = {}
#: When a broker last blocked a connection of this process for a marker, by its address.
blocked: dict[str, float] = {}


class BlockedError(Exception):
    """Nothing is published, since that would stop the consumer."""


class AmendmentChannel(ConfirmChannel):
    """A channel on which records are published and read."""

    runs_no_user_code = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sent = 0
        #: Their numbers, ascending.
        self._unconfirmed: dict[int, None] = {}
        #: The routing keys and bodies of what found no queue.
        self._returned: set[tuple[str, str]] = set()
        self._nacked = 0
        self.on_ack = self._confirmed
        self.events["basic_nack"].add(self._on_nack)
        self.events["basic_return"].add(self._on_return)
        #: How many of the streams have shown our marker.
        self.markers = 0
        self.memory = Memory(0)
        self._exchange = b""
        self._marker = b""
        self._read = self._tag = 0
        #: Those of which all has been read, and each new record comes.
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
        """Publish a message without waiting."""
        if self.refusal is not None:
            raise self.refusal
        # Not by basic_publish, which reads from the broker first: that may close the channel.
        arguments = (0, exchange, routing_key, mandatory, False)
        self.send_method(spec.Basic.Publish, "Bssbb", arguments, message)
        self._sent += 1
        self._unconfirmed[self._sent] = None

    def wait_for_confirms(self, *, or_blocked: bool = False) -> set[tuple[str, str]]:
        """Wait until all is confirmed; return the keys and lines of what found no queue.

        :param or_blocked: whether to end the connection where the broker blocks publishers.
        :raises AmendmentError: where the broker refuses one, or does not answer.
        """
        while self._unconfirmed:
            self.wait_for_next()
            if or_blocked and self.connection.is_blocked:
                # A blocked connection does not even acknowledge. So a marker would stop a consumer
                # until the alarm ends, which may not end before something is consumed.
                blocked[self.connection.host] = time.monotonic()
                self.connection.collect()
                raise RecoverableConnectionError(
                    "the broker, short of memory or disk, blocks connections that publish; "
                    "connect again, to consume without a publish"
                )
        returned, self._returned = self._returned, set()
        nacked, self._nacked = self._nacked, 0
        if nacked:
            raise AmendmentError(f"RabbitMQ refused {nacked} messages")
        return returned

    def wait_for_next(self, patience: float = PATIENCE) -> None:
        """Handle the next frame of the connection.

        :param patience: in seconds.
        :raises AmendmentError: where none comes.
        """
        try:
            if self.connection is not None:
                self.connection.drain_events(timeout=patience)
        except TimeoutError as exc:
            self._unconfirmed.clear()
            raise AmendmentError(f"RabbitMQ did not answer within {patience:g} s") from exc
        if self.refusal is not None:
            raise self.refusal
        if self.connection is None:
            raise RecoverableConnectionError("the channel is closed")

    def is_busy(self) -> bool:
        """Handle the next frame; return whether one came soon."""
        try:
            self.wait_for_next(_QUIET)
        except AmendmentError:
            return False
        return True

    def leave(self) -> None:
        """Close the channel without waiting."""
        with suppress(OSError, amqp.AMQPError):
            self.is_closing = True
            self.send_method(spec.Channel.Close, "BsBB", (0, "", 0, 0))

    def _confirmed(self, number: int, multiple: bool) -> int:  # noqa: FBT001 - amqp's own
        """Take note of an answer; return how many messages it is for."""
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

    def begin(self, memory: Memory, exchange: str, marker: bytes) -> None:
        """Learn what is delivered from now on."""
        self.memory, self._exchange, self._marker = memory, exchange.encode(), marker
        self.markers = self._read = 0
        self.streams = []

    def expect(self, marker: bytes) -> None:
        """Wait for another marker, beside what is read."""
        self._marker, self.markers = marker, 0

    def read(self, streams: list[str], cancelled: Callable[[str], object]) -> None:
        """Begin to read streams from their first records.

        :param cancelled: called where the broker ends the reading.
        """
        self._reading = {}
        try:
            self.basic_qos(0, PREFETCH, a_global=False)
            for stream in streams:
                tag = self.basic_consume(
                    stream, arguments={"x-stream-offset": "first"}, on_cancel=cancelled
                )
                self._reading[tag] = stream
        except RecoverableConnectionError:
            # Closed while it waited, which it does not say.
            if self.refusal is not None:
                raise self.refusal from None
            raise

    def dispatch_method(self, method_sig: tuple[int, int], payload: Any, content: Any) -> Any:
        """Take a record by the shortest way: there may be a hundred thousand."""
        if method_sig != spec.Basic.Deliver:
            return super().dispatch_method(method_sig, payload, content)
        self._take(*bulk.read_deliver(payload), content.body, lambda: content.headers or {})
        return None

    def read_until(self, markers: int) -> None:
        """Read until so many markers have come.

        :raises AmendmentError: where nothing comes any more.
        """
        if self.markers >= markers:
            # There may be nothing to read.
            return
        connection = self.connection
        if not bulk.is_possible(connection):
            while self.markers < markers and not self.has_left:
                self.wait_for_next()
            self._check()
            return
        try:
            with connection.transport.having_timeout(PATIENCE):
                bulk.read(
                    connection,
                    self.channel_id,
                    self._take,
                    lambda: self.markers >= markers or self.has_left,
                )
        except TimeoutError as exc:
            raise AmendmentError(f"RabbitMQ did not answer within {PATIENCE:g} s") from exc
        self._check()

    def goes_on_without(self, tag: str) -> bool:
        """Take note that the broker ended one consumer; return whether what others read counts."""
        self._reading.pop(tag, None)
        if not self.streams:
            # In the middle of catching up: the marker does not come any more.
            return False
        self.streams = list(self._reading.values())
        return True

    @property
    def has_left(self) -> bool:
        """Whether nothing more comes: it was closed, by the broker or by us."""
        return self.is_closing or not self.is_open

    def _check(self) -> None:
        if self.refusal is not None:
            raise self.refusal
        if self.has_left:
            raise AmendmentError("RabbitMQ ended the reading of the amendments")

    def has_caught_up(self) -> None:
        """Acknowledge what was read, and from now on each record at once.

        RabbitMQ closes a channel that holds a delivery for longer than ``consumer_timeout``.
        """
        self._check()
        self.streams = list(self._reading.values())
        if self._read:
            self.basic_ack(self._tag, multiple=True)

    def _take(
        self, tag: int, exchange: bytes, body: Any, headers: Callable[[], Mapping[str, Any]]
    ) -> None:
        # What rode the ladder comes from there. By its first death it entered where it says.
        if exchange == self._exchange or (
            exchange and headers().get(ENTERED) == self._exchange.decode()
        ):
            record = from_line(body)
            if record is not None:
                self.memory.learn(record, time.time_ns() // 1_000_000)
        elif (body.encode() if isinstance(body, str) else bytes(body)) == self._marker:
            self.markers += 1
        self._read += 1
        self._tag = tag
        # On a channel that is being closed, RabbitMQ would take an ack as a reason to end the
        # connection.
        if (self.streams or self._read % (PREFETCH // 2) == 0) and not self.is_closing:
            self.basic_ack(tag, multiple=True)
