"""Write a connection's amendments with confirms, and read all amendments before it consumes.

One exchange has two streams. One stream has the records with ids, and keeps them for long. The
other has the records with keys, which can be one for each publish, and keeps them for a day.

To read everything that was confirmed before, a connection appends a marker and reads until the
marker comes. The marker goes through the default exchange and is mandatory, so it also shows
whether the streams exist. For a user that may not write there, reading ends with what was the last
record before. A record counts only if it came through the exchange of the amendments, and was
published to that exchange, so only a user that may write to it can amend.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

import amqp
from amqp.exceptions import AccessRefused, NotFound, RecoverableConnectionError, ResourceError
from kombu.log import get_logger

from kombu_binary_delay.errors import AmendmentError, BinaryDelayError, DelayError, TopologyError
from kombu_binary_delay.ladder.delay import ETA
from kombu_binary_delay.ladder.envelope import HEADER, HEADERS
from kombu_binary_delay.ladder.versions import has_streams
from kombu_binary_delay.publishing.way_out import through
from kombu_binary_delay.routing.commands import Answer, Ensure, OutOfReachError, Steps
from kombu_binary_delay.routing.router import Router
from kombu_binary_delay.settings import Settings, milliseconds
from kombu_binary_delay.wire import alarms
from kombu_binary_delay.wire.executor import Executor, is_deleted
from kombu_binary_delay.wire.following import is_consuming
from kombu_binary_delay.wire.frame_buffer import FrameBuffer
from kombu_binary_delay.wire.repeating import Warnings

from .channel import (
    PATIENCE,
    PLAIN,
    PREFETCH,
    AmendmentChannel,
    BlockedError,
    EndChannel,
    UnansweredError,
)
from .memory import Memory, Verdict
from .parts import (
    IDS,
    KEYS,
    amendments_part,
    exchange_name,
    later_part,
    stream_name,
    way_of_records,
)
from .record import GENERATION, MAX_BYTES, Cancel, Record, to_line

logger = get_logger(__package__)

#: The cancellation of a message that is due later than this, in milliseconds, also waits on the
#: ladder, and reaches the stream again shortly before: the stream may have dropped the first one.
FAR_AHEAD = 2 * 86_400_000
LEAD = 86_400_000
#: How to cancel what is due later than the stream keeps records.
_ALONE = "cancel each task with its own eta, on a connection that may declare the ladder"
#: What a declaration is of, and what the broker is asked for, in errors.
_ASKED_FOR = "the amendments"
#: How often a connection that takes delayed messages tries to read the amendments, in seconds.
_LOOK_EVERY = 1.0
#: The same where there are none yet, or after a failure that is not a missing permission.
_LOOK_AGAIN = 30.0
#: How long to look for the last record of streams that are being written to, in seconds.
_LOOK_FOR_ENDS = 5.0
#: How much later than its message a record can come, in seconds.
_AWAITED = 1.0
#: After which time without a record there are no more, in seconds, where no marker can show it.
_QUIET = 0.1

#: RabbitMQ's error on a node that joined after the stream was declared, or is just starting.
_NO_REPLICA = "replica on the local node"
#: How long a node that has just started takes to make its streams available, in seconds.
_RECOVERY = 5.0
#: How long to wait for such a node where it is known that it has the streams, in seconds.
_START = 15.0

#: The first and the last time at which RabbitMQ 4.3 ended a connection that wrote to streams which
#: its node had lost, by `_streams_of`; until it is found that they work.
_lost: dict[tuple[str, str, str], tuple[float, float]] = {}

#: How many broadcasts of revokes this process has received, by `_streams_of`. With a green pool, a
#: worker receives them by another connection than its tasks.
_heard: Counter[tuple[str, str, str]] = Counter()

_warnings = Warnings(logger)


class _Written(NamedTuple):
    line: str
    key: str
    properties: Mapping[str, Any] = PLAIN


def _start_behind(failure: BaseException) -> float:
    """Return how long a failure may last, in seconds, because the node is just starting."""
    if isinstance(failure, NotFound) and not is_deleted(failure):
        return _START
    no_replica = isinstance(failure, amqp.ChannelError) and _NO_REPLICA in str(failure)
    return _RECOVERY if no_replica else float("-inf")


def _may_be_amended(headers: Mapping[str, Any]) -> bool:
    """Whether a message was delayed: by this transport, or as a task by another way."""
    return HEADER in headers or headers.get(ETA) is not None


def _bounded_line(record: Record) -> str:
    line = to_line(record)
    if len(line) > MAX_BYTES:
        raise AmendmentError(
            f"a record can have at most {MAX_BYTES} bytes, got {len(line)}: {line[:60]}…; "
            f"give fewer or shorter names"
        )
    return line


class Amendments:
    """The amendments that one connection writes and reads.

    :param connection: of py-amqp.
    :param server: the properties that the broker sent when the connection opened.
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
        #: Whether a record was written, so that the next one needs no declaration.
        self.can_write = False
        #: Whether this user may append a marker, as far as this connection knows.
        self._can_mark = True
        self._looked = float("-inf")
        #: How many broadcasts there were when it last tried to read.
        self._heard = _heard[self._streams_of]
        #: Whether there was a stream that does not exist. It is not asked again: RabbitMQ logs each
        #: such question as an error.
        self._are_missing = False
        #: Since when a stream that exists is not available. After `_START`, it is not asked again
        #: either.
        self._away = math.inf
        #: What to do again when the broker does not block publishers any more, or when the message
        #: is due: a heap of the due time, a number, and the action.
        self._held: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = count()
        self._is_releasing = False

    @property
    def is_reading(self) -> bool:
        """Whether all existing records have been read, and new ones are read as they come.

        It is False after the broker cancelled a consumer or closed the channel.
        """
        channel = self._channel
        return channel is not None and channel.is_open and channel.streams == self._streams

    @property
    def is_possible(self) -> bool:
        """Whether the settings want amendments, and the broker has streams."""
        return self._settings.amendments and has_streams(self._server)

    @property
    def is_wanted(self) -> bool:
        """Whether the setting ``amendments`` is on."""
        return self._settings.amendments

    def require(self) -> None:
        """Raise an error if amendments are off, or the broker has no streams.

        :raises AmendmentError: names the setting or the version, and the remedy.
        """
        if not self._settings.amendments:
            raise AmendmentError(
                "amendments are off, since the setting amendments is False; "
                "set it to True for this connection and for the consumers"
            )
        if not self.is_possible:
            raise AmendmentError(
                f"amendments need streams, which {self._server.get('product')} "
                f"{self._server.get('version', '')} does not have"
            )

    # -- writing -------------------------------------------------------------------------------

    def write(self, records: Iterable[Record]) -> None:
        """Write records; return when the broker has confirmed them all.

        The streams are declared if they do not exist.

        :raises AmendmentError: if the broker has no streams, or refuses.
        """
        self._write(
            [
                _Written(_bounded_line(each), KEYS if getattr(each, "keyed", False) else IDS)
                for each in records
            ]
        )

    def write_ahead(self, record: Record, due: int) -> None:
        """Write a record that consumers need only shortly before a due time.

        :param due: in milliseconds since the epoch.
        :raises AmendmentError: as :meth:`write`, or if the due time is beyond the longest delay.
        """
        self.require()
        now = time.time_ns() // 1_000_000
        if not self.rides(due, now):
            self.require_remembered(due, now)
            self.write([record])
            return
        self._send_by_ladder(record, due - self._lead)

    def write_at(self, record: Record, at: int) -> None:
        """Write a record that is to reach the stream at a time, as one from another ladder.

        :param at: in milliseconds since the epoch.
        :raises AmendmentError: as :meth:`write_ahead`.
        """
        self.require()
        now = time.time_ns() // 1_000_000
        if self.can_ride and at > now:
            self._send_by_ladder(record, at)
            return
        self.require_remembered(at + self._lead, now)
        self.write([record])

    def _send_by_ladder(self, record: Record, at: int) -> None:
        topology = self._router.topology
        try:
            out = through(
                self._router,
                self._executor,
                self._exchange,
                way_of_records(topology),
                at * 1000,
                way=later_part(topology),
                declare=self._declare,
            )
        except (DelayError, TopologyError) as exc:
            raise AmendmentError(f"messages cannot be amended: {exc}") from exc
        self._write([_Written(to_line(record), out.routing_key, out.properties)])

    @property
    def can_ride(self) -> bool:
        """Whether a record may wait on the ladder: this connection has one, and may declare it."""
        return self._settings.foreign_ladder is None and self._settings.declare != "never"

    def rides(self, due: int, now: int) -> bool:
        """Return whether a record for a due time waits on the ladder until shortly before.

        Both are milliseconds since the epoch.
        """
        return self.can_ride and due - now >= min(FAR_AHEAD, self.max_age)

    def kept_until(self, due: int | None, now: int) -> int:
        """Return until when the stream keeps a cancellation that is written now, at least.

        All are milliseconds since the epoch.

        :param due: the due time that it names, if any.
        """
        if due is None or not self.rides(due, now):
            return now + self.max_age
        return due - self._lead + self.max_age

    def require_room(self, due: int, now: int) -> None:
        """Raise an error if the ladder cannot hold a record until shortly before its due time.

        :raises AmendmentError: names the time and the longest delay.
        """
        ladder, wait = self._router.topology.ladder, due - self._lead - now
        if self.rides(due, now) and wait > ladder.maximum:
            raise AmendmentError(
                f"the record of a cancellation would have to wait for {wait // 1000} s, and the "
                f"longest delay of the ladder {ladder.name} is {ladder.maximum // 1000} s"
            )

    @property
    def _lead(self) -> int:
        """How long before the due time such a record comes: the stream must keep it until then."""
        return min(LEAD, self.max_age // 2)

    def require_remembered(
        self, due: int, now: int, what: str = "a cancellation", instead: str = _ALONE
    ) -> None:
        """Raise an error if the stream would drop a record before its due time.

        :param what: the record, for the error.
        :param instead: the remedy, beside a longer ``amendments_max_age``.
        :raises AmendmentError: names the time, the limit and the remedy.
        """
        if due - now > self.max_age:
            raise AmendmentError(
                f"{what} for a due time in {(due - now) // 1000} s would expire before, "
                f"since records are kept for {self.max_age // 1000} s; {instead}, or raise "
                f"amendments_max_age"
            )

    def _write(self, lines: list[_Written]) -> None:
        # If this fails, the next message that supersedes others is refused before it is published.
        was, self.can_write = self.can_write, False
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
                f"this user may not amend messages: {exc.reply_text}; grant the permission "
                f"write on {self._exchange!r}"
            ) from exc
        except BinaryDelayError as exc:
            kind = UnansweredError if isinstance(exc, UnansweredError) else AmendmentError
            raise kind(f"messages cannot be amended: {exc}") from exc
        if lines:
            raise AmendmentError(
                f"{' and '.join(map(repr, self._streams))} exist and did not take "
                f"{len(lines)} amendments; start the nodes that have them, or delete those that "
                f"their node has lost"
            )
        self.can_write = was

    def end_if_unanswered(self, error: BaseException) -> bool:
        """End the connection if a write got no answer: its close would get none, either.

        Not if the program consumes: Kombu would connect again, and not consume.

        :returns: whether it got none.
        """
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, UnansweredError):
            cause = cause.__cause__
        if cause is not None and not is_consuming(self._connection):
            self._connection.end(RecoverableConnectionError(str(error)))
        return cause is not None

    def prepare(self) -> None:
        """Check that records can be written, before the messages that they name are published.

        :raises AmendmentError: as :meth:`write`.
        """
        if not self.can_write:
            # A record that names nothing, to each stream.
            line = to_line(Cancel((), time.time_ns() // 1_000_000))
            self._write([_Written(line, key) for key in (IDS, KEYS)])
            self.can_write = True

    def _publish(self, lines: list[_Written]) -> list[_Written]:
        """Publish lines with confirms; return those that found no stream."""
        with self._buffer.closed(_ASKED_FOR):
            channel = self._open()
            for each in lines:
                channel.send(each.line, self._exchange, each.key, each.properties)
            try:
                returned = channel.wait_for_confirms()
            except NotFound:
                # No exchange: the broker has taken no record.
                return lines
        return [each for each in lines if (each.key, each.line) in returned]

    def _declare(self) -> None:
        if self._settings.declare == "never":
            raise AmendmentError(
                f"the exchange {self._exchange!r} and its streams do not exist, and declare is "
                f"'never'; make them with kombu-binary-delay create"
            )
        self._executor.run(self._ensure())
        logger.info(
            "made the streams of amendments; a consumer that runs already may take %g s to notice "
            "them, unless it is a Celery worker and this was a revoke",
            _LOOK_AGAIN,
        )

    def _ensure(self) -> Steps:
        # If two programs declare a stream at once, one gets the answer before the stream has
        # started, and its publish would end the connection. So one declares, and others wait.
        part, lock = amendments_part(self._settings), f"{self._exchange}.lock"
        command = Ensure(part, _ASKED_FOR, lock=lock)
        end = time.monotonic() + PATIENCE
        # A node that is just starting may take the records nevertheless.
        with suppress(OutOfReachError):
            while (yield command) is Answer.LOCKED:
                if time.monotonic() > end:
                    raise AmendmentError(
                        f"{self._exchange!r} is being declared elsewhere for {PATIENCE:g} s"
                    )
                time.sleep(0.02)

    def publish(self, message: Any, exchange: str, routing_key: str) -> None:
        """Publish a message that is not an amendment; return when it is confirmed.

        :raises AmendmentError: if the broker refuses it.
        :raises RecoverableConnectionError: if the broker does not answer, or blocks publishers.
            This ends the connection, since nobody knows whether it has the message.
        """
        try:
            with self._buffer.closed(_ASKED_FOR):
                channel = self._open()
                channel.send_message(message, exchange, routing_key, mandatory=False)
                channel.wait_for_confirms(or_blocked=True)
        except UnansweredError as exc:
            error = RecoverableConnectionError(str(exc))
            self._connection.end(error)
            raise error from exc
        except amqp.ChannelError as exc:
            raise AmendmentError(f"RabbitMQ refused it: {exc.reply_text}") from exc

    @property
    def is_holding(self) -> bool:
        """Whether :meth:`release` has something to do."""
        return bool(self._held)

    @property
    def rest(self) -> float:
        """For how long :meth:`release` has nothing to do, in seconds."""
        first = self._held[0][0] / 1000 - time.time() if self._held else 0.0
        return max(min(first, alarms.rest(self._connection)), 0.0)

    def hold(self, due: int, again: Callable[[], object]) -> None:
        """Call ``again`` when its message, which cannot be delayed again now, can be, or is due.

        :param due: in milliseconds since the epoch.
        """
        heappush(self._held, (due, next(self._numbers), again))
        self._connection.is_held_up = True

    def release(self) -> bool:
        """Try again with what is due and, unless the broker may block publishers, all that is held.

        :returns: whether anything was tried.
        """
        if self._is_releasing:
            # A callback waits for the broker.
            return False
        tried, self._is_releasing = False, True
        try:
            while self._held and not self.rest:
                tried = True
                _, _, again = heappop(self._held)
                again()
        finally:
            self._is_releasing = False
        return tried

    # -- reading -------------------------------------------------------------------------------

    def catch_up(self, *, wait: bool = True) -> None:
        """Read all records that are confirmed so far, if they are not being read already.

        A failure is logged as a warning: the consumer works without amendments.

        :param wait: whether to wait some seconds for streams of a node that is just starting.
        """
        if self.is_reading or not self._can_read:
            return
        now = time.monotonic()
        first, last = _lost.get(self._streams_of, (now, now))
        if last - first > _LOOK_AGAIN and now - last < alarms.PAUSE:
            # It was no start of a node. Only a later connection tries again: this one consumes.
            self._can_read = False
            self._warn(
                f"RabbitMQ ends each connection that writes to {' and '.join(self._streams)}; "
                f"delete them with rabbitmqctl delete_queue"
            )
            return
        # Not after a recent failure.
        since = now if wait and now > self._looked else float("-inf")
        self._looked = now
        try:
            self._begin_and_wait(since)
        except AccessRefused as exc:
            self._can_read = False
            self._warn(
                f"{exc.reply_text}; grant this user the permission read on names that begin with "
                f"'{self._exchange}.', or set amendments to False"
            )
        except (amqp.ChannelError, BinaryDelayError) as exc:
            remedy = ", which rabbitmq-streams add_replica makes" if _NO_REPLICA in str(exc) else ""
            self._put_off(f"{exc}{remedy}")

    def look(self, headers: Mapping[str, Any] = PLAIN) -> None:
        """Catch up, unless that was tried lately.

        :param headers: of the message that is to be judged.
        """
        if self.is_reading:
            return
        heard = _heard[self._streams_of]
        every = _LOOK_EVERY
        if heard != self._heard:
            every = 0.0
        elif self._are_missing and GENERATION not in headers:
            # To ask is two messages that no queue takes, and their confirms.
            every = _LOOK_AGAIN
        if time.monotonic() - self._looked > every:
            self._heard = heard
            self.catch_up(wait=False)

    def heard(self) -> None:
        """Look again with the next message: a broadcast has come that revokes something."""
        _heard[self._streams_of] += 1

    def lag(self) -> float | None:
        """Return the time from the confirm of a record until it is read here, in seconds.

        This appends a marker to both streams and returns the longer of the two times.

        :returns: None if the streams are not read, this user may not write to them, or the broker
            has lately blocked publishers.
        """
        self.catch_up()
        return self._read_to_marker()

    def _read_to_marker(self) -> float | None:
        channel = self._channel
        if not (self.is_reading and self._can_mark) or channel is None:
            return None
        if alarms.is_recent(self._connection):
            return None
        marker = json.dumps({"marker": secrets.token_hex(8)})
        with self._buffer.closed(_ASKED_FOR):
            channel.expect(marker.encode())
            try:
                marked = self._append(marker, self._streams)
            except AccessRefused:
                self._can_mark = False
                return None
            confirmed = time.monotonic()
            channel.read_until(len(marked), confirmed + PATIENCE)
            # Otherwise one of the streams is not read any more.
            return time.monotonic() - confirmed if channel.markers >= len(marked) else None

    def verdict(self, properties: Mapping[str, Any]) -> Verdict | None:
        """Return what happens to a message that arrives; None if it passes."""
        headers = properties.get(HEADERS)
        if headers and self._can_read and not self.is_reading and _may_be_amended(headers):
            # The first amendment, after this began to consume, may have created the streams.
            self.look(headers)
        if not self.memory:
            return None
        channel = self._channel
        if channel is not None:
            if channel.backlog >= PREFETCH:
                self._read_what_was_held_back(channel)
            channel.is_alone = False
        now = time.time_ns() // 1_000_000
        if self.memory.awaits_record(properties, now):
            # It was published an instant ago, and may have been cancelled since.
            self._read_on(lambda: not self.memory.awaits_record(properties, now))
            now = time.time_ns() // 1_000_000
        return self.memory.judge(properties, now)

    def _read_what_was_held_back(self, channel: AmendmentChannel) -> None:
        """Read all records, after so many that the broker may have waited for their acks.

        While a program is busy with a message, nothing reads the records.
        """
        try:
            if self._read_to_marker() is None:
                self._read_on(lambda: not self._open().is_busy(_QUIET))
        except (amqp.ChannelError, BinaryDelayError) as exc:
            self._leave()
            self._put_off(str(exc))
        channel.backlog = 0

    def _read_on(self, is_enough: Callable[[], bool]) -> None:
        """Read until ``is_enough``, or for a second."""
        end = time.monotonic() + _AWAITED
        with self._buffer.closed(_ASKED_FOR):
            while self.is_reading and not is_enough() and (left := end - time.monotonic()) > 0:
                self._open().is_busy(left)

    def _begin_and_wait(self, since: float) -> None:
        """Catch up; repeat that for a while from then on if the node is just starting."""
        while True:
            try:
                self._begin_to_read(since)
            except BaseException as exc:
                # Reading on after a failure, or an interrupt, would read each record twice.
                self._leave()
                if time.monotonic() > since + _start_behind(exc):
                    raise
                time.sleep(0.2)
            else:
                return

    def _begin_to_read(self, since: float) -> None:
        with self._buffer.closed(_ASKED_FOR):
            marker, ends = "", []  # type: str, list[tuple[int, bytes]]
            try:
                marker, streams = self._mark_all(since)
                if not streams:
                    return
            except (AccessRefused, BlockedError) as exc:
                # No marker may be appended.
                self._can_mark = isinstance(exc, BlockedError)
                pause = alarms.PAUSE if self._can_mark else _LOOK_AGAIN
                self._looked = time.monotonic() + pause
                # It may still read one of them.
                self._leave()
                streams = self._streams
                try:
                    ends = self._find_ends()
                except NotFound as exc:
                    if is_deleted(exc):
                        return
                    raise
            channel = self._open()
            # What was read before counts until everything is read again.
            channel.begin(Memory(self.max_age), self._exchange, marker.encode(), ends)
            channel.read(streams, self._cancelled)
            channel.read_until(len(streams) if marker else len(ends))
            channel.has_caught_up()
            channel.memory.inherit(self.memory, time.time_ns() // 1_000_000)
            self.memory = channel.memory

    def _find_ends(self) -> list[tuple[int, bytes]]:
        """Return the offset and the body of the last record of each stream that has one."""
        self._check_open()
        channel = EndChannel(self._connection, auto_decode=False)
        channel.open()
        try:
            channel.read(self._streams, lambda _: None, "last")
            end = time.monotonic() + _LOOK_FOR_ENDS
            while time.monotonic() < end and channel.is_busy():
                pass
        finally:
            if channel.is_open:
                channel.leave()
        return list(channel.ends.values())

    def _mark_all(self, since: float) -> tuple[str, list[str]]:
        """Append a marker to the streams; return it, and the streams to read.

        :param since: from when on to wait for streams that exist: a broker that has just started
            needs a moment to make them available.
        """
        while True:
            marker = json.dumps({"marker": secrets.token_hex(8)})
            streams = self._mark(marker)
            missing = [each for each in self._streams if each not in (*streams, *self._being_read)]
            if not missing:
                self._are_missing, self._away = False, math.inf
                return marker, streams
            now = time.monotonic()
            if not self._are_missing and now <= self._away + _START:
                self._are_missing = not any(map(self._exists, missing))
                self._away = min(self._away, now)
            if self._are_missing:
                return marker, streams
            if now > self._away + _START:
                self._warn(
                    f"RabbitMQ has not started {' and '.join(missing)}; "
                    f"see that the node that has them runs"
                )
                return marker, streams
            if since == float("-inf"):
                return marker, streams
            time.sleep(0.2)

    @property
    def _being_read(self) -> list[str]:
        return self._channel.streams if self._channel is not None else []

    def _exists(self, stream: str) -> bool:
        """Whether a stream exists, available or not; False if this user may not ask."""
        with suppress(TopologyError), self._executor.channel(_ASKED_FOR) as channel:
            try:
                channel.queue_declare(stream, passive=True)
            except NotFound as exc:
                return not is_deleted(exc)
            return True
        return False

    @property
    def _streams_of(self) -> tuple[str, str, str]:
        return self._connection.host, self._connection.virtual_host, self._exchange

    def _mark(self, marker: str) -> list[str]:
        """Append a marker to the streams that are not being read; return the streams to read now.

        There are none if all existing streams are being read already.

        :raises BlockedError: if the broker has recently blocked publishers.
        """
        if alarms.is_recent(self._connection):
            raise BlockedError
        channel = self._open()
        read = channel.streams
        missing = [each for each in self._streams if each not in read]
        found = self._append(marker, missing)
        if not found or not read:
            return found
        # A stream exists again: read all from the beginning, up to a marker in each.
        self._append(marker, read)
        self._leave()
        return self._streams

    def _append(self, marker: str, streams: list[str]) -> list[str]:
        """Append a marker to streams; return those that exist."""
        channel = self._open()
        for stream in streams:
            channel.send(marker, "", stream)
        try:
            missing = {stream for stream, _ in channel.wait_for_confirms(or_blocked=True)}
        except ResourceError:
            now = time.monotonic()
            _lost[self._streams_of] = (_lost.get(self._streams_of, (now, now))[0], now)
            raise
        _lost.pop(self._streams_of, None)
        return [each for each in streams if each not in missing]

    def _cancelled(self, tag: str) -> None:
        """Check the streams again with the next message: one was deleted, or its node stopped."""
        self._looked = float("-inf")
        channel = self._channel
        if channel is not None and not channel.goes_on_without(tag):
            self._leave()

    def _leave(self) -> None:
        """Close the channel without waiting; the next use opens another one."""
        channel, self._channel = self._channel, None
        if channel is not None and channel.is_open:
            channel.leave()

    # -- the channel ---------------------------------------------------------------------------

    def _open(self) -> AmendmentChannel:
        if self._channel is None or not self._channel.is_open:
            self._check_open()
            channel = AmendmentChannel(self._connection, auto_decode=False)
            channel.open()
            channel.confirm_select()
            self._channel = channel
        return self._channel

    def _check_open(self) -> None:
        if self._connection.channels is None:
            raise RecoverableConnectionError("the connection is closed")

    def _put_off(self, reason: str) -> None:
        self._looked = max(self._looked, time.monotonic() + _LOOK_AGAIN)
        self._warn(f"{reason}; it is tried again in {_LOOK_AGAIN:g} s")

    @staticmethod
    def _warn(reason: str) -> None:
        _warnings.warn(f"amendments are not read, so cancelled messages run: {reason}")
