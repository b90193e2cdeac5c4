"""Write a connection's amendments with confirms; the other half, :mod:`.reading`, reads them.

One exchange has two streams. One stream has the records with ids, and keeps them for long. The
other has the records with keys, which can be one for each publish, and keeps them for a day.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import amqp
from amqp.exceptions import AccessRefused, NotFound, RecoverableConnectionError
from kombu.log import get_logger

from kombu_binary_delay.errors import AmendmentError, BinaryDelayError, DelayError, TopologyError
from kombu_binary_delay.ladder.versions import why_no_streams
from kombu_binary_delay.publishing.way_out import through
from kombu_binary_delay.routing.commands import Ensure
from kombu_binary_delay.routing.router import Router
from kombu_binary_delay.settings import Settings, milliseconds
from kombu_binary_delay.wire import alarms, streams
from kombu_binary_delay.wire.executor import Executor
from kombu_binary_delay.wire.following import is_consuming
from kombu_binary_delay.wire.frame_buffer import FrameBuffer

from .channel import PLAIN, RecordChannel, UnansweredError
from .holding import Held
from .memory import Memory
from .parts import (
    IDS,
    KEYS,
    amendments_part,
    exchange_name,
    later_part,
    stream_name,
    way_of_records,
)
from .reading import ASKED_FOR, LOOK_AGAIN, RECOVERY, Reader
from .record import MAX_BYTES, Cancel, Record, to_line

logger = get_logger(__package__)

#: The cancellation of a message that is due later than this, in milliseconds, also waits on the
#: ladder, and reaches the stream again shortly before: the stream may have dropped the first one.
FAR_AHEAD = 2 * 86_400_000
LEAD = 86_400_000
#: What to do on a broker without streams.
INSTEAD = (
    "cancel with Celery's revoke, which running workers keep in memory, and have the task look, "
    "when it runs, whether it is still wanted or is to be sent again for later"
)
#: How to cancel what is due later than the stream keeps records.
_ALONE = "cancel each task with its own eta, on a connection that may declare the ladder"


class _Written(NamedTuple):
    line: str
    key: str
    properties: Mapping[str, Any] = PLAIN


def _bounded_line(record: Record) -> str:
    line = to_line(record)
    if len(line) > MAX_BYTES:
        raise AmendmentError(
            f"a record can have at most {MAX_BYTES} bytes, got {len(line)}: {line[:60]}…; "
            f"give fewer or shorter names"
        )
    return line


def _of_nothing() -> list[_Written]:
    """Return a record that names nothing, for each stream."""
    line = to_line(Cancel((), time.time_ns() // 1_000_000))
    return [_Written(line, key) for key in (IDS, KEYS)]


class Amendments:
    """The amendments of one connection, which it writes here, and reads by its ``reader``.

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
        #: Why the broker may have no streams; empty if it may.
        self._no_streams = why_no_streams(server, connection.host)
        self._exchange = exchange_name(settings.namespace)
        self._streams = [stream_name(settings.namespace, key) for key in (IDS, KEYS)]
        #: How long the stream of ids keeps records, in milliseconds.
        self.max_age = milliseconds(settings.amendments_max_age)
        self.reader = Reader(
            connection, self._exchange, self._streams, self.max_age, self.is_possible, self.exist
        )
        #: The messages that wait until the broker takes them.
        self.held = Held(connection)
        self._channel: RecordChannel | None = None
        #: Whether a record was written, so that the next one needs no declaration.
        self.can_write = False
        #: Whether this user may publish to the default exchange, as far as this connection knows.
        self._may_ask = True

    @property
    def memory(self) -> Memory:
        """What its reader has read."""
        return self.reader.memory

    @property
    def is_possible(self) -> bool:
        """Whether the settings want amendments, and the broker may have streams."""
        return self._settings.amendments and not self._no_streams

    @property
    def why_impossible(self) -> str:
        """Why amendments that the settings want are not possible; empty where they are off."""
        return self._no_streams if self._settings.amendments else ""

    def require(self) -> None:
        """Raise an error if amendments are off, or the broker may have no streams.

        :raises AmendmentError: names the setting or the broker, and the remedy.
        """
        if not self._settings.amendments:
            raise AmendmentError(
                "amendments are off, since the setting amendments is False; "
                "set it to True for this connection and for the consumers"
            )
        if self._no_streams:
            raise AmendmentError(
                f"messages cannot be cancelled, rescheduled or superseded here: "
                f"{self._no_streams}; {INSTEAD}"
            )

    def write(self, records: Iterable[Record]) -> None:
        """Write records; return when the broker has confirmed them all.

        The streams are declared if they do not exist.

        :raises AmendmentError: if the broker has no streams, or refuses.
        """
        self._write(
            [
                _Written(_bounded_line(record), KEYS if getattr(record, "keyed", False) else IDS)
                for record in records
            ]
        )

    def write_ahead(self, record: Record, due: int) -> None:
        """Write a record that consumers need only shortly before a due time.

        :param due: in milliseconds since the epoch.
        :raises AmendmentError: as :meth:`write`, or if the due time is beyond the longest delay.
        """
        self.require()
        now = time.time_ns() // 1_000_000
        if not self.waits_on_ladder(due, now):
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
        if self.can_wait_on_ladder and at > now:
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
    def can_wait_on_ladder(self) -> bool:
        """Whether a record may wait on the ladder: this connection has one, and may declare it."""
        return self._settings.foreign_ladder is None and self._settings.declare != "never"

    def waits_on_ladder(self, due: int, now: int) -> bool:
        """Return whether a record for a due time waits on the ladder until shortly before.

        Both are milliseconds since the epoch.
        """
        return self.can_wait_on_ladder and due - now >= min(FAR_AHEAD, self.max_age)

    def kept_until(self, due: int | None, now: int) -> int:
        """Return until when the stream keeps a cancellation that is written now, at least.

        All are milliseconds since the epoch.

        :param due: the due time that it names, if any.
        """
        if due is None or not self.waits_on_ladder(due, now):
            return now + self.max_age
        return due - self._lead + self.max_age

    def require_room(self, due: int, now: int) -> None:
        """Raise an error if the ladder cannot hold a record until shortly before its due time.

        :raises AmendmentError: names the time and the longest delay.
        """
        ladder, wait = self._router.topology.ladder, due - self._lead - now
        if self.waits_on_ladder(due, now) and wait > ladder.maximum:
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
                end = time.monotonic() + RECOVERY
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
            self._write(_of_nothing())
            self.can_write = True

    def _publish(self, lines: list[_Written]) -> list[_Written]:
        """Publish lines with confirms; return those that found no stream."""
        with self._buffer.closed(ASKED_FOR):
            channel = self._open()
            for line in lines:
                channel.send(line.line, self._exchange, line.key, line.properties)
            try:
                returned = channel.wait_for_confirms()
            except NotFound:
                # No exchange: the broker has taken no record.
                return lines
        return [line for line in lines if (line.key, line.line) in returned]

    def _declare(self) -> None:
        if self._settings.declare == "never":
            raise AmendmentError(
                f"the exchange {self._exchange!r} and its streams do not exist, and declare is "
                f"'never'; make them with kombu-binary-delay create"
            )
        part, lock = amendments_part(self._settings), f"{self._exchange}.lock"
        streams.declare(self._executor, Ensure(part, ASKED_FOR, lock=lock))
        # A consumer of a stream without a record has to wait for one.
        self._publish(_of_nothing())
        logger.info(
            "made the streams of amendments; a consumer that runs already may take %g s to notice "
            "them, unless it is a Celery worker and this was a revoke",
            LOOK_AGAIN,
        )

    def exist(self, names: list[str]) -> bool | None:
        """Return whether any of these streams exists; RabbitMQ logs nothing if it does not.

        :returns: None if this user or an alarm does not allow to ask.
        """
        if not self._may_ask or alarms.is_recent(self._connection):
            return None
        with self._buffer.closed(ASKED_FOR):
            channel = self._open()
            for name in names:
                channel.send(_of_nothing()[0].line, "", name)
            try:
                returned = channel.wait_for_confirms(or_blocked=True)
            except AccessRefused:
                self._may_ask = False
                return None
        return len(returned) < len(names)

    def publish(self, message: Any, exchange: str, routing_key: str) -> None:
        """Publish a message that is not an amendment; return when it is confirmed.

        :raises AmendmentError: if the broker refuses it.
        :raises RecoverableConnectionError: if the broker does not answer, or blocks publishers.
            This ends the connection, since nobody knows whether it has the message.
        """
        try:
            with self._buffer.closed(ASKED_FOR):
                channel = self._open()
                channel.send_message(message, exchange, routing_key, mandatory=False)
                channel.wait_for_confirms(or_blocked=True)
        except UnansweredError as exc:
            error = RecoverableConnectionError(str(exc))
            self._connection.end(error)
            raise error from exc
        except amqp.ChannelError as exc:
            raise AmendmentError(f"RabbitMQ refused it: {exc.reply_text}") from exc

    def _open(self) -> RecordChannel:
        if self._channel is None or not self._channel.is_open:
            if self._connection.channels is None:
                raise RecoverableConnectionError("the connection is closed")
            channel = RecordChannel(self._connection, auto_decode=False)
            channel.open()
            channel.confirm_select()
            self._channel = channel
        return self._channel
