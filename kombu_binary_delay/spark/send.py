"""Send rows as messages on an executor, each with its outcome. Does not import Spark.

Rows come as Arrow's batches, a column at a time, and those that cancel or reschedule a task become
records of amendments, many at once.

Each message is what the application's ``send_task`` makes, so it is what a web server would have
sent. If the connection breaks, the sender reconnects and sends unconfirmed messages again: a
message may be duplicated, with the same task id, but is not lost.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from itertools import repeat
from typing import Any, NamedTuple

import amqp
import kombu
import pyarrow as pa
from amqp.exceptions import FrameSyntaxError, NotFound
from celery import Celery
from celery.exceptions import QueueNotFound
from kombu.exceptions import KombuError

from kombu_binary_delay.amendments.record import KEY, REPLACES
from kombu_binary_delay.celery_side.urls import check_url
from kombu_binary_delay.errors import (
    AmendmentError,
    BinaryDelayError,
    DelayError,
    TopologyError,
    UnconfirmedError,
)
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.delay import JITTER, jitter_of, spread
from kombu_binary_delay.ladder.ladder import Ladder
from kombu_binary_delay.publishing.batch import (
    CONFIRMED,
    DISCARDED,
    NACKED,
    RETURNED,
    UNKNOWN,
    Outcome,
    PublishBatch,
)
from kombu_binary_delay.publishing.template import Run
from kombu_binary_delay.settings import KEY as SETTINGS_KEY
from kombu_binary_delay.settings import Settings, milliseconds
from kombu_binary_delay.wire.draining import PATIENT
from kombu_binary_delay.wire.executor import is_deleted
from kombu_binary_delay.wire.mechanism import TRANSPORT, mechanism_of

from . import schema as s
from .amend import writes
from .checks import check_number
from .compiled import COLUMNS, Call, Compiler, Kind, Made, Row

logger = logging.getLogger(__name__)

WINDOW = 1000
#: The headers of a message that supersedes others.
_KEYED = {KEY, REPLACES}
#: ``Row._make``, in less time.
_row = partial(tuple.__new__, Row)
#: The longest time for which an amendment waits for others to be recorded with, in seconds.
_SOON = 1.0
_STATUS = {CONFIRMED: s.PUBLISHED, RETURNED: s.RETURNED, NACKED: s.NACKED}
#: The same for what the batch gave up while the connection works. What is unknown there is only
#: whether the broker has the record of what a message supersedes; it has the message.
_STATUS_OF_GIVEN_UP = {DISCARDED: s.REFUSED, UNKNOWN: s.PUBLISHED}
#: Errors that concern one message only, and not the next one.
_ROW_ERRORS = (
    FrameSyntaxError,
    KombuError,
    OverflowError,
    QueueNotFound,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
#: How long to wait before what has failed is tried again, in seconds.
_PAUSE = 0.5
#: The longest patience, in seconds: an operating system does not wait longer.
_MOST_PATIENCE = 1e6


@dataclass(frozen=True)
class Target:
    """Where to send, and how: plain values, which can be sent to the executors.

    :param broker: the broker's URL; None to use the application's.
    :param app: ``"module:name"`` of a Celery application that the executors can import; None for
        one with Celery's defaults.
    :param settings: as in ``broker_transport_options["binary_delay"]``; None to use the
        application's.
    :param rate: the most messages per second; None for no limit.
    :param patience: seconds for which to retry an unreachable broker.
    :raises ValueError: for an invalid rate or patience.
    """

    broker: str | None = None
    app: str | None = None
    settings: dict[str, Any] | None = None
    rate: float | None = None
    patience: float = 60.0

    def __post_init__(self) -> None:
        if self.rate is not None:
            check_number("rate", self.rate)
        check_number("patience", self.patience, most=_MOST_PATIENCE)

    def application(self) -> Celery:
        """Return the application: the same object for all targets in a process that name it."""
        return _application(self.app)

    def connection(self) -> kombu.Connection:
        """Return a connection like the one that the application opens to publish.

        :raises ValueError: if the broker's URL cannot be read.
        """
        app = self.application()
        urls = self.broker or app.conf.broker_write_url or ""
        check_url(urls if isinstance(urls, str) else ";".join(urls))
        return app.connection_for_write(
            self.broker,
            transport=app.conf.broker_transport or TRANSPORT,
            transport_options={"socket_settings": PATIENT, **self.transport_options()},
            connect_timeout=5,
        )

    def transport_options(self) -> dict[str, Any]:
        """Return the transport's options: the application's, overridden by our settings."""
        options = dict(self.application().conf.broker_transport_options)
        return options if self.settings is None else {**options, SETTINGS_KEY: self.settings}

    def transport_settings(self) -> Settings:
        """Return the transport's settings, checked."""
        return Settings.from_transport_options(self.transport_options())

    def ladder(self) -> Ladder:
        """Return the ladder of the transport's settings; this checks the settings."""
        return self.transport_settings().topology().ladder

    def max_age(self) -> int:
        """Return how long the broker keeps amendments, in milliseconds."""
        return milliseconds(self.transport_settings().amendments_max_age)


class Sent:
    """A row that is being sent, and the values of its receipt."""

    __slots__ = ("asked", "detail", "due", "published_at", "queue", "reason", "row", "status")

    def __init__(self, row: Row) -> None:
        self.row = row
        #: The due time in the row, and when the message is due, with its jitter; None if there is
        #: none, and before a countdown has begun.
        self.asked = self.due = row.eta if row.countdown is None else None
        #: When it was begun, or recorded; None before.
        self.published_at: int | None = None
        self.queue: str | None = None
        self.status: str | None = None
        self.detail: str | None = None
        #: Why ``send_task`` made its message: an index in ``REASONS``; None if a template made it.
        self.reason: int | None = None

    @property
    def action(self) -> str:
        """What the row does."""
        return self.row.action or s.PUBLISH


@cache
def _application(path: str | None) -> Celery:
    if path is None:
        return Celery("kombu_binary_delay.spark", set_as_current=False)
    module, _, name = path.partition(":")
    app: Celery = getattr(import_module(module), name or "app")
    return app


class _Refusal(NamedTuple):
    """Why the broker refuses a declaration, and until when not to ask it again."""

    reason: str
    until: float = math.inf


class _Producer(kombu.Producer):
    """The producer for ``send_task``: publishes into a batch instead of to the broker."""

    batch: PublishBatch
    #: The row whose message comes next; None after it.
    current: Sent | None = None
    #: The messages that it is given to publish; None if they are not needed.
    made: list[Made] | None = None
    patience: float
    #: Declared entities by id, each with the broker's refusal if it refused.
    declared: dict[int, tuple[Any, _Refusal | None]]
    #: Sends all that is held; it is called before a wait.
    settle: Callable[[], None]
    #: Until when it waits for the nodes of queues, since the first was missing.
    waits_until: float = math.inf

    def publish(self, body: Any, **options: Any) -> Any:
        # The sender does the retries, because it knows all messages in the window.
        return super().publish(body, **{**options, "retry": False})

    def _publish(
        self,
        body: Any,
        priority: Any,
        content_type: Any,
        content_encoding: Any,
        headers: Any,
        properties: Any,
        routing_key: str,
        mandatory: Any,
        immediate: Any,
        exchange: str,
        declare: Iterable[Any],
        *_: Any,
        **__: Any,
    ) -> None:
        message = self.channel.prepare_message(
            body, priority, content_type, content_encoding, headers, properties
        )
        if self.made is not None:
            made = dict(message.properties), Destination(exchange, routing_key), list(declare or ())
            self.made.append(Made(message.body, *made))
        self.declare(declare)
        sent, self.current = self.current, None
        if sent is None:
            # Celery's task-sent event. Often no queue receives it.
            self.batch.publish(message, exchange, routing_key, confirm_timeout=self.patience)
            return
        sent.queue = f"{exchange}/{routing_key}" if exchange else routing_key
        self.send(message, exchange, routing_key, sent)

    def send(self, message: Any, exchange: str, routing_key: str, sent: Sent) -> None:
        """Publish the message of a row."""
        # Mandatory: a message without a destination is reported, not dropped. With a timeout: a
        # broker can be away without an error.
        self.batch.publish(
            message,
            exchange,
            routing_key,
            mandatory=True,
            confirm_timeout=self.patience,
            tag=sent,
        )

    def declare(self, entities: Iterable[Any]) -> None:
        """Declare what a message is published to, once, and in a way that remembers a refusal.

        :raises TopologyError: if the broker has refused it.
        """
        for entity in entities or ():
            known, refusal = self.declared.get(id(entity), (None, None))
            if known is not entity or (refusal and time.monotonic() > refusal.until):
                refusal = self._declare(entity, was_refused=known is entity)
                self.declared[id(entity)] = entity, refusal
            if refusal:
                raise TopologyError(refusal.reason)

    def _declare(self, entity: Any, *, was_refused: bool) -> _Refusal | None:
        """Declare; return the broker's refusal, or None.

        A refusal closes the channel, which reopens itself. The messages use another channel. A
        queue whose node is down is waited for, until the patience ends. Once it is back, the next
        outage has a patience of its own.
        """
        was_missing = was_refused
        while True:
            try:
                self.maybe_declare(entity)
            except amqp.ChannelError as exc:
                reason = f"{entity!r} cannot be declared: {exc.reply_text}"
                if not isinstance(exc, NotFound) or is_deleted(exc):
                    return _Refusal(
                        f"{reason}; where it exists otherwise, name by app the application that "
                        f"has it, whose queues are declared as they are there"
                    )
                if self.waits_until == math.inf:
                    self.settle()
                    self.waits_until = time.monotonic() + self.patience
                now = time.monotonic()
                if now > self.waits_until:
                    return _Refusal(f"{reason}; start its node, and publish again", now + _PAUSE)
                logger.warning("%s; it is tried again in %g s", reason, _PAUSE)
            else:
                if was_missing:
                    self.waits_until = math.inf
                return None
            was_missing = True
            time.sleep(_PAUSE)


@dataclass
class Sender:
    """Sends rows, and returns each with its status when the broker has answered."""

    target: Target
    #: The first rows of the batch, and how many have begun; of these, those without a status are
    #: under way. After a lost connection, they are resent.
    _rows: list[Sent] = field(default_factory=list)
    _begun: int = 0
    #: Of rows under way that the batch gave up: because of the row, or because of the connection.
    _given_up: list[Outcome] = field(default_factory=list)
    #: Rows under way whose messages templates make, how many they are, and what was sent of them.
    _of_kinds: dict[Kind, list[tuple[Sent, Call]]] = field(default_factory=dict)
    _held: int = 0
    _runs: list[tuple[list[Sent], Run]] = field(default_factory=list)
    #: Rows under way that are to be recorded as amendments.
    _to_record: list[Sent] = field(default_factory=list)
    _record_by: float = 0.0
    #: Until then, records that the broker refuses are written again.
    _insist_until: float = 0.0
    _connection: Any = None
    _producer: Any = None

    def send(
        self, batches: Iterable[pa.RecordBatch]
    ) -> Iterator[tuple[pa.RecordBatch, list[Sent]]]:
        """Send rows in their order; yield each batch with its rows when they have an outcome.

        :param batches: rows with the columns of :class:`Row`.
        :raises OperationalError: if the broker is unreachable for longer than the patience. The
            rows of the batch have been yielded by then, those without an outcome, too.
        """
        self._app = self.target.application()
        self._jitter = self.target.transport_settings().jitter
        self._compiler, rate = Compiler(self._app), self.target.rate
        self._window = WINDOW if rate is None else max(1, min(WINDOW, int(rate / 10)))
        if not self._app.conf.broker_transport:
            # Celery asks the app's configured transport, not our connection, whether it can delay.
            self._app.conf.broker_transport = TRANSPORT
        pace = _Pace(self.target.rate)
        try:
            for batch in batches:
                self._rows, self._begun, rows = [], 0, map(Sent, _rows_of(batch))
                try:
                    self._send_all(rows, pace)
                except LOST:
                    yield batch, [*self._rows, *rows]
                    raise
                yield batch, self._rows
        except BaseException as exc:
            # An interrupt must not wait for the broker, either.
            lost = *_lost(), BinaryDelayError
            self._disconnect(lost=isinstance(exc, lost) or not isinstance(exc, Exception))
            raise
        finally:
            self._disconnect()

    def _send_all(self, rows: Iterable[Sent], pace: _Pace) -> None:
        for sent in rows:
            self._rows.append(sent)
            if self._to_record or pace.is_limited:
                # Cancellations are a thousand to a message.
                is_paced = sent.row.action != s.CANCEL
                rest = pace.rest() if is_paced else 0.0
                if self._to_record and time.monotonic() + rest > self._record_by:
                    self._try(self._record)
                if is_paced:
                    pace.wait()
            self._begun += 1
            try:
                self._send(sent)
            except _lost() as exc:
                self._recover(exc)
            if self._given_up:
                self._finish_given_up()
        self._try(self._flush)

    # -- one message ---------------------------------------------------------------------------

    def _send(self, sent: Sent) -> None:
        if sent.action != s.PUBLISH:
            self._amend(sent)
            return
        while True:
            sent.published_at = now = time.time_ns() // 1000
            try:
                self._publish(sent, now)
            except UnconfirmedError:
                raise
            except _ROW_ERRORS as exc:
                # It has a key, or replaces another.
                if isinstance(exc, AmendmentError) and self._waits_for_streams():
                    continue
                self._refuse(sent, exc)
            break
        if self._held >= self._window:
            self._send_held()

    def _publish(self, sent: Sent, now: int) -> None:
        row = sent.row
        if sent.asked is None:
            if row.countdown is None:
                raise DelayError("neither eta nor countdown")
            # It starts here, and has the precision of a float.
            sent.asked = sent.due = now + round(row.countdown * 1_000_000)
        headers = row.loaded_headers()
        if self._jitter or headers:
            # As the transport does, by the same headers.
            jitter = jitter_of({JITTER: self._jitter, **(headers or {})})
            sent.due = sent.asked + spread(row.task_id, jitter)
        call = Call(row, sent.asked, headers)
        known = self._compiler.known(call)
        if isinstance(known, Kind) and not (headers and _KEYED & headers.keys()):
            self._of_kinds.setdefault(known, []).append((sent, call))
            self._held += 1
            return
        producer = self._connected()
        if isinstance(known, Kind):
            # Alone, since its record is to be written, too.
            run = self._run(known, [(sent, call)])
            message = amqp.Message(run.bodies[0])
            message.properties = run.read(0)
            producer.send(message, *run.template.destination, sent)
            return
        producer.current, sent.reason = sent, known
        self._compiler.publish(producer, call, known)
        # Celery ignores an error that ends the batch while it takes an event.
        producer.batch.check()

    def _run(self, kind: Kind, calls: list[tuple[Sent, Call]]) -> Run:
        """Return messages of a kind, which are then ready to be published."""
        producer = self._connected()
        producer.declare(kind.declare)
        run = kind.fill([call for _, call in calls])
        for sent, _ in calls:
            sent.queue = kind.place
            if kind.on_call is not None:
                kind.on_call(producer, sent.row.task_id)
        return run

    def _send_held(self) -> None:
        """Send the messages that templates make."""
        of_kinds, self._of_kinds, self._held = self._of_kinds, {}, 0
        for kind, calls in of_kinds.items():
            self._fill(kind, calls)

    def _fill(self, kind: Kind, calls: list[tuple[Sent, Call]]) -> None:
        try:
            run = self._run(kind, calls)
        except UnconfirmedError:
            raise
        except _ROW_ERRORS as exc:
            if len(calls) == 1:
                self._refuse(calls[0][0], exc)
                return
            for one in calls:
                self._fill(kind, [one])
            return
        self._runs.append(([sent for sent, _ in calls], run))
        producer = self._connected()
        producer.batch.fill(run, mandatory=True, confirm_timeout=producer.patience)
        # Soon, so that the processor's cache has what is worked on, and not what is done.
        while self._runs and None not in self._runs[0][1].states:
            self._take(*self._runs.pop(0))

    def _refuse(self, sent: Sent, error: Exception) -> None:
        """Say why a row cannot be published, unless it can be once the broker is back."""
        if isinstance(error, kombu.exceptions.OperationalError):
            raise error
        self._end_if_unanswered(error)
        self._finish(sent, s.REFUSED, str(error) or type(error).__name__)

    def _take(self, sents: list[Sent], run: Run, *, is_connected: bool = True) -> None:
        """Take the outcomes of messages that a template has made.

        :param is_connected: whether the connection works: each message that was given up had its
            own reason then.
        """
        for place, (sent, state) in enumerate(zip(sents, run.states, strict=True)):
            if state == CONFIRMED:
                sent.status = s.PUBLISHED
            elif state in _STATUS or (is_connected and state is not None):
                _, text = run.replies[place]
                status = _STATUS.get(state) or _STATUS_OF_GIVEN_UP[state]
                self._finish(sent, status, text or None)

    def _amend(self, sent: Sent) -> None:
        if not self._to_record:
            self._record_by = time.monotonic() + _SOON
        self._to_record.append(sent)
        if len(self._to_record) >= WINDOW:
            self._record()

    def _record(self) -> None:
        """Record the amendments; return when the broker has confirmed them."""
        pending, self._to_record = self._to_record, []
        self._connected()
        for group, write in writes(self._connection.connection, pending):
            try:
                self._insist(write)
            except (AmendmentError, DelayError, amqp.ChannelError) as exc:
                status, detail = s.REFUSED, str(exc)
                self._end_if_unanswered(exc)
            else:
                status, detail = s.RECORDED, ""
            for sent in group:
                # The amendment holds for what is delivered from now on.
                sent.published_at = time.time_ns() // 1000
                self._finish(sent, status, detail or None)

    def _end_if_unanswered(self, error: BaseException) -> None:
        mechanism = None
        if self._connection.connected:
            mechanism = mechanism_of(self._connection.connection)
        if mechanism is not None:
            mechanism.amendments.end_if_unanswered(error)

    def _insist(self, write: Callable[[], None]) -> None:
        """Write records; after a lost connection, again and again until the patience ends."""
        while True:
            try:
                return write()
            except AmendmentError:
                if not self._waits_for_streams():
                    raise

    def _waits_for_streams(self) -> bool:
        """Wait a moment after a refused record, if the connection was lost within the patience.

        The streams of a broker that was restarted may come back much later than the broker.
        """
        if time.monotonic() > self._insist_until:
            return False
        time.sleep(_PAUSE)
        return True

    def _flush(self) -> None:
        self._send_held()
        if self._to_record:
            self._record()
        if self._producer is not None:
            self._producer.batch.flush()
            while self._runs:
                self._take(*self._runs.pop(0))

    def _finish(self, sent: Sent, status: str, detail: str | None = None) -> None:
        sent.status, sent.detail = status, detail

    def _on_outcome(self, outcome: Outcome) -> None:
        sent: Sent | None = outcome.tag
        if sent is None:
            # One of Celery's events: its outcome does not matter.
            return
        if outcome.state in _STATUS:
            self._finish(sent, _STATUS[outcome.state], outcome.reply_text or None)
        else:
            self._given_up.append(outcome)

    # -- and when the connection breaks --------------------------------------------------------

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except _lost() as exc:
            self._recover(exc)
        if self._given_up:
            self._finish_given_up()

    def _under_way(self) -> list[Sent]:
        return [sent for sent in self._rows[: self._begun] if sent.status is None]

    def _finish_given_up(self) -> None:
        # The connection works, so each row that was given up had its own reason.
        given_up, self._given_up = self._given_up, []
        for outcome in given_up:
            self._finish(outcome.tag, _STATUS_OF_GIVEN_UP[outcome.state], outcome.reply_text)

    def _recover(self, cause: BaseException) -> None:
        """Reconnect and resend the rows under way, until all of them have an answer."""
        deadline = self._insist_until = time.monotonic() + self.target.patience
        while True:
            self._disconnect(lost=not _is_refusal(cause))
            # Without those that have got an answer until then.
            held = self._under_way()
            logger.warning("%s messages are to be sent again: %s", len(held), cause)
            try:
                for sent in held:
                    if _is_refusal(cause):
                        self._send_alone(sent)
                    else:
                        self._send(sent)
                self._flush()
            except _lost() as exc:
                if len(self._under_way()) < len(held):
                    deadline = time.monotonic() + self.target.patience
                if time.monotonic() > deadline:
                    raise
                cause = exc
                time.sleep(_PAUSE)
            else:
                return

    def _send_alone(self, sent: Sent) -> None:
        """Send one row alone, to find out whether the broker closes the channel because of it."""
        try:
            self._send(sent)
            self._flush()
        except UnconfirmedError as exc:
            if not _is_refusal(exc):
                raise
            self._finish(sent, s.REFUSED, str(exc.__cause__))
            self._disconnect()
        else:
            self._finish_given_up()

    def _connected(self) -> _Producer:
        if self._producer is not None and self._producer.channel.connection is None:
            raise amqp.RecoverableConnectionError("the connection was ended: nothing answered")
        if self._producer is None:
            target = self.target
            self._connection = target.connection()
            self._connection.ensure_connection(
                max_retries=1, interval_start=0, interval_step=0, timeout=target.patience
            )
            channel = self._connection.default_channel
            self._producer = _Producer(channel)
            self._producer.patience = target.patience
            self._producer.declared = {}
            self._producer.settle = self._flush
            self._producer.batch = PublishBatch(channel, self._window, self._on_outcome)
        producer: _Producer = self._producer
        return producer

    def _disconnect(self, *, lost: bool = False) -> None:
        """Close the connection; if it may be lost, without waiting for the broker."""
        producer, self._producer = self._producer, None
        connection, self._connection = self._connection, None
        # They are still under way.
        self._to_record.clear()
        self._of_kinds.clear()
        self._held = 0
        if lost and connection is not None and connection.connected:
            # A broker that confirms nothing does not answer a close either.
            connection.connection.collect()
        if producer is not None:
            producer.batch.discard()
            producer.batch.close()
            # Because of the connection: the row is still under way.
            self._given_up.clear()
            while self._runs:
                self._take(*self._runs.pop(0), is_connected=False)
        if connection is not None:
            connection.release()


class _Pace:
    """Limits the rate per second, without a burst after a pause."""

    def __init__(self, rate: float | None) -> None:
        self.is_limited = rate is not None
        self._gap = 0.0 if rate is None else 1 / rate
        self._next = time.monotonic()

    def rest(self) -> float:
        """Return for how long to wait before the next, in seconds."""
        return max(0.0, self._next - time.monotonic()) if self.is_limited else 0.0

    def wait(self) -> None:
        if not self.is_limited:
            return
        now = time.monotonic()
        if now < self._next:
            time.sleep(self._next - now)
        self._next = max(self._next, now - 0.1) + self._gap


def _lost() -> tuple[type[BaseException], ...]:
    return (
        UnconfirmedError,
        kombu.exceptions.OperationalError,
        *kombu.Connection("amqp://").connection_errors,
        amqp.exceptions.RecoverableConnectionError,
    )


#: What ends the sending: the broker is away, or refuses the connection.
LOST = (*_lost(), amqp.AMQPError, OSError)


def _is_refusal(exc: BaseException) -> bool:
    """Return whether the broker closed only the channel, because of a message's properties."""
    return isinstance(exc.__cause__, amqp.ChannelError)


def _rows_of(batch: pa.RecordBatch) -> Iterator[Row]:
    """Yield the rows of a batch."""
    # A few at once are still in the processor's cache when they are sent.
    for begin in range(0, batch.num_rows, WINDOW):
        part = batch.slice(begin, WINDOW)
        columns: list[Iterable[Any]] = []
        for name in COLUMNS:
            columns.append(repeat(None, part.num_rows))
            if name in part.schema.names:
                column = part.column(name)
                if column.null_count < len(column):
                    columns[-1] = column.to_pylist()
        yield from map(_row, zip(*columns, strict=True))
