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
from typing import Any, NamedTuple

import amqp
from amqp.exceptions import AccessRefused, NotFound
from kombu.log import get_logger

from kombu_binary_delay.buffering import FrameBuffer
from kombu_binary_delay.commands import Answer, Ensure, Steps
from kombu_binary_delay.errors import AmendmentError, BinaryDelayError, TopologyError
from kombu_binary_delay.executor import Executor
from kombu_binary_delay.model.envelope import HEADER
from kombu_binary_delay.model.versions import has_streams
from kombu_binary_delay.router import Router
from kombu_binary_delay.settings import Settings, milliseconds

from .channel import PATIENCE, PLAIN, AmendmentChannel, BlockedError, blocked
from .memory import Memory, Verdict
from .parts import IDS, KEYS, amendments_part, exchange_name, stream_name
from .record import MAX_BYTES, Cancel, Record, to_line

logger = get_logger(__package__)

#: A cancellation of what is due later than this, in milliseconds, rides the ladder, and reaches the
#: stream so much before. Consumers remember what is due soon, and not what is due in a year.
FAR_AHEAD = 2 * 86_400_000
LEAD = 86_400_000
#: How often a connection that takes delayed messages asks whether there are amendments, in seconds.
_LOOK_EVERY = 1.0
#: And where that failed for another reason than a permission.
_LOOK_AGAIN = 30.0
#: A user who may append no marker reads for so long at most, in seconds.
_QUIET_AT_LAST = 5.0
#: How long a record can take behind the message that it is of, in seconds.
_AWAITED = 1.0

#: RabbitMQ's words for a node that joined after the stream was declared, or is just starting.
_NO_REPLICA = "replica on the local node"
#: For how long nothing is asked of a broker that blocked publishers, in seconds.
_BLOCKED = 300.0
#: A node that has just started takes so long, in seconds, until all streams are where they were.
_RECOVERY = 5.0

_warned: set[str] = set()
#: The virtual hosts, and the exchanges in them, whose streams this process has read.
_known: set[tuple[str, str]] = set()


class _Written(NamedTuple):
    line: str
    key: str
    properties: Mapping[str, Any] = PLAIN


def _bounded_line(record: Record) -> str:
    line = to_line(record)
    if len(line) > MAX_BYTES:
        raise AmendmentError(
            f"a record can have at most {MAX_BYTES} bytes, got {len(line)}: {line[:60]}…; "
            f"name less, or by shorter names"
        )
    return line


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
        self._channel: AmendmentChannel | None = None
        self._can_read = self.is_possible
        self._can_write = False
        self._looked = float("-inf")

    @property
    def is_reading(self) -> bool:
        """Whether all that was confirmed before has been read, and what comes is.

        The broker may have ended that for one of the streams, or closed the channel.
        """
        channel = self._channel
        return channel is not None and channel.is_open and channel.streams == self._streams

    @property
    def is_possible(self) -> bool:
        """Whether the settings want amendments, and the broker has streams."""
        return self._settings.amendments and has_streams(self._server)

    @property
    def is_wanted(self) -> bool:
        """Whether the settings want amendments."""
        return self._settings.amendments

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

    def write(self, records: Iterable[Record]) -> None:
        """Write records, and return when the broker has confirmed them all.

        The streams are declared if they do not exist.

        :raises AmendmentError: where the broker cannot, or refuses.
        """
        self._write(
            [
                _Written(_bounded_line(each), KEYS if getattr(each, "keyed", False) else IDS)
                for each in records
            ]
        )

    def write_ahead(self, record: Record, due: int) -> None:
        """Write a record that consumers need to know shortly before a due time, and not now.

        :param due: in milliseconds since the epoch.
        :raises AmendmentError: as :meth:`write`.
        :raises DelayError: where that is further away than the ladder reaches.
        """
        self.require()
        now = time.time_ns() // 1_000_000
        can_ride = self._settings.foreign_ladder is None and self._settings.declare != "never"
        # The stream itself is to keep it until then.
        far, lead = min(FAR_AHEAD, self.max_age), min(LEAD, self.max_age // 2)
        if due - now < far or not can_ride:
            self.require_remembered(due, now)
            self.write([record])
            return
        plan, part = self._router.plan_through(
            self._exchange, self._streams[0], {}, (due - lead) * 1000, now * 1000
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

    def require_remembered(self, due: int, now: int) -> None:
        """Raise an error where the stream would forget a record before it is due.

        :raises AmendmentError: names the time, the limit and the remedy.
        """
        if due - now > self.max_age:
            raise AmendmentError(
                f"what is due in {(due - now) // 1000} s cannot be cancelled so, since records are "
                f"kept for {self.max_age // 1000} s; cancel each task with its own eta, on a "
                f"connection that may declare our own ladder, or set amendments_max_age to more"
            )

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

    def prepare(self) -> None:
        """Find out whether records can be written, before what they are about is published.

        :raises AmendmentError: as :meth:`write`.
        """
        if not self._can_write:
            # One that names nothing.
            self.write([Cancel((), time.time_ns() // 1_000_000)])
            self._can_write = True

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
        end = time.monotonic() + PATIENCE
        while (yield command) is Answer.LOCKED:
            if time.monotonic() > end:
                raise AmendmentError(
                    f"{self._exchange!r} is being declared elsewhere for {PATIENCE:g} s"
                )
            time.sleep(0.02)

    def publish(self, message: Any, exchange: str, routing_key: str) -> None:
        """Publish a message that is not an amendment, and return when it is confirmed.

        :raises AmendmentError: where the broker refuses it.
        """
        try:
            with self._buffer.closed():
                channel = self._open()
                channel.send_message(message, exchange, routing_key, mandatory=False)
                channel.wait_for_confirms()
        except amqp.ChannelError as exc:
            raise AmendmentError(f"RabbitMQ refused it: {exc.reply_text}") from exc

    # -- reading -------------------------------------------------------------------------------

    def catch_up(self, *, wait: bool = True) -> None:
        """Read all that has been confirmed so far, if it is not being read already.

        What goes wrong is a warning in the log: a consumer without amendments is a consumer still.

        :param wait: for streams that have been there, and may be there again in a moment.
        """
        if self.is_reading or not self._can_read:
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

    def look(self) -> None:
        """Catch up, if that was not tried within the last second."""
        if not self.is_reading and time.monotonic() - self._looked > _LOOK_EVERY:
            self.catch_up(wait=False)

    def lag(self) -> float | None:
        """Return how long a record takes from its confirm until it is read here, in seconds.

        Appends a marker to both streams; of their times, this is the longer one.

        :returns: None where they are not read, or this user may not write to them.
        """
        self.catch_up()
        channel = self._channel
        if not self.is_reading or channel is None:
            return None
        marker = json.dumps({"marker": secrets.token_hex(8)})
        with self._buffer.closed():
            channel.expect(marker.encode())
            try:
                marked = self._append(marker, self._streams)
            except AccessRefused:
                return None
            confirmed = time.monotonic()
            channel.read_until(len(marked))
            return time.monotonic() - confirmed

    def verdict(self, properties: Mapping[str, Any]) -> Verdict | None:
        """Return what becomes of a message that arrives; None where it passes."""
        if not self.is_reading:
            # The streams may exist since the first amendment, which is after this began to consume.
            headers = properties.get("application_headers")
            if self._can_read and headers and HEADER in headers:
                self.look()
        if not self.memory:
            return None
        now = time.time_ns() // 1_000_000
        if self.memory.awaits_record(properties, now):
            # It was published an instant ago, and may have been cancelled since.
            self._read_on(lambda: not self.memory.awaits_record(properties, now))
            now = time.time_ns() // 1_000_000
        return self.memory.judge(properties, now)

    def _read_on(self, is_enough: Callable[[], bool]) -> None:
        """Read until it is enough, or a second has passed."""
        end = time.monotonic() + _AWAITED
        with self._buffer.closed():
            while self.is_reading and not is_enough() and time.monotonic() < end:
                self._open().is_busy()

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
            except (AccessRefused, BlockedError) as exc:
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
            channel.read_until(markers)
            # Where records never cease, the rest is read as it comes.
            quiet = time.monotonic() + _QUIET_AT_LAST
            while not markers and time.monotonic() < quiet and channel.is_busy():
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

        :raises BlockedError: where the broker has just blocked who published.
        """
        if time.monotonic() - blocked.get(self._connection.host, float("-inf")) < _BLOCKED:
            raise BlockedError
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

    def _open(self) -> AmendmentChannel:
        if self._channel is None or not self._channel.is_open:
            channel = AmendmentChannel(self._connection, auto_decode=False)
            channel.open()
            channel.confirm_select()
            self._channel = channel
        return self._channel

    @staticmethod
    def _warn(reason: str) -> None:
        if reason not in _warned:
            _warned.add(reason)
            logger.warning("amendments are not read, so that what was cancelled runs: %s", reason)
