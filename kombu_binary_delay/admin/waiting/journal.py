"""What waits by the journal: scheduled, less what arrived, was executed, cancelled or postponed.

The journal's stream is read from its first event to its last. What may still wait is kept in a
temporary database on disk, not in memory. A task whose due time has passed waits no longer, whether
or not the journal says where it went: so of what is past, nothing is kept.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import amqp
from amqp.exceptions import NotFound

from kombu_binary_delay.admin.errors import OperationError, UnreachableError
from kombu_binary_delay.admin.probe import Probe
from kombu_binary_delay.journal import events, stream_name
from kombu_binary_delay.model.topology import Topology

from .task import JOURNAL, Event, Selection, WaitingTask, text_of

_PREFETCH = 1000
#: Seconds without an event after which the journal does not answer.
_SILENCE = 20
#: The same in a journal that seems to be empty, and at the end of one, to be taken for the end.
_NEW, _END = 2.0, 0.3
#: SQLite's own memory, in KiB; the rest is on disk.
_CACHE = 8192
_GONE = (events.RELEASED, events.EXECUTED)
_TAKEN_BACK = (events.CANCELLED, events.POSTPONED)

_TABLE = """
create table waiting (
    id text, name text, args text, kwargs text, exchange text, key text, due integer,
    retries integer, at integer, ladder text, hops integer)
"""
_COLUMNS = "id, name, args, kwargs, exchange, key, due, retries, at, ladder, hops"


def has_journal(connection: Any, namespace: str) -> bool:
    """Return whether the stream of a namespace's journal exists.

    :param connection: a :class:`kombu.Connection`.
    """
    with Probe(connection) as probe:
        return probe.has_queue(stream_name(namespace))


def from_journal(
    connection: Any, topology: Topology, select: Selection | None = None
) -> JournalWaiters:
    """Read what waits out of the journal's stream.

    :param connection: a :class:`kombu.Connection`, open while the tasks are read.
    :param topology: the ladder that publishers use, by which the queue is computed in which a task
        waits now.
    :param select: which tasks to return; all, unless it is given.
    :raises OperationError: where there is no such stream.
    """
    return JournalWaiters(connection, topology, select or Selection())


def history(connection: Any, topology: Topology, task_id: str) -> list[Event]:
    """Return all that the journal says of one task, in the order in which it was written.

    :param connection: a :class:`kombu.Connection`.
    :raises OperationError: where there is no such stream.
    """
    found = []
    for event in _events(connection, stream_name(topology.namespace)):
        if event.get("id") != task_id:
            continue
        due, retries = event.get("due"), event.get("retries")
        exchange, key = text_of(event.get("exchange")), text_of(event.get("key"))
        found.append(
            Event(
                str(event.get("event")),
                _milliseconds(event.get("at")) or 0,
                _milliseconds(due),
                retries if type(retries) is int else None,
                f"{exchange}:{key or ''}" if exchange else key,
                text_of(event.get("state")),
            )
        )
    return found


class JournalWaiters:
    """The tasks that wait by the journal; see :class:`~.task.Waiters`."""

    source = JOURNAL

    def __init__(self, connection: Any, topology: Topology, select: Selection) -> None:
        self._connection = connection
        self._topology = topology
        self._select = select
        #: When the oldest event was written, in milliseconds since the epoch; None before reading.
        self.since: int | None = None
        if not has_journal(connection, topology.namespace):
            raise OperationError(
                f"there is no journal {stream_name(topology.namespace)!r} in this virtual host: "
                f"set journal to 'stream' in the settings of publishers and workers; or read the "
                f"node itself, with --source node on the broker's host, or with --node-command"
            )

    def __iter__(self) -> Iterator[WaitingTask]:
        self.since = None
        # Without a name, SQLite keeps it in a file that goes when it is closed.
        with closing(sqlite3.connect("")) as database:
            database.execute(f"pragma cache_size = -{_CACHE}")
            database.execute("pragma journal_mode = off")
            database.execute("pragma synchronous = off")
            database.execute(_TABLE)
            database.execute("create index by_id on waiting (id)")
            self._read(database)
            now = time.time_ns() // 1000
            rows = database.execute(f"select {_COLUMNS} from waiting")  # noqa: S608 - constants
            for row in rows:
                task = self._task(row, now)
                if row[6] > now and self._select.takes(task):
                    yield task

    def unseen(self) -> tuple[str, ...]:
        """Say in sentences what the journal cannot know."""
        said = ["what was published without the journal is not in it"]
        if self.since is not None:
            age = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since / 1000))
            said.append(f"it begins at {age}; what was scheduled before is not in it")
        else:
            said.append("it is empty")
        return tuple(said)

    def _read(self, database: sqlite3.Connection) -> None:
        for event in _events(self._connection, stream_name(self._topology.namespace)):
            at, id_, due = event.get("at"), text_of(event.get("id")), event.get("due")
            kind = event.get("event")
            if self.since is None:
                self.since = _milliseconds(at)
            if kind == events.SCHEDULED:
                self._schedule(database, event)
            elif id_ is None:
                continue
            elif kind in _GONE:
                if type(due) is int and due > time.time_ns() // 1000:
                    database.execute("delete from waiting where id = ? and due = ?", (id_, due))
            elif kind in _TAKEN_BACK:
                # The due time says which, where an id was scheduled anew meanwhile.
                if type(due) is int:
                    database.execute("delete from waiting where id = ? and due = ?", (id_, due))
                else:
                    database.execute("delete from waiting where id = ?", (id_,))

    def _schedule(self, database: sqlite3.Connection, event: dict[str, Any]) -> None:
        due, at = event.get("due"), event.get("at")
        if type(due) is not int or type(at) is not int or due <= time.time_ns() // 1000:
            return
        id_ = text_of(event.get("id"))
        if self._select.ids and id_ not in self._select.ids:
            return
        name = text_of(event.get("task")) or text_of(event.get("name"))
        retries, hops = event.get("retries"), event.get("hops")
        row = (
            id_,
            name,
            text_of(event.get("args")),
            text_of(event.get("kwargs")),
            text_of(event.get("exchange")) or "",
            text_of(event.get("key")) or "",
            due,
            retries if type(retries) is int else None,
            at,
            text_of(event.get("ladder")),
            hops if type(hops) is int else None,
        )
        try:
            database.execute(
                f"insert into waiting ({_COLUMNS}) values ({', '.join('?' * len(row))})",  # noqa: S608 - constants
                row,
            )
        except (OverflowError, UnicodeEncodeError):
            # Nobody who writes a journal writes such a number or text.
            return

    def _task(self, row: tuple[Any, ...], now: int) -> WaitingTask:
        id_, name, args, kwargs, exchange, key, due, retries, at, ladder, _ = row
        level = None
        if ladder == self._topology.ladder.name:
            level = level_at(self._topology, (due - at) / 1000, (now - at) / 1000)
        return WaitingTask(
            id_, name, args, kwargs, exchange, key, -(-due // 1000), retries, level, JOURNAL
        )


def level_at(topology: Topology, delay: float, passed: float) -> str | None:
    """Name the queue in which a message waits some time after it was published.

    :param delay: for which it was published, in milliseconds.
    :param passed: since then, in milliseconds.
    :returns: None where it has left the ladder by then, or there is no such ladder.
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


def _milliseconds(microseconds: object) -> int | None:
    return -(-microseconds // 1000) if type(microseconds) is int else None


def _events(connection: Any, stream: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream, from its first to the one that was its last at the beginning.

    :raises OperationError: where it is no stream, or does not exist.
    :raises UnreachableError: where the broker stops sending it.
    """
    last = _last(connection, stream)
    if last is None:
        return
    with closing(_Reader(connection, stream, "first")) as reader:
        for offset, body in reader:
            try:
                event = json.loads(body)
            except ValueError:
                event = None
            if isinstance(event, dict):
                yield event
            if offset >= last:
                return


def _last(connection: Any, stream: str) -> int | None:
    """Return the offset of the last event of a stream; None where it is empty."""
    with Probe(connection) as probe:
        # The count is some seconds old: a stream that says it is empty may have begun since.
        silence = _SILENCE if probe.ready(stream) else _NEW
    last = None
    # It begins with the chunk that the last event is in.
    with closing(_Reader(connection, stream, "last", silence)) as reader:
        for offset, _ in reader:
            last = offset
            reader.silence = _END
    return last


class _Reader:
    """A consumer of a stream on a channel of its own, page by page.

    :param silence: seconds without an event after which it ends; None for an error then.
    """

    def __init__(
        self, connection: Any, stream: str, offset: str, silence: float | None = None
    ) -> None:
        self.silence = silence
        self._connection = connection.connection
        self._arrived: list[Any] = []
        channel = amqp.Channel(self._connection)
        channel.open()
        self._channel: Any = channel
        channel.basic_qos(0, _PREFETCH, a_global=False)
        try:
            channel.basic_consume(
                stream,
                callback=self._arrived.append,
                arguments={"x-stream-offset": offset},
            )
        except (NotFound, amqp.exceptions.PreconditionFailed) as exc:
            raise OperationError(f"the journal {stream!r} cannot be read: {exc}") from exc

    def __iter__(self) -> Iterator[tuple[int, bytes | str]]:
        acknowledged = 0
        while True:
            try:
                self._connection.drain_events(timeout=self.silence or _SILENCE)
            except TimeoutError:
                if self.silence is None:
                    raise UnreachableError(
                        f"the broker has sent nothing of the journal for {_SILENCE} s"
                    ) from None
                return
            arrived, self._arrived[:] = self._arrived[:], []
            for message in arrived:
                headers = message.properties.get("application_headers") or {}
                yield int(headers.get("x-stream-offset", -1)), message.body
            if arrived and arrived[-1].delivery_tag >= acknowledged + _PREFETCH // 2:
                acknowledged = arrived[-1].delivery_tag
                self._channel.basic_ack(acknowledged, multiple=True)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()
