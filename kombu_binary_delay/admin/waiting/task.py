"""A waiting task as a frozen value; which of them are asked for; sorted and counted. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from heapq import nsmallest
from typing import Any, Protocol

JOURNAL, NODE = "journal", "node"
#: Of a task that was amended, the one kind that is still to run.
POSTPONED = "postponed"
#: What tasks can be counted by.
COUNTED = ("name", "queue")


@dataclass(frozen=True)
class WaitingTask:
    """A task, or another message, that waits.

    :param id: Celery's id of the task; of another message its ``message_id`` or
        ``correlation_id``, if it has one.
    :param name: of the task; None for another message.
    :param args: its arguments, as Celery's ``argsrepr`` has them; None where that is not known.
    :param kwargs: the same of ``kwargsrepr``.
    :param exchange: where it goes; ``""`` is the default exchange.
    :param routing_key: the key that it goes with; on the default exchange a queue's name.
    :param due: milliseconds since the epoch.
    :param retries: Celery's count; None where it is not known.
    :param level: the queue in which it waits now; None where that is not known.
    :param source: ``"journal"`` or ``"node"``.
    """

    id: str | None
    name: str | None
    args: str | None
    kwargs: str | None
    exchange: str
    routing_key: str
    due: int
    retries: int | None
    level: str | None
    source: str

    @property
    def queue(self) -> str:
        """The destination in a word: a queue's name, or ``exchange:routing key``."""
        return f"{self.exchange}:{self.routing_key}" if self.exchange else self.routing_key


@dataclass(frozen=True)
class Selection:
    """Which tasks are asked for: those that have all of this.

    :param name: a glob pattern of the task's name, as ``shop.*``.
    :param queue: a glob pattern of :attr:`WaitingTask.queue`.
    :param ids: any of these; none of them for every id.
    :param after: due then or later, in milliseconds since the epoch.
    :param before: due earlier than this, in milliseconds since the epoch.
    """

    name: str | None = None
    queue: str | None = None
    ids: frozenset[str] = frozenset()
    after: int | None = None
    before: int | None = None

    def takes(self, task: WaitingTask) -> bool:
        """Whether a task is among those that are asked for."""
        return (
            (not self.ids or task.id in self.ids)
            and (self.after is None or task.due >= self.after)
            and (self.before is None or task.due < self.before)
            and (self.name is None or fnmatchcase(task.name or "", self.name))
            and (self.queue is None or fnmatchcase(task.queue, self.queue))
        )


#: Returns what becomes of a message with these properties, as a ``Verdict`` of the amendments; None
#: where it was not amended.
Judge = Callable[[Mapping[str, Any]], Any]


def amend(task: WaitingTask, verdict: Any) -> tuple[WaitingTask, str]:
    """Return a task as it was amended, and in which way; an empty word where it was not."""
    if verdict is None:
        return task, ""
    if verdict.reason == POSTPONED:
        return replace(task, due=max(task.due, verdict.due)), POSTPONED
    return task, verdict.reason


def taken_back(count: int) -> str:
    """Say how many are not listed although they wait."""
    return f"{count} more wait that are cancelled or superseded, and will not run"


class Waiters(Protocol):
    """The waiting tasks of one source, each once, in no order; but not those that were taken back.

    To iterate reads the source; each iteration reads it anew.
    """

    source: str

    def __iter__(self) -> Iterator[WaitingTask]: ...

    @property
    def complete(self) -> bool:
        """Whether the last iteration has read all that the source has."""
        ...

    def unseen(self) -> tuple[str, ...]:
        """Say in sentences what this source cannot see; after an iteration, also what it missed."""
        ...


@dataclass(frozen=True)
class Event:
    """What the journal says of one task at one time.

    :param kind: ``scheduled``, ``released``, ``executed``, ``cancelled``, ``postponed``.
    :param at: when it was written, in milliseconds since the epoch.
    :param due: milliseconds since the epoch, where the event says it.
    :param state: Celery's, of an ``executed`` task.
    """

    kind: str
    at: int
    due: int | None = None
    retries: int | None = None
    queue: str | None = None
    state: str | None = None


@dataclass(frozen=True)
class Story:
    """What is known of one task.

    :param state: ``waiting``; ``due``, where it is past its due time and nobody has told what
        became of it; ``arrived`` at a consumer; ``executed``; ``cancelled``; ``superseded`` by a
        later one; ``postponed``; ``unknown``.
    :param task: as it waits, or as it was last scheduled; None where that is not known.
    :param events: what the journal says, in order.
    """

    id: str
    state: str
    source: str
    task: WaitingTask | None = None
    events: tuple[Event, ...] = ()
    unseen: tuple[str, ...] = ()


@dataclass(frozen=True)
class Count:
    """How many tasks share a name or a queue; ``first`` and ``last`` are due times in ms."""

    value: str
    tasks: int
    first: int
    last: int


def earliest(tasks: Iterable[WaitingTask], limit: int) -> list[WaitingTask]:
    """Return the tasks that are due first, in order, holding no more than ``limit`` of them."""
    return nsmallest(limit, tasks, key=lambda task: task.due)


def count_by(tasks: Iterable[WaitingTask], what: str) -> list[Count]:
    """Count tasks by name or by queue, the most first.

    :param what: ``"name"`` or ``"queue"``; what is no task has the name ``""``.
    """
    counts: dict[str, list[int]] = {}
    for task in tasks:
        value = (task.name or "") if what == "name" else task.queue
        found = counts.setdefault(value, [0, task.due, task.due])
        found[0] += 1
        found[1] = min(found[1], task.due)
        found[2] = max(found[2], task.due)
    listed = [Count(value, *numbers) for value, numbers in counts.items()]
    return sorted(listed, key=lambda each: (-each.tasks, each.value))


@dataclass
class Tally:
    """Count what passes, for those who are shown only a part of it."""

    tasks: Iterable[WaitingTask]
    count: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[WaitingTask]:
        for task in self.tasks:
            self.count += 1
            yield task


def text_of(value: Any) -> str | None:
    """Return what a header says if it is text, and None for anything else."""
    return value if isinstance(value, str) else None
