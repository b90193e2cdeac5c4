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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
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
from .amend import Amendment, writes
from .checks import check_number
from .compiled import CALLED, Call, Calls, Compiler, Kind, Made, headers_of
from .rows import Rows

logger = logging.getLogger(__name__)

WINDOW = 1000
#: The headers of a message that supersedes others.
_KEYED = {KEY, REPLACES}
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


#: Where a row is: its place among those of a batch.
_At = tuple[Rows, int]


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
    current: _At | None = None
    #: The messages that it is given to publish; None if they are not needed.
    made: list[Made] | None = None
    patience: float
    #: Declared entities by id, each with the broker's refusal if it refused.
    declared: dict[int, tuple[Any, _Refusal | None]]
    #: Sends and records what is under way; it is called before a wait.
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
        at, self.current = self.current, None
        if at is None:
            # Celery's task-sent event. Often no queue receives it.
            self.batch.publish(message, exchange, routing_key, confirm_timeout=self.patience)
            return
        rows, place = at
        rows.queue[place] = f"{exchange}/{routing_key}" if exchange else routing_key
        self.send(message, exchange, routing_key, at)

    def send(self, message: Any, exchange: str, routing_key: str, at: _At) -> None:
        """Publish the message of a row."""
        # Mandatory: a message without a destination is reported, not dropped. With a timeout: a
        # broker can be away without an error.
        self.batch.publish(
            message,
            exchange,
            routing_key,
            mandatory=True,
            confirm_timeout=self.patience,
            tag=at,
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
    """Sends rows, and returns them with their outcomes when the broker has answered."""

    target: Target
    #: The first rows of the batch, those that have begun; of these, those without a status are
    #: under way. After a lost connection, they are resent.
    _begun: list[Rows] = field(default_factory=list)
    #: Of rows under way that the batch gave up: because of the row, or because of the connection.
    _given_up: list[Outcome] = field(default_factory=list)
    #: Messages that templates have made, and the places of their rows.
    _runs: list[tuple[Rows, Sequence[int], Run]] = field(default_factory=list)
    #: Rows under way that are to be recorded as amendments.
    _to_record: list[Amendment] = field(default_factory=list)
    _record_by: float = 0.0
    #: Until then, records that the broker refuses are written again.
    _insist_until: float = 0.0
    _connection: Any = None
    _producer: Any = None

    def send(
        self, batches: Iterable[pa.RecordBatch]
    ) -> Iterator[tuple[pa.RecordBatch, list[Rows]]]:
        """Send rows, a window at a time; yield each batch with its rows when they have an outcome.

        :param batches: rows with the columns of :class:`.Row`.
        :raises OperationalError: if the broker is unreachable for longer than the patience. The
            first rows of the batch have been yielded by then, some of them without an outcome.
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
                self._begun = []
                try:
                    self._send_all(batch, pace)
                except LOST:
                    # What it has confirmed by now is known after that.
                    self._disconnect(lost=True)
                    yield batch, self._begun
                    raise
                yield batch, self._begun
        except BaseException as exc:
            # An interrupt must not wait for the broker, either.
            lost = *_lost(), BinaryDelayError
            self._disconnect(lost=isinstance(exc, lost) or not isinstance(exc, Exception))
            raise
        finally:
            self._disconnect()

    def _send_all(self, batch: pa.RecordBatch, pace: _Pace) -> None:
        # Cancellations are a thousand to a record, and are not paced.
        is_paced = "action" not in batch.schema.names or (
            batch.column("action").unique().to_pylist() != [s.CANCEL]
        )
        # A few at once are still in the processor's cache when they are sent.
        size = self._window if is_paced else WINDOW
        for begin in range(0, batch.num_rows, size):
            rows = Rows(batch.slice(begin, size))
            messages = sum(action != s.CANCEL for action in rows.actions)
            rest = pace.rest() if messages else 0.0
            if self._to_record and time.monotonic() + rest > self._record_by:
                self._try(self._record)
            pace.wait(messages)
            self._begun.append(rows)
            try:
                self._send(rows, range(len(rows)))
            except _lost() as exc:
                self._recover(exc)
        self._try(self._flush)

    # -- some rows -----------------------------------------------------------------------------

    def _send(self, rows: Rows, places: Sequence[int]) -> None:
        """Send rows in their order, and then the messages that templates make, kind by kind."""
        of_templates: dict[Kind, list[int]] = {}
        now = time.time_ns() // 1000
        for place in places:
            if rows.actions[place] != s.PUBLISH:
                self._amend(rows, place)
                continue
            rows.published_at[place] = now
            try:
                if rows.asked[place] is None:
                    rows.begin(place, now)
                if self._jitter or rows["headers"][place] is not None:
                    self._look_into(rows, place)
                known = self._compiler.known(rows.kinds[place])
                headers, expires = rows.loaded[place], rows["expires"][place]
                if (headers or expires is not None) and not isinstance(known, int):
                    known = self._compiler.way_of(known, headers, expires)
            except _ROW_ERRORS as exc:
                self._refuse(rows, place, exc)
                continue
            if isinstance(known, Kind) and _KEYED.isdisjoint(headers or ()):
                of_templates.setdefault(known, []).append(place)
            else:
                self._publish_alone(rows, place, known)
        for kind, of_kind in of_templates.items():
            self._fill(kind, rows, of_kind)

    def _look_into(self, rows: Rows, place: int) -> None:
        """Read a row's headers, and find when its message is due."""
        headers = rows.loaded[place] = headers_of(rows["headers"][place])
        # As the transport does, by the same headers.
        jitter = jitter_of({JITTER: self._jitter, **(headers or {})})
        rows.due[place] = rows.asked[place] + spread(rows["task_id"][place], jitter)

    def _publish_alone(self, rows: Rows, place: int, known: Kind | int | None) -> None:
        """Publish a message that no template makes, or with a record of what it supersedes."""
        call = Call(rows.row(place), rows.asked[place], rows.loaded[place])
        while True:
            rows.published_at[place] = time.time_ns() // 1000
            try:
                producer = self._connected()
                if isinstance(known, Kind):
                    run = self._run(known, rows, [place])
                    message = amqp.Message(run.bodies[0])
                    message.properties = run.read(0)
                    producer.send(message, *run.template.destination, (rows, place))
                else:
                    producer.current, rows.reason[place] = (rows, place), known
                    self._compiler.publish(producer, rows.kinds[place], call, known)
                    # Celery ignores an error that ends the batch while it takes an event.
                    producer.batch.check()
            except UnconfirmedError:
                raise
            except _ROW_ERRORS as exc:
                # It has a key, or replaces another.
                if isinstance(exc, AmendmentError) and self._waits_for_streams():
                    continue
                self._refuse(rows, place, exc)
            break
        self._finish_given_up()

    def _run(self, kind: Kind, rows: Rows, places: Sequence[int]) -> Run:
        """Return messages of a kind, which are then ready to be published."""
        producer = self._connected()
        producer.declare(kind.declare)
        columns = [*(rows[name] for name in CALLED), rows.asked, rows.loaded]
        if len(places) < len(rows):
            columns = [[column[place] for place in places] for column in columns]
        run, now = kind.fill(Calls(*columns)), time.time_ns() // 1000
        for place in places:
            rows.queue[place], rows.published_at[place] = kind.place, now
            if kind.on_call is not None:
                kind.on_call(producer, rows["task_id"][place])
        return run

    def _fill(self, kind: Kind, rows: Rows, places: Sequence[int]) -> None:
        """Publish messages that a template makes."""
        try:
            run = self._run(kind, rows, places)
        except UnconfirmedError:
            raise
        except _ROW_ERRORS as exc:
            if len(places) == 1:
                self._refuse(rows, places[0], exc)
                return
            for place in places:
                self._fill(kind, rows, [place])
            return
        self._runs.append((rows, places, run))
        producer = self._connected()
        producer.batch.fill(run, mandatory=True, confirm_timeout=producer.patience)
        self._finish_given_up()
        # Soon, so that the processor's cache has what is worked on, and not what is done.
        while self._runs and None not in self._runs[0][-1].states:
            self._take(*self._runs.pop(0))

    def _refuse(self, rows: Rows, place: int, error: Exception) -> None:
        """Say why a row cannot be published, unless it can be once the broker is back."""
        if isinstance(error, kombu.exceptions.OperationalError):
            raise error
        self._end_if_unanswered(error)
        self._finish(rows, place, s.REFUSED, str(error) or type(error).__name__)

    def _take(
        self, rows: Rows, places: Sequence[int], run: Run, *, is_connected: bool = True
    ) -> None:
        """Take the outcomes of messages that a template has made.

        :param is_connected: whether the connection works: each message that was given up had its
            own reason then.
        """
        for number, (place, state) in enumerate(zip(places, run.states, strict=True)):
            if state == CONFIRMED:
                rows.status[place] = s.PUBLISHED
            elif state in _STATUS or (is_connected and state is not None):
                _, text = run.replies[number]
                status = _STATUS.get(state) or _STATUS_OF_GIVEN_UP[state]
                self._finish(rows, place, status, text or None)

    def _amend(self, rows: Rows, place: int) -> None:
        if not self._to_record:
            self._record_by = time.monotonic() + _SOON
        self._to_record.append(Amendment(rows.row(place), (rows, place)))
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
            for _, (rows, place) in group:
                # The amendment holds for what is delivered from now on.
                rows.published_at[place] = time.time_ns() // 1000
                self._finish(rows, place, status, detail or None)
        self._finish_given_up()

    def _end_if_unanswered(self, error: BaseException) -> None:
        connection = self._connection
        if connection is None or not connection.connected:
            return
        mechanism = mechanism_of(connection.connection)
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
        if self._to_record:
            self._record()
        if self._producer is not None:
            self._producer.batch.flush()
            self._finish_given_up()
            while self._runs:
                self._take(*self._runs.pop(0))

    def _finish(self, rows: Rows, place: int, status: str, detail: str | None = None) -> None:
        rows.status[place], rows.detail[place] = status, detail

    def _on_outcome(self, outcome: Outcome) -> None:
        if outcome.tag is None:
            # One of Celery's events: its outcome does not matter.
            return
        if outcome.state in _STATUS:
            rows, place = outcome.tag
            self._finish(rows, place, _STATUS[outcome.state], outcome.reply_text or None)
        else:
            self._given_up.append(outcome)

    # -- and when the connection breaks --------------------------------------------------------

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except _lost() as exc:
            self._recover(exc)

    def _under_way(self) -> list[tuple[Rows, list[int]]]:
        return [
            (rows, [place for place, status in enumerate(rows.status) if status is None])
            for rows in self._begun
            if None in rows.status
        ]

    def _finish_given_up(self) -> None:
        # The connection works, so each row that was given up had its own reason.
        given_up, self._given_up = self._given_up, []
        for outcome in given_up:
            rows, place = outcome.tag
            self._finish(rows, place, _STATUS_OF_GIVEN_UP[outcome.state], outcome.reply_text)

    def _recover(self, cause: BaseException) -> None:
        """Reconnect and resend the rows under way, until all of them have an answer."""
        deadline = self._insist_until = time.monotonic() + self.target.patience
        while True:
            self._disconnect(lost=not _is_refusal(cause))
            # Without those that have got an answer until then.
            under_way = self._under_way()
            count = sum(len(places) for _, places in under_way)
            logger.warning("%s messages are to be sent again: %s", count, cause)
            try:
                for rows, places in under_way:
                    if not _is_refusal(cause):
                        self._send(rows, places)
                        continue
                    for place in places:
                        self._send_alone(rows, place)
                self._flush()
            except _lost() as exc:
                if sum(len(places) for _, places in self._under_way()) < count:
                    deadline = time.monotonic() + self.target.patience
                if time.monotonic() > deadline:
                    raise
                cause = exc
                time.sleep(_PAUSE)
            else:
                return

    def _send_alone(self, rows: Rows, place: int) -> None:
        """Send one row alone, to find out whether the broker closes the channel because of it."""
        try:
            self._send(rows, [place])
            self._flush()
        except UnconfirmedError as exc:
            if not _is_refusal(exc):
                raise
            self._finish(rows, place, s.REFUSED, str(exc.__cause__))
            self._disconnect()

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
        if lost and connection is not None and connection.connected:
            # A broker that confirms nothing does not answer a close either.
            connection.connection.collect()
        if producer is not None:
            producer.batch.discard()
            # Because of the connection: the rows are still under way.
            with suppress(*_lost()):
                producer.batch.close()
            self._given_up.clear()
            while self._runs:
                self._take(*self._runs.pop(0), is_connected=False)
        if connection is not None:
            connection.release()


class _Pace:
    """Limits the rate per second, without a burst after a pause."""

    def __init__(self, rate: float | None) -> None:
        self._gap = 0.0 if rate is None else 1 / rate
        self._next = time.monotonic()

    def rest(self) -> float:
        """Return for how long to wait before the next, in seconds."""
        return max(0.0, self._next - time.monotonic()) if self._gap else 0.0

    def wait(self, messages: int) -> None:
        """Wait before so many."""
        if messages and self._gap:
            time.sleep(self.rest())
            self._next = max(self._next, time.monotonic() - 0.1) + self._gap * messages


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
