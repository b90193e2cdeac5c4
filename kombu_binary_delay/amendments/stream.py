"""The amendments of one connection: written with a confirm, and read before messages are taken.

There are two streams behind one exchange. One has what names an id, and is kept for long. The other
has what names a key, which can be a record for each publish, and is kept for a day.

To have read all that was confirmed before, a connection appends a marker of its own and reads
until it sees that. The marker goes through the default exchange, and is mandatory: so it also asks
whether the streams exist, with no error where they do not. A user that may not write there reads
until nothing more comes. A record is one only if it came through the exchange of the amendments: so
who may not write there cannot amend.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import takewhile
from typing import Any, NamedTuple

import amqp
from amqp import spec
from amqp.exceptions import AccessRefused, NotFound, RecoverableConnectionError
from kombu.log import get_logger

from kombu_binary_delay.batching.confirm import ConfirmChannel
from kombu_binary_delay.buffering import FrameBuffer
from kombu_binary_delay.commands import Answer, Ensure, Steps
from kombu_binary_delay.errors import AmendmentError, BinaryDelayError, TopologyError
from kombu_binary_delay.executor import Executor
from kombu_binary_delay.model.envelope import HEADER
from kombu_binary_delay.model.parts import Binding, Exchange, Part, Queue
from kombu_binary_delay.model.topology import VERSION
from kombu_binary_delay.model.versions import STREAMS_SINCE, is_since
from kombu_binary_delay.router import Router
from kombu_binary_delay.settings import Settings, milliseconds

from . import bulk
from .memory import Memory, Verdict
from .record import Record, from_line, to_line

logger = get_logger(__package__)

#: The routing keys of the exchange, and the last words of the streams' names.
IDS = "ids"
KEYS = "keys"
#: How long the stream of keys keeps records, as RabbitMQ's ``x-max-age`` has it.
KEYS_MAX_AGE = "1D"
#: Retention takes whole segments, and leaves one: small ones are forgotten in time. In bytes.
_SEGMENT = 1_000_000
#: So many records may be on their way; half of them are acknowledged at once.
_PREFETCH = 2000
#: A cancellation of what is due later than this, in milliseconds, rides the ladder, and reaches the
#: stream so much before. Consumers remember what is due soon, and not what is due in a year.
FAR_AHEAD = 2 * 86_400_000
LEAD = 86_400_000
#: How long to wait for the broker's next word, in seconds.
_PATIENCE = 30.0
#: How often a connection that takes delayed messages asks whether there are amendments, in seconds.
_LOOK_EVERY = 1.0
#: And where that failed for another reason than a permission.
_LOOK_AGAIN = 30.0
#: Where nothing comes for so long, in seconds, all has been read.
_QUIET = 0.25

#: RabbitMQ's words for a node that joined after the stream was declared, or is just starting.
_NO_REPLICA = "replica on the local node"
#: RabbitMQ's own: the exchange that a message was published to before it first waited.
_ENTERED = "x-first-death-exchange"
_JSON = {"content_type": "application/json", "content_encoding": "utf-8", "delivery_mode": 2}
_PLAIN: Mapping[str, Any] = {}

#: For how long nothing is asked of a broker that blocked publishers, in seconds.
_BLOCKED = 300.0
#: A node that has just started takes so long, in seconds, until all streams are where they were.
_RECOVERY = 5.0

_warned: set[str] = set()
#: When a broker last blocked a connection of this process for a marker, by its address.
_blocked: dict[str, float] = {}
#: The virtual hosts, and the exchanges in them, whose streams this process has read.
_known: set[tuple[str, str]] = set()


class _BlockedError(Exception):
    """Nothing is published, since that would stop the consumer."""


class _Written(NamedTuple):
    line: str
    key: str
    properties: Mapping[str, Any] = _PLAIN


def exchange_name(namespace: str) -> str:
    """Name the exchange that amendments are written to."""
    return f"{namespace}.{VERSION}.amendments"


def stream_name(namespace: str, key: str) -> str:
    """Name the stream of ids or of keys."""
    return f"{exchange_name(namespace)}.{key}"


def amendments_part(settings: Settings) -> Part:
    """Compute what amendments need on the broker: an exchange and two streams."""
    exchange = exchange_name(settings.namespace)
    ages = {IDS: settings.amendments_max_age, KEYS: KEYS_MAX_AGE}
    return Part(
        (Exchange(exchange),),
        tuple(
            Queue(
                stream_name(settings.namespace, key),
                (
                    ("x-queue-type", "stream"),
                    ("x-max-age", age),
                    ("x-stream-max-segment-size-bytes", _SEGMENT),
                ),
            )
            for key, age in ages.items()
        ),
        tuple(Binding(exchange, stream_name(settings.namespace, key), key) for key in ages),
    )


class Amendments:
    """The amendments that one connection writes and reads.

    :param connection: of py-amqp.
    :param server: the properties that the broker sent of itself.
    """

    def __init__(
        self,
        connection: Any,
        router: Router,
        executor: Executor,
        settings: Settings,
        server: Mapping[str, Any],
    ) -> None:
        self._connection = connection
        self._router = router
        self._executor = executor
        self._buffer: FrameBuffer = connection.frame_buffer
        self._settings = settings
        self._server = server
        self._exchange = exchange_name(settings.namespace)
        self._streams = [stream_name(settings.namespace, key) for key in (IDS, KEYS)]
        #: How long the stream of ids keeps records, in milliseconds.
        self.max_age = milliseconds(settings.amendments_max_age)
        self.memory = Memory(self.max_age)
        self._channel: _AmendmentChannel | None = None
        self._can_read = self.is_possible
        self._looked = float("-inf")

    @property
    def is_possible(self) -> bool:
        """Whether the settings want amendments, and the broker has streams."""
        return self._settings.amendments and is_since(dict(self._server), STREAMS_SINCE)

    def require(self) -> None:
        """Raise an error where nothing can be amended.

        :raises AmendmentError: where the settings or the broker leave it impossible.
        """
        if not self._settings.amendments:
            raise AmendmentError(
                "what waits cannot be amended, since the setting amendments is False; "
                "set it to True for this connection and for its consumers"
            )
        if not self.is_possible:
            raise AmendmentError(
                f"what waits cannot be amended on {self._server.get('product')} "
                f"{self._server.get('version', '')}, which has no streams; RabbitMQ 3.9 has them"
            )

    # -- writing -------------------------------------------------------------------------------

    def write(self, records: Iterable[Record], key: str = IDS) -> None:
        """Write records, and return when the broker has confirmed them all.

        The streams are declared if they do not exist.

        :raises AmendmentError: where the broker cannot, or refuses.
        """
        self._write([_Written(to_line(each), key) for each in records])

    def write_ahead(self, record: Record, due: int) -> None:
        """Write a record that consumers need to know shortly before a due time, and not now.

        :param due: in milliseconds since the epoch.
        :raises AmendmentError: as :meth:`write`.
        :raises DelayError: where that is further away than the ladder reaches.
        """
        self.require()
        now = time.time_ns() // 1_000_000
        can_ride = self._settings.foreign_ladder is None and self._settings.declare != "never"
        if due - now < FAR_AHEAD or not can_ride:
            self.write([record])
            return
        plan, part = self._router.plan_through(
            self._exchange, self._streams[0], {}, (due - LEAD) * 1000, now * 1000
        )
        way = Ensure(part, "the way of amendments through the ladder")
        try:
            self._executor.run(self._router.prepare(plan.needs, now * 1000))
            if self._executor.do(way) is Answer.MISSING:
                self._declare()
                self._executor.do(way)
        except TopologyError as exc:
            raise AmendmentError(f"what waits cannot be amended: {exc}") from exc
        self._write([_Written(to_line(record), plan.routing_key, plan.properties)])

    def _write(self, lines: list[_Written]) -> None:
        self.require()
        try:
            lines = self._publish(lines)
            if lines:
                self._declare()
                end = time.monotonic() + _RECOVERY
                while (lines := self._publish(lines)) and time.monotonic() < end:
                    time.sleep(0.1)
        except AccessRefused as exc:
            raise AmendmentError(
                f"this user may not amend what waits: {exc.reply_text}; grant the permission "
                f"write on {self._exchange!r}"
            ) from exc
        except BinaryDelayError as exc:
            raise AmendmentError(f"what waits cannot be amended: {exc}") from exc
        if lines:
            raise AmendmentError(
                f"RabbitMQ took {len(lines)} amendments into no stream; declare the exchange "
                f"{self._exchange!r} and its streams with kombu-binary-delay create"
            )

    def _publish(self, lines: list[_Written]) -> list[_Written]:
        """Publish lines with confirms; return those that found no stream."""
        with self._buffer.closed():
            channel = self._open()
            for each in lines:
                channel.send(each.line, self._exchange, each.key, each.properties)
            try:
                returned = channel.wait_for_confirms()
            except NotFound:
                # No exchange: the broker has taken none.
                return lines
        return [each for each in lines if (each.key, each.line) in returned]

    def _declare(self) -> None:
        if self._settings.declare == "never":
            raise AmendmentError(
                f"the exchange {self._exchange!r} and its streams do not exist, and declare is "
                f"'never': make them beforehand with kombu-binary-delay create"
            )
        self._executor.run(self._ensure())

    def _ensure(self) -> Steps:
        # Of two who declare a stream at the same time, one is answered before it has started; to
        # publish to it then would end the whole connection. So one declares it, and others wait.
        command = Ensure(
            amendments_part(self._settings), "the amendments", lock=f"{self._exchange}.lock"
        )
        end = time.monotonic() + _PATIENCE
        while (yield command) is Answer.LOCKED:
            if time.monotonic() > end:
                raise AmendmentError(
                    f"{self._exchange!r} is being declared elsewhere for {_PATIENCE:g} s"
                )
            time.sleep(0.02)

    def publish(self, message: Any, exchange: str, routing_key: str) -> None:
        """Publish a message that is not an amendment, and return when it is confirmed.

        :raises AmendmentError: where the broker refuses it.
        """
        with self._buffer.closed():
            channel = self._open()
            channel.send_message(message, exchange, routing_key, mandatory=False)
            channel.wait_for_confirms()

    # -- reading -------------------------------------------------------------------------------

    def catch_up(self, *, wait: bool = True) -> None:
        """Read all that has been confirmed so far, if it is not being read already.

        :param wait: for streams that have been there, and may be there again in a moment.

        What goes wrong is a warning in the log: a consumer without amendments is a consumer still.
        """
        if not self._can_read or self._is_reading_all:
            return
        now = time.monotonic()
        # Not where it failed a moment ago.
        end = now + _RECOVERY if wait and now > self._looked else now
        self._looked = now
        try:
            self._begin_again_until(end)
        except AccessRefused as exc:
            self._can_read = False
            self._warn(
                f"{exc.reply_text}; grant this user the permission read on names that begin with "
                f"'{self._exchange}.', or set amendments to False"
            )
        except (amqp.ChannelError, BinaryDelayError) as exc:
            self._looked += _LOOK_AGAIN
            remedy = ", which rabbitmq-streams add_replica makes" if _NO_REPLICA in str(exc) else ""
            self._warn(f"{exc}{remedy}; it is tried again in {_LOOK_AGAIN:g} s")

    def verdict(self, properties: Mapping[str, Any]) -> Verdict | None:
        """Return what becomes of a message that arrives; None where it passes."""
        if not self._is_reading_all:
            # The streams may exist since the first amendment, which is after this began to consume.
            headers = properties.get("application_headers")
            if (
                self._can_read
                and headers
                and HEADER in headers
                and time.monotonic() - self._looked > _LOOK_EVERY
            ):
                self.catch_up(wait=False)
        if not self.memory:
            return None
        return self.memory.judge(properties, time.time_ns() // 1_000_000)

    @property
    def _is_reading_all(self) -> bool:
        """Whether the broker sends the records of all streams: it may have closed the channel."""
        channel = self._channel
        return channel is not None and channel.is_open and channel.streams == self._streams

    def _begin_again_until(self, end: float) -> None:
        """Catch up; try that again until a time, where a node that starts has no replica yet."""
        while True:
            try:
                self._begin_to_read(end)
            except (amqp.ChannelError, BinaryDelayError) as exc:  # noqa: PERF203 - a retry
                # To go on reading where that has failed would read each record twice.
                self._leave()
                if _NO_REPLICA not in str(exc) or time.monotonic() > end:
                    raise
                time.sleep(0.2)
            else:
                return

    def _begin_to_read(self, end: float) -> None:
        with self._buffer.closed():
            marker = ""
            try:
                marker, streams = self._mark_all(end)
                markers = len(streams)
                if not streams:
                    return
            except (AccessRefused, _BlockedError) as exc:
                # Who may not append a marker reads until no more comes.
                streams, markers = self._streams, 0
                self._looked += _LOOK_AGAIN if isinstance(exc, AccessRefused) else _BLOCKED
            channel = self._open()
            # What was known counts until all is read again.
            channel.begin(Memory(self.max_age), self._exchange, marker.encode())
            try:
                channel.read(streams, self._cancelled)
            except NotFound:
                if markers:
                    raise
                return
            if markers:
                channel.read_until(markers)
            while not markers and channel.is_busy():
                pass
            channel.has_caught_up()
            channel.memory.inherit(self.memory)
            self.memory = channel.memory
            if streams == self._streams:
                _known.add(self._place)

    def _mark_all(self, end: float) -> tuple[str, list[str]]:
        """Append a marker to the streams; return it, and the streams that are to be read.

        :param end: until when to wait for streams that this process has read before: a broker that
            has just started takes a moment to have them again.
        """
        while True:
            marker = json.dumps({"marker": secrets.token_hex(8)})
            streams = self._mark(marker)
            if streams == self._streams or self._place not in _known:
                return marker, streams
            if time.monotonic() >= end:
                # Somebody has deleted them.
                _known.discard(self._place)
                return marker, streams
            time.sleep(0.1)

    @property
    def _place(self) -> tuple[str, str]:
        return self._connection.virtual_host, self._exchange

    def _mark(self, marker: str) -> list[str]:
        """Append a marker to what is not being read; return the streams that are to be read now.

        None, where all that exist are being read already.

        :raises _BlockedError: where the broker has just blocked who published.
        """
        if time.monotonic() - _blocked.get(self._connection.host, float("-inf")) < _BLOCKED:
            raise _BlockedError
        channel = self._open()
        read = channel.streams
        missing = [each for each in self._streams if each not in read]
        found = self._append(marker, missing)
        if not found or not read:
            return found
        # One is there again: all are read anew, up to a marker in each.
        self._append(marker, read)
        self._leave()
        return self._streams

    def _append(self, marker: str, streams: list[str]) -> list[str]:
        """Append a marker to streams; return those that exist."""
        channel = self._open()
        for stream in streams:
            channel.send(marker, "", stream)
        missing = {stream for stream, _ in channel.wait_for_confirms(or_blocked=True)}
        return [each for each in streams if each not in missing]

    def _cancelled(self, tag: str) -> None:
        """Look again with the next message: a stream was deleted, or its node has gone."""
        self._looked = float("-inf")
        channel = self._channel
        if channel is not None and not channel.goes_on_without(tag):
            self._leave()

    def _leave(self) -> None:
        """Close the channel without waiting; the next to need one opens another."""
        channel, self._channel = self._channel, None
        if channel is not None and channel.is_open:
            channel.leave()

    # -- the channel ---------------------------------------------------------------------------

    def _open(self) -> _AmendmentChannel:
        if self._channel is None or not self._channel.is_open:
            channel = _AmendmentChannel(self._connection, auto_decode=False)
            channel.open()
            channel.confirm_select()
            self._channel = channel
        return self._channel

    @staticmethod
    def _warn(reason: str) -> None:
        if reason not in _warned:
            _warned.add(reason)
            logger.warning("amendments are not read, so that what was cancelled runs: %s", reason)


class _AmendmentChannel(ConfirmChannel):
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
        #: The streams that its consumers read, whose tags they are.
        self._reading: list[str] = []

    # -- publishing ----------------------------------------------------------------------------

    def send(
        self, line: str, exchange: str, routing_key: str, properties: Mapping[str, Any] = _PLAIN
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
                _blocked[self.connection.host] = time.monotonic()
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

    def wait_for_next(self, patience: float = _PATIENCE) -> None:
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

    def read(self, streams: list[str], cancelled: Callable[[str], object]) -> None:
        """Begin to read streams from their first records.

        :param cancelled: called where the broker ends the reading.
        """
        self._reading = []
        try:
            self.basic_qos(0, _PREFETCH, a_global=False)
            for stream in streams:
                self.basic_consume(
                    stream, stream, arguments={"x-stream-offset": "first"}, on_cancel=cancelled
                )
                self._reading.append(stream)
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
        connection = self.connection
        if not bulk.is_possible(connection):
            while self.markers < markers and not self.has_left:
                self.wait_for_next()
            self._check()
            return
        try:
            with connection.transport.having_timeout(_PATIENCE):
                bulk.read(
                    connection,
                    self.channel_id,
                    self._take,
                    lambda: self.markers >= markers or self.has_left,
                )
        except TimeoutError as exc:
            raise AmendmentError(f"RabbitMQ did not answer within {_PATIENCE:g} s") from exc
        self._check()

    def goes_on_without(self, tag: str) -> bool:
        """Take note that the broker ended one consumer; return whether what others read counts."""
        self._reading = [each for each in self._reading if each != tag]
        if not self.streams:
            # In the middle of catching up: the marker does not come any more.
            return False
        self.streams = list(self._reading)
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
        self.streams = list(self._reading)
        if self._read:
            self.basic_ack(self._tag, multiple=True)

    def _take(
        self,
        consumer_tag: str,
        tag: int,
        exchange: bytes,
        body: Any,
        headers: Callable[[], Mapping[str, Any]],
    ) -> None:
        # What rode the ladder comes from there. By its first death it entered where it says.
        if exchange == self._exchange or (
            exchange and headers().get(_ENTERED) == self._exchange.decode()
        ):
            record = from_line(body)
            if record is not None:
                of_keys = consumer_tag.endswith(KEYS)
                self.memory.learn(record, time.time_ns() // 1_000_000, of_keys=of_keys)
        elif (body.encode() if isinstance(body, str) else bytes(body)) == self._marker:
            self.markers += 1
        self._read += 1
        self._tag = tag
        if self.streams or self._read % (_PREFETCH // 2) == 0:
            self.basic_ack(tag, multiple=True)
