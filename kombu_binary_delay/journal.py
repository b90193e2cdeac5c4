"""What really happened to delayed messages, as events beside the ladder; off unless asked for.

Three events: ``scheduled`` when a message is handed to the ladder, ``released`` when a consumer
gets it, ``executed`` when Celery has run its task. They are compact JSON, with ids, times and the
destination, and never the arguments of a task. They go to a stream queue of RabbitMQ or, where the
broker has no streams, to a rotating local file.

To write the journal must never harm what it tells of: what goes wrong is logged, once. It must not
import the transport or Celery.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import amqp
from amqp.exceptions import NotFound, ResourceLocked
from kombu.log import get_logger

from .batching.batch import PublishBatch
from .errors import AddressError, BinaryDelayError, TopologyError
from .executor import declare
from .model.address import Destination
from .model.delay import due_time
from .model.envelope import HEADER
from .model.ladder import hops
from .model.parts import Part, Queue
from .model.topology import VERSION, Topology
from .model.versions import STREAMS_SINCE, is_since
from .settings import KEY, STREAM, Settings

logger = get_logger(__name__)

SCHEDULED = "scheduled"
RELEASED = "released"
EXECUTED = "executed"
#: A file is rotated at this size in bytes, and as many old ones kept.
FILE_SIZE = 100_000_000
FILES = 10
#: How long to wait, in seconds, until others have declared the stream.
_TURN = 10

_HEADERS = "application_headers"
#: Celery's count of retries is 32 bits in the tables.
_MANY = 2**31
_Lend = Callable[[str], Any]


def stream_name(namespace: str) -> str:
    """Name the stream queue of a namespace's journal."""
    return f"{namespace}.{VERSION}.journal"


def stream_part(settings: Settings, server: dict[str, Any]) -> Part:
    """Compute what a journal needs on the broker: its stream queue, or nothing.

    :param server: the properties that the broker has told of itself.
    """
    if settings.journal != STREAM or not is_since(server, STREAMS_SINCE):
        return Part()
    arguments = ("x-queue-type", "stream"), ("x-max-age", settings.journal_max_age)
    return Part(queues=(Queue(stream_name(settings.namespace), arguments),))


class Journal:
    """One connection's journal.

    :param lend: lends a channel for a while, as a context manager.
    :param server: the properties that the broker has told of itself.
    """

    def __init__(
        self, settings: Settings, topology: Topology, lend: _Lend, server: dict[str, Any]
    ) -> None:
        self.stream = stream_name(settings.namespace)
        self._part = stream_part(settings, server)
        self._declares = settings.declare != "never"
        self._topology = topology
        self._lend = lend
        self._declared = False
        self._failed = False
        folder = None if settings.journal == STREAM else settings.journal
        if folder is None and not is_since(server, STREAMS_SINCE):
            folder = str(Path(tempfile.gettempdir(), f"{settings.namespace}-journal"))
            _warn_once(f"this broker has no streams: the journal is written to {folder}")
        self.folder = folder

    def scheduled(self, properties: dict[str, Any], exchange: str, key: str) -> None:
        """Note that a message has been handed to the ladder, or gone past it, being due already.

        :param properties: those that it was published with.
        :param exchange: where to.
        :param key: the routing key it went with.
        """
        headers = properties.get(_HEADERS) or {}
        packed = headers.get(HEADER)
        if isinstance(packed, dict):
            to = packed.get("to")
            try:
                digits, destination = self._topology.parse(key, Destination(*to) if to else None)
            except AddressError:
                return
            more = {"ladder": self._topology.ladder.name, "hops": hops(digits)}
        elif _due(headers) is not None:
            destination, more = Destination(exchange, key), {"hops": 0}
        else:
            return
        self._note(SCHEDULED, properties, destination, more)

    def released(self, properties: dict[str, Any], destination: Destination) -> None:
        """Note that a consumer has got a message, whose properties are as the ladder left them."""
        self._note(RELEASED, properties, destination, {})

    def received(self, properties: dict[str, Any], destination: Destination) -> None:
        """Note that a consumer has got a message from no ladder, if that one was due when sent."""
        due = _due(properties.get(_HEADERS) or {})
        # What is not due yet is of somebody who does not send by the ladder.
        if due is not None and due <= time.time_ns() // 1000:
            self.released(properties, destination)

    def event(
        self, properties: dict[str, Any], exchange: str, routing_key: str, **more: Any
    ) -> dict[str, Any]:
        """Write down who a message is, where it goes, and when it is due."""
        headers = properties.get(_HEADERS) or {}
        task = headers.get("id"), headers.get("task")
        is_task = all(isinstance(each, str) for each in task)
        # Of a task without an eta, Celery does not know that it was delayed, and nobody writes down
        # that it was executed. Who reads the name of a task waits for that.
        is_told = is_task and headers.get("eta") is not None
        retries = headers.get("retries")
        is_count = type(retries) is int and 0 <= retries < _MANY
        name = properties.get("message_id") or properties.get("correlation_id")
        event = {
            "id": task[0] if is_task else name,
            "task": task[1] if is_told else None,
            "retries": retries if is_task and is_count else None,
            "exchange": exchange,
            "key": routing_key,
            "due": _due(headers),
            **more,
        }
        return {name: value for name, value in event.items() if value not in (None, "")}

    def write(self, event: dict[str, Any]) -> None:
        """Write an event, without waiting for the broker.

        :raises OSError, amqp.AMQPError, BinaryDelayError: where it cannot be written.
        """
        if self.folder is not None:
            _append(self.folder, _line(event))
            return
        self.declare()
        with self._lend("the journal") as channel:
            # Where the connection has publisher confirms, basic_publish would wait for each.
            amqp.Channel._basic_publish(channel, _message(event), "", self.stream)  # noqa: SLF001

    def end(self, reason: BaseException) -> None:
        """Write no more events: what one was refused for, the next would be as well."""
        self._failed = True
        _warn_once(f"the journal ends on this connection: {reason}")

    def declare(self) -> None:
        """Declare the stream, once.

        Of two who declare it at the same time, one is answered before it has started; to publish
        to it then would end the whole connection. So they take turns.

        :raises TopologyError: where the broker refuses, or the turn does not come; and where it
            does not exist, and is not to be declared.
        """
        if not self._declares:
            self._declared = self._declared or self._stands()
        end = time.monotonic() + _TURN
        while not (self._declared or self._is_in_use() or self._declare_alone()):
            if time.monotonic() > end:
                raise TopologyError(f"{self.stream} is being declared elsewhere for {_TURN} s")
            time.sleep(0.02)
        self._declared = True

    def _stands(self) -> bool:
        with self._lend("the journal") as channel:
            try:
                channel.queue_declare(self.stream, passive=True)
            except NotFound:
                raise TopologyError(
                    f"the stream {self.stream!r} does not exist, and declare is 'never': make it "
                    f"beforehand, as kombu-binary-delay create does where journal is {STREAM!r}"
                ) from None
        return True

    def _is_in_use(self) -> bool:
        """Whether the stream has events, so that no turn is needed."""
        with self._lend("the journal") as channel:
            try:
                found = channel.queue_declare(self.stream, passive=True)
            except NotFound:
                return False
            if found.message_count:
                self._declare(channel)
            return bool(found.message_count)

    def _declare_alone(self) -> bool:
        """Declare the stream if it is our turn: if a queue can be ours alone."""
        turn = f"{self.stream}.turn"
        with self._lend("the journal") as channel:
            try:
                channel.queue_declare(turn, exclusive=True)
            except ResourceLocked:
                return False
        try:
            with self._lend("the journal") as channel:
                self._declare(channel)
        finally:
            with self._lend("the journal") as channel:
                channel.queue_delete(turn)
        return True

    def _declare(self, channel: Any) -> None:
        declare(channel, self._part)

    def _note(
        self,
        kind: str,
        properties: dict[str, Any],
        destination: Destination,
        more: dict[str, Any],
    ) -> None:
        if self._failed:
            return
        at = time.time_ns() // 1000
        try:
            about = self.event(properties, destination.exchange, destination.routing_key, **more)
            self.write({"event": kind, "at": at, **about})
        except (OSError, amqp.AMQPError, BinaryDelayError) as exc:
            # The message itself is on its way; the connection's own trouble will show by itself.
            self.end(exc)
        except (TypeError, ValueError) as exc:
            # Of this message alone, for something in its properties.
            _warn_once(f"an event is missing in the journal, as it cannot be written: {exc}")


# -- what Celery's signals tell ---------------------------------------------------------------


def follow_celery(options: Any) -> None:
    """Let the Celery that is loaded, if one is, tell which delayed tasks it has executed.

    Each transport calls it as it is made, for a worker makes one before its children, in which
    tasks are executed, and connects after.

    :param options: the transport options.
    """
    signals = sys.modules.get("celery.signals")
    if signals is not None and _wants_journal(options):
        signals.task_prerun.connect(_begins, dispatch_uid="binary-delay-journal")
        signals.task_postrun.connect(_ends, dispatch_uid="binary-delay-journal")
        signals.task_revoked.connect(_revoked, dispatch_uid="binary-delay-journal")


def _wants_journal(options: Any) -> bool:
    given = options.get(KEY) if isinstance(options, Mapping) else None
    return isinstance(given, Mapping) and given.get("journal") is not None


def _begins(task: Any = None, **_: Any) -> None:
    if task is not None and getattr(task.request, "eta", None):
        task.request.binary_delay_began = time.time_ns() // 1000


def _ends(task: Any = None, state: str | None = None, **_: Any) -> None:
    request = getattr(task, "request", None)
    if request is not None and getattr(request, "eta", None):
        began = getattr(request, "binary_delay_began", None)
        _executed(task.app, request, task.name, began, state)


def _revoked(request: Any = None, sender: Any = None, **_: Any) -> None:
    if request is not None and getattr(request, "eta", None):
        now = time.time_ns() // 1000
        _executed(sender.app, getattr(request, "request", request), sender.name, now, "REVOKED")


def _executed(app: Any, request: Any, task: str, at: int | None, state: str | None) -> None:
    def of(name: str) -> Any:
        return request.get(name) if isinstance(request, dict) else getattr(request, name, None)

    if not _wants_journal(app.conf.broker_transport_options):
        return
    info = of("delivery_info") or {}
    headers = {"id": of("id"), "task": task, "retries": of("retries") or 0, "eta": of("eta")}
    _desk.write(
        app,
        {_HEADERS: headers},
        info.get("exchange") or "",
        info.get("routing_key") or "",
        {"event": EXECUTED, "at": at or time.time_ns() // 1000, "state": state},
    )


class _Desk:
    """A process's own connection for what Celery tells: each event is confirmed.

    A worker's child may be silent for hours. What it writes then to a connection that a restarted
    broker has forgotten would be lost without a word, and its task be taken for lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._connection: Any = None
        self._batch: PublishBatch | None = None
        self._is_away = False

    def write(
        self, app: Any, properties: dict[str, Any], exchange: str, key: str, more: dict[str, Any]
    ) -> None:
        with self._lock:
            # In an outage, one task waits for its end; each further one only looks whether it has.
            failure = self._try(app, properties, exchange, key, more)
            for pause in () if self._is_away else (0, 1):
                if failure is not None:
                    time.sleep(pause)
                    failure = self._try(app, properties, exchange, key, more)
            self._is_away = failure is not None
            if failure is not None:
                _warn_once(f"executed tasks are missing in the journal: {failure}")

    def _try(self, *given: Any) -> Exception | None:
        try:
            self._write(*given)
        except Exception as exc:  # noqa: BLE001 - a task's result must not hang on this
            self._drop()
            return exc
        return None

    def _write(
        self, app: Any, properties: dict[str, Any], exchange: str, key: str, more: dict[str, Any]
    ) -> None:
        if self._owner != os.getpid():
            # A connection that came by a fork is the parent's.
            self._owner, self._connection, self._batch = os.getpid(), None, None
        if self._connection is None:
            connection = self._connection = app.connection_for_write()
            if self._is_away:
                # Each of its URLs once.
                once = max(len(connection.alt) - 1, 0)
                connection.ensure_connection(max_retries=once, interval_start=0)
            else:
                connection.ensure_connection(max_retries=3)
        journal: Journal | None = self._connection.connection.delay_journal
        if journal is None:
            return
        event = {**journal.event(properties, exchange, key), **more}
        if journal.folder is not None:
            journal.write(event)
            return
        channel = self._connection.default_channel
        journal.declare()
        if self._batch is None:
            self._batch = PublishBatch(channel, 1)
        # Mandatory: of a stream that has been deleted, the broker would confirm it, and drop it.
        self._batch.publish(_message(event), "", journal.stream, mandatory=True, timeout=10)
        self._batch.flush()

    def _drop(self) -> None:
        connection, self._connection, self._batch = self._connection, None, None
        if connection is not None:
            connection.collect()


_desk = _Desk()


# -- small parts ------------------------------------------------------------------------------


def _due(headers: dict[str, Any]) -> int | None:
    """Tell the due time in microseconds, the earliest that the headers leave possible."""
    eta = {name: headers[name] for name in ("eta", "task") if headers.get(name) is not None}
    try:
        due = due_time(eta, 0)
    except BinaryDelayError:
        due = None
    packed = headers.get(HEADER)
    if due is None and isinstance(packed, dict) and isinstance(packed.get("due"), int):
        # It was rounded up to milliseconds.
        due = packed["due"] * 1000 - 999
    return due


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"))


def _message(event: dict[str, Any]) -> Any:
    return amqp.Message(_line(event), content_type="application/json", content_encoding="utf-8")


class _File(RotatingFileHandler):
    """A rotating file that says so where it cannot be written, once, and not at each line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - logging's
        """Raise what came up."""
        error = sys.exc_info()[1]
        if error is not None:
            raise error


_files: dict[tuple[str, int], _File] = {}


def _append(folder: str, line: str) -> None:
    key = (folder, os.getpid())
    if key not in _files:
        Path(folder).mkdir(parents=True, exist_ok=True)
        # One a process: two that rotate the same file would lose lines.
        path = Path(folder, f"journal-{os.getpid()}-{time.time_ns()}.jsonl")
        _files[key] = _File(path, maxBytes=FILE_SIZE, backupCount=FILES, encoding="utf-8")
    # Its lock, too: threads share it.
    _files[key].handle(logging.makeLogRecord({"msg": line}))


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        logger.warning(text)
