"""Record which delayed tasks Celery has executed, from its signals."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any

from kombu_binary_delay.journal import events, files
from kombu_binary_delay.journal.stream import to_message
from kombu_binary_delay.journal.writer import Journal, warnings
from kombu_binary_delay.ladder.delay import JITTER
from kombu_binary_delay.ladder.envelope import HEADERS
from kombu_binary_delay.publishing.batch import PublishBatch
from kombu_binary_delay.settings import KEY, STREAM
from kombu_binary_delay.wire.mechanism import mechanism_of


def follow_celery(options: Any) -> None:
    """Connect to Celery's signals for executed tasks, if Celery is loaded.

    Each transport calls this when it is created: a worker creates one before it starts the child
    processes that execute tasks.

    :param options: the transport options.
    """
    signals = sys.modules.get("celery.signals")
    if signals is not None and _wants_journal(options):
        signals.task_prerun.connect(_started, dispatch_uid="binary-delay-journal")
        signals.task_postrun.connect(_ended, dispatch_uid="binary-delay-journal")
        signals.task_revoked.connect(_revoked, dispatch_uid="binary-delay-journal")


def _wants_journal(options: Any) -> bool:
    given = options.get(KEY) if isinstance(options, Mapping) else None
    return isinstance(given, Mapping) and given.get("journal") is not None


def _started(task: Any = None, **_: Any) -> None:
    if task is not None and getattr(task.request, "eta", None):
        task.request.binary_delay_began = time.time_ns() // 1000


def _ended(task: Any = None, state: str | None = None, **_: Any) -> None:
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
    headers = {
        "id": of("id"),
        "task": task,
        "retries": of("retries") or 0,
        "eta": of("eta"),
        JITTER: of(JITTER),
    }
    message = events.about(
        {HEADERS: headers}, info.get("exchange") or "", info.get("routing_key") or ""
    )
    at = at or time.time_ns() // 1000
    event = {**message, "event": events.EXECUTED, "at": at, "state": state}
    where = app.conf.broker_transport_options[KEY]["journal"]
    try:
        line = events.to_line(event)
        if where == STREAM:
            _writer_of(app).write(app, line)
        else:
            files.append(where, line)
    except (OSError, TypeError, ValueError) as exc:
        warnings.warn(f"an executed task is missing in the journal: {exc}")


#: The most events to keep in memory while the broker takes none, and how many to write at once.
_MOST, _PART = 10_000, 100
#: After so many seconds without success, the broker is not asked again by the same task, whose time
#: limit goes on, and by others only after so many times as long as the last one has waited.
_LONG, _RESTS = 5.0, 10.0
#: The same while the broker is known to be unreachable: a refused connection takes less.
_NOTICED = 0.5
#: How long a task waits before each further try, in seconds.
_PAUSES = 0, 1, 2


class ConfirmedWriter:
    """A process's connection for the events of an app's tasks; each event is confirmed.

    A worker's child process may write nothing for hours. Without a confirm, an event that it writes
    to a connection that a broker restart has broken would be lost, and its task would look lost.
    What the broker does not confirm is written again with the next event.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._connection: Any = None
        self._batch: PublishBatch | None = None
        #: The events that the broker has not confirmed.
        self._waiting: deque[str] = deque(maxlen=_MOST)
        self._is_unreachable = self._has_connected = False
        self._rests_until = float("-inf")

    def write(self, app: Any, line: str) -> None:
        """Write an event's line to the journal of an app, with those that wait; log a failure."""
        with self._lock:
            if self._owner != os.getpid():
                # After a fork, the connection and the events are the parent's.
                self._owner, self._connection, self._batch = os.getpid(), None, None
                self._waiting.clear()
            if len(self._waiting) == _MOST:
                warnings.warn(f"the journal misses executed tasks: more than {_MOST} wait for it")
            self._waiting.append(line)
            if time.monotonic() < self._rests_until:
                return
            # In an outage, one task waits for a moment; each further one only looks.
            began = time.monotonic()
            failure = self._try(app)
            was_unreachable = self._is_unreachable
            for pause in () if was_unreachable else _PAUSES:
                if failure is None or time.monotonic() - began > _LONG:
                    break
                time.sleep(pause)
                failure = self._try(app)
            self._is_unreachable = failure is not None
            took = time.monotonic() - began
            if failure is not None and took > (_NOTICED if was_unreachable else _LONG):
                # Connected, and no answer: perhaps an alarm, which may need these tasks to go on.
                rests = _RESTS if self._has_connected else 1
                self._rests_until = time.monotonic() + rests * took
            if failure is not None:
                warnings.warn(
                    f"executed tasks are missing in the journal, until this process executes "
                    f"another one and the broker takes them: {failure}"
                )

    def close(self) -> None:
        """Drop the connection without closing it: the broker may have failed."""
        connection, self._connection, self._batch = self._connection, None, None
        if connection is not None:
            connection.collect()

    def _try(self, app: Any) -> Exception | None:
        self._has_connected = False
        try:
            self._connect(app)
            self._has_connected = True
            self._write()
        except Exception as exc:  # noqa: BLE001 - a task's result must not depend on this
            self.close()
            return exc
        return None

    def _write(self) -> None:
        mechanism = mechanism_of(self._connection.connection)
        journal: Journal | None = mechanism.journal if mechanism else None
        if journal is None:
            self._waiting.clear()
            return
        if journal.folder is not None:
            while self._waiting:
                journal.write(self._waiting[0])
                self._waiting.popleft()
            return
        journal.stream.declare(0 if self._is_unreachable else None)
        if self._batch is None:
            # Not by Kombu, which wraps its channels where KOMBU_LOG_CHANNEL is set.
            self._batch = PublishBatch(self._connection.connection.channel())
        # The first one alone: a broker in an alarm does not read, and many would fill the socket.
        number = 1
        while self._waiting:
            part = list(islice(self._waiting, number))
            message = to_message(part)
            # Mandatory: if the stream was deleted, the broker would drop and confirm it.
            self._batch.publish(message, "", journal.stream.name, mandatory=True, timeout=10)
            self._batch.flush()
            for _ in part:
                self._waiting.popleft()
            number = _PART

    def _connect(self, app: Any) -> None:
        if self._connection is not None:
            return
        connection = self._connection = app.connection_for_write()
        # Try each of its URLs once.
        once = max(len(connection.alt) - 1, 0)
        connection.ensure_connection(max_retries=once, interval_start=0)


def _writer_of(app: Any) -> ConfirmedWriter:
    """Return the writer of an app: a process may have workers of several, each with its broker."""
    # Also of a proxy of the app.
    writer: ConfirmedWriter = vars(app).setdefault("binary_delay_writer", ConfirmedWriter())
    return writer
