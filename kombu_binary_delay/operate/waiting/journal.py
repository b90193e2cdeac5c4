"""List waiting tasks from the journal: those scheduled and not yet delivered, executed or amended.

This reads the journal's stream from the first event to the one that is the last when it begins.
Tasks that may still wait are kept in a temporary database on disk, not in memory. A task whose due
time has passed does not wait any more, even if the journal has no further event, so it is not kept.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from amqp.exceptions import ChannelError

from kombu_binary_delay.journal import events, stream_name
from kombu_binary_delay.ladder.envelope import HEADERS
from kombu_binary_delay.ladder.recognise import topology_of_name
from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.operate.errors import OperationError, UnreachableError
from kombu_binary_delay.operate.probe import Probe
from kombu_binary_delay.wire.streams import StreamError, last_offset, pages

from .task import (
    JOURNAL,
    POSTPONED,
    UNJUDGED,
    Event,
    Judge,
    Selection,
    Story,
    Waiters,
    WaitingTask,
    amend,
    taken_back,
)

#: SQLite's own memory, in KiB; the rest is on disk.
_CACHE = 8192
_GONE = (events.RELEASED, events.EXECUTED)
_TAKEN_BACK = (events.CANCELLED, events.POSTPONED)

#: The state of a task after an event.
_STATES = {
    events.SCHEDULED: "waiting",
    events.RELEASED: "arrived",
    events.EXECUTED: "executed",
    events.CANCELLED: "cancelled",
    events.POSTPONED: "postponed",
}
_TABLE = """
create table waiting (
    id, name, args, kwargs, exchange, key, due, retries, at, levels, generation)
"""
_INSERT = "insert into waiting values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


def has_journal(connection: Any, namespace: str) -> bool:
    """Return whether the stream of a namespace's journal exists.

    :param connection: a :class:`kombu.Connection`.
    """
    with Probe(connection) as probe:
        return probe.has_stream(stream_name(namespace))


def judge_of(connection: Any) -> Judge:
    """Read the amendments, and return a function that applies them to messages.

    Called again for the same connection, it reads only what was amended since.

    :param connection: a :class:`kombu.Connection` with our transport, open while it is used.
    """
    reader = connection.connection.delay_mechanism.amendments.reader
    reader.refresh()
    judge: Judge = reader.fate
    return judge


def from_journal(
    connection: Any,
    topology: Topology,
    select: Selection | None = None,
    judge: Judge | None = None,
    *,
    namespace: str | None = None,
) -> Waiters:
    """Return the waiting tasks from the journal's stream.

    :param connection: a :class:`kombu.Connection`, open while the tasks are read.
    :param topology: the ladder that publishers use, to compute the queue in which a task waits now;
        not known for one on another ladder, or with the setting ``queue_per_delay``.
    :param select: which tasks to return; by default all.
    :param judge: applies the amendments, see :func:`judge_of`.
    :param namespace: that of the settings, which names the stream, if ``topology`` is the ladder of
        another system.
    :raises OperationError: if there is no such stream; when read, if the temporary database cannot
        be written.
    """
    return JournalWaiters(connection, topology, select or Selection(), judge, namespace)


def story_by_journal(
    connection: Any,
    topology: Topology,
    task_id: str,
    judge: Judge | None = None,
    *,
    namespace: str | None = None,
) -> Story:
    """Return what the journal knows of one task; the parameters are those of ``from_journal``.

    The state is that of the task as it was scheduled last; an earlier attempt may have ended since.

    :raises OperationError: if there is no journal.
    """
    waiters = JournalWaiters(connection, topology, Selection(), judge, namespace)
    told, scheduled, state = [], None, "unknown"
    for event in waiters.events():
        if event.get("id") != task_id:
            continue
        told.append(_event(event))
        if told[-1].kind == events.SCHEDULED:
            scheduled = event
        elif scheduled is not None and not _is_of(event, scheduled):
            # It is of an earlier attempt, or of a message that this one replaces.
            continue
        state = _after(told[-1], state)
    task = None
    if scheduled is not None:
        task, amended = waiters.task(_row(scheduled), time.time_ns() // 1000)
        if state == "waiting":
            passed = task.due <= time.time_ns() // 1_000_000
            state = amended or ("due" if passed else state)
    return Story(task_id, state, JOURNAL, task, tuple(told), waiters.unseen())


def _is_of(event: dict[str, Any], scheduled: dict[str, Any]) -> bool:
    """Whether an event can be of the message that was scheduled: it has its due time, or none."""
    due, other = event.get("due"), scheduled.get("due")
    return due is None or other is None or abs(due - other) < events.ROUNDING


class JournalWaiters:
    """The waiting tasks from the journal; see :class:`~.task.Waiters`."""

    source = JOURNAL
    #: The journal is read to its end, or an error is raised. A line that is not an event was
    #: written by another program, so it hides no task.
    complete = True

    def __init__(
        self,
        connection: Any,
        topology: Topology,
        select: Selection,
        judge: Judge | None,
        namespace: str | None,
    ) -> None:
        self._connection = connection
        self._topology = topology
        self._select = select
        self._judge = judge
        self._taken_back = self._invalid = 0
        #: When the oldest event was written, in milliseconds since the epoch; None before reading.
        self.since: int | None = None
        namespace = namespace or topology.namespace
        self._stream = stream_name(namespace)
        if not has_journal(connection, namespace):
            raise OperationError(
                f"there is no journal {self._stream!r} in this virtual host: "
                f"set journal to 'stream' in the settings of publishers and workers, or read the "
                f"node, with --source node on the broker's host or with --node-command"
            )

    def __iter__(self) -> Iterator[WaitingTask]:
        self._taken_back = 0
        # Without a name, SQLite uses a temporary file that it deletes at the close.
        with _disk_errors(), closing(sqlite3.connect("")) as database:
            database.execute(f"pragma cache_size = -{_CACHE}")
            database.execute("pragma journal_mode = off")
            database.execute("pragma synchronous = off")
            database.execute(_TABLE)
            database.execute("create index by_id on waiting (id)")
            self._read(database)
            now = time.time_ns() // 1000
            for stored in database.execute("select * from waiting"):
                row = tuple(map(_loaded, stored))
                task, amended = self.task(row, now)
                if row[6] <= now or not self._select.takes(task):
                    continue
                if amended in ("", POSTPONED):
                    yield task
                else:
                    self._taken_back += 1

    def unseen(self) -> tuple[str, ...]:
        """Return sentences about what the journal does not have."""
        said = ["what was published without the journal is not in it"]
        if self.since is not None:
            age = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since / 1000))
            said.append(f"it begins at {age}; what was scheduled before is not in it")
        else:
            said.append("it is empty")
        if self._invalid:
            lines = "1 line" if self._invalid == 1 else f"{self._invalid:,} lines"
            said.append(f"{lines} of the journal cannot be read")
        if self._judge is None:
            said.append(UNJUDGED)
        if self._taken_back:
            said.append(taken_back(self._taken_back))
        return tuple(said)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield all events, and set :attr:`since` from the first; count what is no event."""
        self.since, self._invalid = None, 0
        for line in _lines(self._connection, self._stream):
            event = events.from_line(line)
            if event is None:
                self._invalid += 1
                continue
            if self.since is None:
                self.since = _milliseconds(event["at"])
            yield event

    def task(self, row: tuple[Any, ...], now: int) -> tuple[WaitingTask, str]:
        """Return the waiting task of a row, and how it was amended.

        :param now: microseconds since the epoch.
        """
        id_, name, args, kwargs, exchange, key, due, retries, at, levels, generation = row
        level = None
        if (passed := self._in_use(levels)) is not None:
            level = level_at(passed, (due - at) / 1000, (now - at) / 1000)
        task = WaitingTask(
            id_, name, args, kwargs, exchange, key, -(-due // 1000), retries, level, JOURNAL
        )
        if self._judge is None:
            return task, ""
        # Without an id, a message can still be superseded, by its key.
        headers = json.loads(generation) if generation else {}
        if name is not None and id_ is not None:
            headers = {"id": id_, "task": name, **headers}
        return amend(task, self._judge({HEADERS: headers, "message_id": id_}))

    def _in_use(self, levels: str | None) -> Topology | None:
        """Return the ladder with these levels; None if it is not the publishers', or a lane of it.

        What waited on another ladder may have been moved since.
        """
        ladder = self._topology
        found = ladder if levels == ladder.prefix else topology_of_name(f"{levels}.")
        is_in_use = found is not None and replace(found, lane=0, urgent=False) == ladder
        return found if is_in_use else None

    def _read(self, database: sqlite3.Connection) -> None:
        for event in self.events():
            kind = event["event"]
            if kind == events.SCHEDULED:
                self._schedule(database, event)
            elif kind in _GONE or kind in _TAKEN_BACK:
                self._remove(database, event)

    def _schedule(self, database: sqlite3.Connection, event: dict[str, Any]) -> None:
        row = _row(event)
        if row[6] <= time.time_ns() // 1000:
            return
        if self._select.ids and row[0] not in self._select.ids:
            return
        database.execute(_INSERT, tuple(map(_stored, row)))

    @staticmethod
    def _remove(database: sqlite3.Connection, event: dict[str, Any]) -> None:
        """Remove the task of an event; its due time says which, if the id was scheduled again."""
        id_, due = _stored(event.get("id")), event.get("due")
        if id_ is None:
            return
        if due is None and event["event"] in _TAKEN_BACK:
            database.execute("delete from waiting where id = ?", (id_,))
        elif due is not None and due > time.time_ns() // 1000:
            database.execute("delete from waiting where id = ? and due = ?", (id_, due))


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Say what is wrong with the temporary database.

    :raises OperationError: for any error of it.
    """
    try:
        yield
    except sqlite3.OperationalError as exc:
        raise OperationError(
            f"the temporary database of what waits cannot be written: {exc}; free some space, or "
            f"name another folder in SQLITE_TMPDIR"
        ) from exc


def _after(event: Event, state: str) -> str:
    """Return the state of a task after an event."""
    if event.kind == events.EXECUTED and event.state == "REVOKED":
        return "cancelled"
    if event.kind == events.RELEASED and state == "cancelled":
        # It reached a consumer's connection, but was not delivered.
        return state
    return _STATES.get(event.kind, state)


def _row(event: dict[str, Any]) -> tuple[Any, ...]:
    """Return the row of a ``scheduled`` event."""
    generation = event.get("generation")
    return (
        event.get("id"),
        event.get("task") or event.get("name"),
        event.get("args"),
        event.get("kwargs"),
        event.get("exchange", ""),
        event.get("key", ""),
        event["due"],
        event.get("retries"),
        event["at"],
        event.get("levels"),
        None if generation is None else json.dumps(generation),
    )


def _stored(value: Any) -> Any:
    """Return a value as SQLite keeps it: a name with half a pair of surrogates is no text there."""
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value


def _loaded(value: Any) -> Any:
    """Return a value that :func:`_stored` wrote."""
    return value.decode("utf-8", "surrogatepass") if isinstance(value, bytes) else value


def _event(event: dict[str, Any]) -> Event:
    exchange, key, due = event.get("exchange"), event.get("key"), event.get("due")
    return Event(
        event["event"],
        _milliseconds(event["at"]),
        None if due is None else _milliseconds(due),
        event.get("retries"),
        f"{exchange}:{key or ''}" if exchange else key,
        event.get("state"),
    )


def level_at(topology: Topology, delay: float, passed: float) -> str | None:
    """Return the queue in which a message waits at a time after its publish.

    :param delay: the delay of the message in milliseconds.
    :param passed: the time since the publish in milliseconds.
    :returns: None if it has left the ladder by then, or the ladder cannot hold the delay.
    """
    ladder = topology.ladder
    if not 0 <= delay <= ladder.maximum:
        return None
    digits = ladder.digits(delay)
    for place, digit in enumerate(digits):
        value = int(digit, 2)
        height = len(digits) - 1 - place
        passed -= value * ladder.weights[-1 - height]
        if passed < 0:
            name = topology.level_name(height)
            return f"{name}.{digit}" if topology.mirrors else name
    return None


def _milliseconds(microseconds: int) -> int:
    return -(-microseconds // 1000)


def _lines(connection: Any, stream: str) -> Iterator[bytes | str]:
    """Yield the lines of a stream, from the first to the one that is the last at the start.

    :raises OperationError: if it is not a stream, or does not exist.
    :raises UnreachableError: if the broker stops sending.
    """
    py_amqp = connection.connection
    try:
        last = last_offset(py_amqp, stream)
        if last is None:
            return
        for page in pages(py_amqp, stream):
            for event in page:
                yield event.body
            # Programs may write faster than it is read.
            if page[-1].offset >= last:
                return
    except ChannelError as exc:
        raise OperationError(f"the journal {stream!r} cannot be read: {exc}") from exc
    except StreamError as exc:
        raise UnreachableError(f"the journal {stream!r}: {exc}; try again later") from exc
