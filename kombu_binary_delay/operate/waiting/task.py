"""A waiting task as a frozen value; what selects and counts tasks. Pure."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kombu_binary_delay.amendments.names import POSTPONED

JOURNAL, NODE = "journal", "node"
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
        """The task as Python writes its call: ``shop.pay(1, 2, by='card')``."""
        if self.name is None:
            return "(no task)"
        if self.args is None and self.kwargs is None:
            return self.name
        return f"{self.name}({self.arguments})"

    @property
    def arguments(self) -> str:
        """The arguments as Python writes them in a call: ``1, 2, by='card'``."""
        args, kwargs = self.args or "", self.kwargs or ""
        if args[:1] + args[-1:] in ("()", "[]"):
            args = args[1:-1].removesuffix(",")
        return ", ".join(filter(None, (args, _keywords(kwargs))))


@dataclass(frozen=True)
class Selection:
    """Selects the tasks that match all of these conditions.

    :param name: a glob pattern of the task's name, such as ``shop.*``.
    :param queue: a glob pattern of :attr:`WaitingTask.queue`.
    :param ids: any of these ids; empty for every id.
    :param after: due then or later, in milliseconds since the epoch.
    :param before: due earlier than this, in milliseconds since the epoch.
    :param id_begins: how the id begins.
    :param arguments: a part of the arguments, in any case.
    :param loose: whether a ``name`` or ``queue`` that is no pattern matches a part, in any case,
        and one in double quotes exactly.
    """

    name: str | None = None
    queue: str | None = None
    ids: frozenset[str] = frozenset()
    after: int | None = None
    before: int | None = None
    id_begins: str = ""
    arguments: str | None = None
    loose: bool = False


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


#: What a source says that has no amendments.
UNJUDGED = "amendments were not read: what was taken back is listed, too"


@dataclass(frozen=True)
class Event:
    """What happened to one task, as the journal or a record of amendments has it.

    :param kind: ``scheduled``, ``released``, ``executed``, ``cancelled``, ``postponed``.
    :param at: when it was written, in milliseconds since the epoch; None if that is not recorded.
    :param due: milliseconds since the epoch, if the event has it.
    :param state: Celery's state of an ``executed`` task.
    :param left: when it left its last level, to whole seconds, if the event has it.
    """

    kind: str
    at: int | None
    due: int | None = None
    retries: int | None = None
    queue: str | None = None
    state: str | None = None
    left: int | None = None


@dataclass(frozen=True)
class Late:
    """Where the lateness of a task arose, in milliseconds.

    :param broker: until it left the ladder, at least: the broker says that to whole seconds. None
        if it is not known; it is then in ``backlog``.
    :param backlog: from there until a consumer had it: the way to its queue, and what was before it
        there.
    :param worker: from there until it ran; None if it has not.
    """

    broker: int | None
    backlog: int
    worker: int | None = None

    @property
    def total(self) -> int:
        """All of it."""
        return (self.broker or 0) + self.backlog + (self.worker or 0)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Late | None:
        """Return how late a task was, by the events of one attempt; None if it has not arrived."""
        at = {event.kind: event for event in events}
        arrived, ran = at.get("released"), at.get("executed")
        if arrived is None or arrived.at is None or arrived.due is None:
            return None
        broker = None if arrived.left is None else max(arrived.left - arrived.due, 0)
        backlog = max(arrived.at - arrived.due - (broker or 0), 0)
        worker = None
        if ran is not None and ran.at is not None:
            worker = max(ran.at - arrived.at, 0)
        return cls(broker, backlog, worker)


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
    :param asked: the delay of the last attempt in milliseconds; None if not known.
    :param levels: the queues in which it waits, each with when it leaves it, in milliseconds since
        the epoch; empty if not known.
    :param late: where its lateness arose; None if nothing says that it has arrived.
    """

    id: str
    state: str
    source: str
    task: WaitingTask | None = None
    events: tuple[Event, ...] = ()
    unseen: tuple[str, ...] = ()
    asked: int | None = None
    levels: tuple[tuple[str, int], ...] = ()
    late: Late | None = None

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


def _keywords(kwargs: str) -> str:
    """Return the text of a mapping as keywords; as ``**`` and the text if it was cut off."""
    try:
        mapping = ast.parse(kwargs, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        mapping = None
    if not isinstance(mapping, ast.Dict):
        return f"**{kwargs}" if kwargs else ""
    words = []
    for key, value in zip(mapping.keys, mapping.values, strict=True):
        name = key.value if isinstance(key, ast.Constant) else None
        if not isinstance(name, str) or not name.isidentifier():
            return f"**{kwargs}"
        words.append(f"{name}={ast.get_source_segment(kwargs, value)}")
    return ", ".join(words)


def text_of(value: Any) -> str | None:
    """Return the value of a header if it is text; otherwise None."""
    return value if isinstance(value, str) else None
