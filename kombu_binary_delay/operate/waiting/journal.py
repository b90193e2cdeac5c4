"""List waiting tasks from the journal: those scheduled and not yet delivered, executed or amended.

This reads the journal's stream from the first event to the one that is the last when it begins.
Tasks that may still wait are kept in a temporary database on disk, not in memory. A task whose due
time has passed does not wait any more, even if the journal has no further event, so it is not kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from amqp.exceptions import ChannelError

from kombu_binary_delay.amendments.names import POSTPONED
from kombu_binary_delay.journal import events, stream_name
from kombu_binary_delay.ladder.envelope import HEADERS
from kombu_binary_delay.ladder.recognise import topology_of_name
from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.ladder.versions import why_no_streams
from kombu_binary_delay.operate.errors import OperationError, UnreachableError
from kombu_binary_delay.operate.probe import Probe
from kombu_binary_delay.operate.text import plural
from kombu_binary_delay.wire.streams import StreamError, last_offset, pages

from .table import TaskTable
from .task import JOURNAL, UNJUDGED, Event, Judge, Late, Story, WaitingTask, amend

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
    judge: Judge | None = None,
    *,
    namespace: str | None = None,
) -> TaskTable:
    """Read the waiting tasks from the journal's stream.

    :param connection: a :class:`kombu.Connection`.
    :param topology: the ladder that publishers use, to compute the queue in which a task waits now;
        not known for one on another ladder, or with the setting ``queue_per_delay``.
    :param judge: applies the amendments, see :func:`judge_of`.
    :param namespace: that of the settings, which names the stream, if ``topology`` is the ladder of
        another system.
    :raises OperationError: if there is no such stream, or the temporary database cannot be written.
    :raises UnreachableError: if the broker stops sending.
    """
    return _Journal(connection, topology, judge, namespace).tasks()


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
    journal = _Journal(connection, topology, judge, namespace)
    history: list[Event] = []
    attempt: list[Event] = []
    scheduled, state = None, "unknown"
    for event in journal.events():
        if event.get("id") != task_id:
            continue
        history.append(_event(event))
        if history[-1].kind == events.SCHEDULED:
            scheduled, attempt = event, []
        elif scheduled is not None and not _is_of(event, scheduled):
            # It is of an earlier attempt, or of a message that this one replaces.
            continue
        state = _after(history[-1], state)
        attempt.append(history[-1])
    task, asked = None, None
    levels: tuple[tuple[str, int], ...] = ()
    if scheduled is not None:
        asked, levels = journal.way(scheduled)
        task, amended = journal.judged(_task(scheduled), _note(scheduled))
        if state == "waiting":
            passed = task.due <= time.time_ns() // 1_000_000
            state = amended or ("due" if passed else state)
        if amended and history[-1].kind != amended:
            history.append(Event(amended, None, task.due if amended == POSTPONED else None))
    missing = journal.missing()
    late = Late.of(attempt)
    return Story(task_id, state, JOURNAL, task, tuple(history), missing, asked, levels, late)


def _is_of(event: dict[str, Any], scheduled: dict[str, Any]) -> bool:
    """Whether an event can be of the message that was scheduled: it has its due time, or none."""
    due, other = event.get("due"), scheduled.get("due")
    return due is None or other is None or abs(due - other) < events.ROUNDING


class _Journal:
    """The journal of a namespace."""

    def __init__(
        self, connection: Any, topology: Topology, judge: Judge | None, namespace: str | None
    ) -> None:
        self._connection = connection
        self._topology = topology
        self._judge = judge
        self._invalid = 0
        #: When the oldest event was written, in milliseconds since the epoch; None before reading.
        self._since: int | None = None
        namespace = namespace or topology.namespace
        self._stream = stream_name(namespace)
        if not has_journal(connection, namespace):
            broker = connection.connection
            if why := why_no_streams(broker.server_properties, broker.host):
                raise OperationError(
                    f"there is no journal to read: {why}; programs whose setting journal is a "
                    f"folder record there what waits"
                )
            raise OperationError(
                f"there is no journal {self._stream!r} in this virtual host: "
                f"set journal to 'stream' in the settings of publishers and workers, or read the "
                f"node, with --source node on the broker's host or with --node-command"
            )

    def tasks(self) -> TaskTable:
        """Read it to its end.

        A line that is not an event was written by another program, so it hides no task.
        """
        table = TaskTable(JOURNAL)
        with table.filling():
            for event in self.events():
                self._follow(table, event)
            table.settle(self._settled)
        table.missing = self.missing()
        return table

    def missing(self) -> tuple[str, ...]:
        """Return sentences about what the journal does not have."""
        since = "journal is empty" if self._since is None else f"journal since {_day(self._since)}"
        said = [f"{since}; earlier tasks, and tasks of apps without a journal, are missing"]
        if self._invalid:
            said.append(f"{plural(self._invalid, 'line')} of the journal cannot be read")
        if self._judge is None:
            said.append(UNJUDGED)
        return tuple(said)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield all events, and note when the first was written; count what is no event."""
        self._since, self._invalid = None, 0
        for line in _lines(self._connection, self._stream):
            event = events.from_line(line)
            if event is None:
                self._invalid += 1
                continue
            if self._since is None:
                self._since = _milliseconds(event["at"])
            yield event

    def judged(self, task: WaitingTask, note: str) -> tuple[WaitingTask, str]:
        """Return a task as amended, in the level where it waits now, and how it was amended."""
        at, due, levels, generation = json.loads(note)
        now = time.time_ns() // 1000
        if (passed := self._in_use(levels)) is not None:
            level = level_at(passed, (due - at) / 1000, (now - at) / 1000)
            task = replace(task, level=level)
        if self._judge is None:
            return task, ""
        # Without an id, a message can still be superseded, by its key.
        headers = generation or {}
        if task.name is not None and task.id is not None:
            headers = {"id": task.id, "task": task.name, **headers}
        return amend(task, self._judge({HEADERS: headers, "message_id": task.id}))

    def way(self, scheduled: dict[str, Any]) -> tuple[int, tuple[tuple[str, int], ...]]:
        """Return the delay of a ``scheduled`` event, and when it leaves each queue on its way."""
        at, due = scheduled["at"], scheduled["due"]
        passed, asked = self._in_use(scheduled.get("levels")), max(due - at, 0) / 1000
        waits = [] if passed is None else waits_on(passed, asked)
        begun = _milliseconds(at)
        return round(asked), tuple((queue, begun + until) for queue, until in waits)

    def _settled(self, task: WaitingTask, note: str) -> tuple[WaitingTask, str] | None:
        return None if task.due <= time.time_ns() // 1_000_000 else self.judged(task, note)

    def _in_use(self, levels: str | None) -> Topology | None:
        """Return the ladder with these levels; None if it is not the publishers', or a lane of it.

        What waited on another ladder may have been moved since.
        """
        ladder = self._topology
        named = ladder if levels == ladder.prefix else topology_of_name(f"{levels}.")
        is_in_use = named is not None and replace(named, lane=0, urgent=False) == ladder
        return named if is_in_use else None

    @staticmethod
    def _follow(table: TaskTable, event: dict[str, Any]) -> None:
        """Add the task of an event, or remove it.

        Its due time says which, if the id was scheduled again.
        """
        kind, id_, due = event["event"], event.get("id"), event.get("due")
        if due is None:
            if id_ is not None and kind in _TAKEN_BACK:
                table.remove(id_)
        elif due <= time.time_ns() // 1000:
            # It does not wait any more, so it was not added, or is left out at the end.
            return
        elif kind == events.SCHEDULED:
            table.add(_task(event), note=_note(event))
        elif id_ is not None and kind in (*_GONE, *_TAKEN_BACK):
            table.remove(id_, _milliseconds(due))


def _after(event: Event, state: str) -> str:
    """Return the state of a task after an event."""
    if event.kind == events.EXECUTED and event.state == "REVOKED":
        return "cancelled"
    if event.kind == events.RELEASED and state == "cancelled":
        # It reached a consumer's connection, but was not delivered.
        return state
    return _STATES.get(event.kind, state)


def _task(event: dict[str, Any]) -> WaitingTask:
    """Return the task of a ``scheduled`` event."""
    return WaitingTask(
        event.get("id"),
        event.get("task") or event.get("name"),
        event.get("args"),
        event.get("kwargs"),
        event.get("exchange", ""),
        event.get("key", ""),
        _milliseconds(event["due"]),
        event.get("retries"),
        None,
        JOURNAL,
    )


def _note(event: dict[str, Any]) -> str:
    """Return what else is needed to judge a task: times in microseconds, the ladder, the record."""
    return json.dumps([event["at"], event["due"], event.get("levels"), event.get("generation")])


def _day(milliseconds: int) -> str:
    """Return a time in UTC, without its day if that is today."""
    day, now = time.gmtime(milliseconds / 1000), time.gmtime()
    return time.strftime("%H:%M UTC" if day[:3] == now[:3] else "%Y-%m-%d %H:%M UTC", day)


def _event(event: dict[str, Any]) -> Event:
    exchange, key, due = event.get("exchange"), event.get("key"), event.get("due")
    return Event(
        event["event"],
        _milliseconds(event["at"]),
        None if due is None else _milliseconds(due),
        event.get("retries"),
        f"{exchange}:{key or ''}" if exchange else key,
        event.get("state"),
        None if (left := event.get("left")) is None else _milliseconds(left),
    )


def level_at(topology: Topology, delay: float, passed: float) -> str | None:
    """Return the queue in which a message waits at a time after its publish.

    :param delay: the delay of the message in milliseconds.
    :param passed: the time since the publish in milliseconds.
    :returns: None if it has left the ladder by then, or the ladder cannot hold the delay.
    """
    return next((queue for queue, until in waits_on(topology, delay) if passed < until), None)


def waits_on(topology: Topology, delay: float) -> list[tuple[str, int]]:
    """Return the queues in which a message waits, each with the time after its publish to leave it.

    :param delay: the delay of the message in milliseconds, as the times.
    :returns: an empty list if the ladder cannot hold the delay.
    """
    ladder, until = topology.ladder, 0
    waits: list[tuple[str, int]] = []
    if not 0 <= delay <= ladder.maximum:
        return waits
    digits = ladder.digits(delay)
    for place, digit in enumerate(digits):
        height = len(digits) - 1 - place
        wait = int(digit, 2) * ladder.weights[-1 - height]
        if wait:
            until += wait
            name = topology.level_name(height)
            waits.append((f"{name}.{digit}" if topology.is_ours else name, until))
    return waits


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
            for record in page:
                yield from events.lines(record.body)
            # Programs may write faster than it is read.
            if page[-1].offset >= last:
                return
    except ChannelError as exc:
        raise OperationError(f"the journal {stream!r} cannot be read: {exc}") from exc
    except StreamError as exc:
        raise UnreachableError(f"the journal {stream!r}: {exc}; try again later") from exc
