"""A waiting task as a frozen value; selecting, sorting and counting tasks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from heapq import nsmallest
from typing import Any, Protocol

JOURNAL, NODE = "journal", "node"
#: The only amendment after which a task still runs.
POSTPONED = "postponed"
#: The fields to count tasks by.
COUNTED = ("name", "queue")


@dataclass(frozen=True)
class WaitingTask:
    """A task, or another message, that waits.

    :param id: the id by which it can be cancelled: Celery's task id; for another message its
        ``message_id`` or, of a request that has ``reply_to``, its ``correlation_id``. None if it
        has none.
    :param name: of the task; None for another message.
    :param args: the arguments, as in Celery's ``argsrepr``; None if not known.
    :param kwargs: the same from ``kwargsrepr``.
    :param exchange: of the destination; ``""`` is the default exchange.
    :param routing_key: of the destination; on the default exchange a queue's name.
    :param due: milliseconds since the epoch.
    :param retries: Celery's count; None if not known.
    :param level: the queue in which it waits now; None if not known.
    :param source: ``"journal"`` or ``"node"``.
    :param first_due: when it is delayed again, if it is postponed from then to ``due``; otherwise
        None.
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
    first_due: int | None = None

    @property
    def queue(self) -> str:
        """The destination as text: a queue's name, or ``exchange:routing key``."""
        return f"{self.exchange}:{self.routing_key}" if self.exchange else self.routing_key

    @property
    def call(self) -> str:
        """The task as the text of its call: ``shop.pay(1, 2) {'by': 'card'}``."""
        if self.name is None:
            return "(no task)"
        kwargs = f" {self.kwargs}" if self.kwargs not in (None, "{}") else ""
        return f"{self.name}{self.args or ''}{kwargs}"


@dataclass(frozen=True)
class Selection:
    """Selects the tasks that match all of these conditions.

    :param name: a glob pattern of the task's name, such as ``shop.*``.
    :param queue: a glob pattern of :attr:`WaitingTask.queue`.
    :param ids: any of these ids; empty for every id.
    :param after: due then or later, in milliseconds since the epoch.
    :param before: due earlier than this, in milliseconds since the epoch.
    """

    name: str | None = None
    queue: str | None = None
    ids: frozenset[str] = frozenset()
    after: int | None = None
    before: int | None = None

    def takes(self, task: WaitingTask) -> bool:
        """Whether a task matches."""
        return (
            (not self.ids or task.id in self.ids)
            and (self.after is None or task.due >= self.after)
            and (self.before is None or task.due < self.before)
            and (self.name is None or fnmatchcase(task.name or "", self.name))
            and (self.queue is None or fnmatchcase(task.queue, self.queue))
        )


#: Returns what happens to a message with these properties, as a ``Fate`` of the amendments; None
#: if it was not amended.
Judge = Callable[[Mapping[str, Any]], Any]


def amend(task: WaitingTask, fate: Any) -> tuple[WaitingTask, str]:
    """Return a task as amended, and how it was amended; an empty string if it was not."""
    if fate is None:
        return task, ""
    if fate.reason == POSTPONED:
        due = max(task.due, fate.due)
        return replace(task, due=due, first_due=task.due), POSTPONED
    return task, fate.reason


def taken_back(count: int) -> str:
    """Return a sentence with the number of waiting tasks that are not listed."""
    if count == 1:
        return "1 cancelled or superseded task is not shown; it will not run"
    return f"{count} cancelled or superseded tasks are not shown; they will not run"


#: What a source says that has no amendments.
UNJUDGED = "amendments were not read: what was taken back is listed, too"


class Waiters(Protocol):
    """The waiting tasks of one source, in no order, without cancelled and superseded ones.

    Each iteration reads the source again.
    """

    source: str

    def __iter__(self) -> Iterator[WaitingTask]: ...

    @property
    def complete(self) -> bool:
        """Whether the last iteration has read all that the source has."""
        ...

    def unseen(self) -> tuple[str, ...]:
        """Return sentences about what this source cannot see and what the last iteration missed."""
        ...


@dataclass(frozen=True)
class Event:
    """An event of one task in the journal.

    :param kind: ``scheduled``, ``released``, ``executed``, ``cancelled``, ``postponed``.
    :param at: when it was written, in milliseconds since the epoch.
    :param due: milliseconds since the epoch, if the event has it.
    :param state: Celery's state of an ``executed`` task.
    """

    kind: str
    at: int
    due: int | None = None
    retries: int | None = None
    queue: str | None = None
    state: str | None = None


_WORDS = {
    "waiting": "waits",
    "due": "is due; nothing says what became of it",
    "arrived": "has arrived at a consumer",
    "executed": "was executed",
    "cancelled": "is cancelled and will not run",
    "superseded": "is superseded by a later one and will not run",
    "postponed": "is postponed",
    "unknown": "is not known",
}


@dataclass(frozen=True)
class Story:
    """What is known of one task.

    :param state: ``waiting``; ``due`` if its due time has passed without a further event;
        ``arrived`` at a consumer; ``executed``; ``cancelled``; ``superseded`` by a later one;
        ``postponed``; ``unknown``.
    :param task: as it waits, or as it was last scheduled; None if not known.
    :param events: the journal's events, in order.
    """

    id: str
    state: str
    source: str
    task: WaitingTask | None = None
    events: tuple[Event, ...] = ()
    unseen: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The state in words, to follow "It"."""
        return _WORDS.get(self.state, self.state)


@dataclass(frozen=True)
class Count:
    """The number of tasks with a name or a queue; ``first`` and ``last`` are due times in ms."""

    value: str
    tasks: int
    first: int
    last: int


def earliest(tasks: Iterable[WaitingTask], limit: int) -> list[WaitingTask]:
    """Return the ``limit`` tasks that are due first, in order; no more of them are in memory."""
    return nsmallest(limit, tasks, key=lambda task: task.due)


def count_by(tasks: Iterable[WaitingTask], what: str) -> list[Count]:
    """Count tasks by name or by queue, the most first.

    :param what: ``"name"`` or ``"queue"``; a message that is not a task has the name ``""``.
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
    """Counts the tasks that pass through, when only a part is shown."""

    tasks: Iterable[WaitingTask]
    count: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[WaitingTask]:
        for task in self.tasks:
            self.count += 1
            yield task


def text_of(value: Any) -> str | None:
    """Return the value of a header if it is text; otherwise None."""
    return value if isinstance(value, str) else None
