"""What a broker says of schedules, on any connection to it: how far each has come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import amqp
from amqp.exceptions import NotFound

from kombu_binary_delay.wire import streams

from . import definitions, series
from .definitions import Definitions, Schedule
from .series import OVERDUE, Progress, expected

#: Where a schedule stands.
WAITING, OVERDUE_NOW, PAUSED = "waiting", "overdue", "paused"
_DEFINITIONS = ".definitions"
_Read = TypeVar("_Read")


class Names:
    """The names of what an app's schedules are on the broker.

    :param app: the name of the app, its ``main``.
    """

    def __init__(self, namespace: str, app: str | None) -> None:
        self.app = app or "celery"
        #: Of the queue of occurrences.
        self.queue = f"{namespace}.schedules.{self.app}"
        self.definitions = f"{self.queue}{_DEFINITIONS}"
        self.progress = f"{self.queue}.progress"
        self.lock = f"{self.queue}.lock"

    def running(self, schedule: str) -> str:
        """Return the name of the exclusive queue that exists while a run of a schedule does."""
        return f"{self.queue}.running.{schedule}"


def names_among(namespace: str, queues: Iterable[str]) -> list[Names]:
    """Return the names of all apps that have schedules, by the names of a broker's queues."""
    begin = f"{namespace}.schedules."
    queues_of_apps = (q for q in queues if q.startswith(begin) and q.endswith(_DEFINITIONS))
    return [Names(namespace, q[len(begin) : -len(_DEFINITIONS)]) for q in sorted(queues_of_apps)]


@dataclass(frozen=True)
class Listed:
    """A schedule as it stands. Times are milliseconds since the epoch.

    :param when: in words.
    :param state: ``waiting``; ``overdue``, if its occurrence is ten seconds late; or ``paused``.
    :param next_due: None if it is paused.
    :param last_due: of the last run; None if there is none. Some seconds old, as the next three.
    :param last_sent: when that was sent.
    :param missed: how many occurrences were found too late, and left out.
    :param skipped: how many were left out, since the one before still ran.
    :param queue: where its occurrence waits for a worker when it is due.
    """

    name: str
    task: str
    when: str
    state: str
    next_due: int | None
    last_due: int | None
    last_sent: int | None
    missed: int
    skipped: int
    catch_up: int
    overlap: str
    queue: str


@dataclass(frozen=True)
class Schedules:
    """An app's schedules as they stand.

    :param workers: how many workers could send their runs; None if the queue does not exist.
    """

    app: str
    schedules: tuple[Listed, ...]
    workers: int | None

    @property
    def overdue(self) -> list[Listed]:
        """Those whose occurrence is ten seconds late."""
        return [schedule for schedule in self.schedules if schedule.state == OVERDUE_NOW]


def listing(connection: Any, names: Names) -> Schedules:
    """Return an app's schedules as they stand.

    :param connection: of py-amqp.
    """
    defined = read_definitions(connection, names) or {}
    progress = read_progress(connection, names) if defined else {}
    now = time.time_ns() // 1_000_000
    rows = (
        _listed(schedule, progress.get(name, Progress()), names.queue, now)
        for name, schedule in sorted(defined.items())
    )
    return Schedules(names.app, tuple(rows), _workers(connection, names.queue))


def _listed(schedule: Schedule, progress: Progress, queue: str, now: int) -> Listed:
    due = expected(schedule, progress.due)
    state = WAITING
    if due is None:
        state = PAUSED
    elif now > due + OVERDUE:
        state = OVERDUE_NOW
    return Listed(
        schedule.name,
        schedule.task,
        str(schedule.when),
        state,
        due,
        progress.due or None,
        progress.at or None,
        progress.missed,
        progress.skipped,
        schedule.catch_up,
        schedule.overlap,
        queue,
    )


def _workers(connection: Any, queue: str) -> int | None:
    channel = amqp.Channel(connection)
    channel.open()
    try:
        return int(channel.queue_declare(queue, passive=True).consumer_count)
    except NotFound:
        return None
    finally:
        if channel.is_open:
            channel.close()


def read_definitions(connection: Any, names: Names) -> Definitions | None:
    """Return an app's schedules; None if there never were any."""
    return last(connection, names.definitions, definitions.from_line)


def read_progress(connection: Any, names: Names) -> dict[str, Progress]:
    """Return how far each schedule has come."""
    return last(connection, names.progress, series.from_line) or {}


def count(connection: Any, stream: str) -> int | None:
    """Return how many records a stream has, about; None if it does not exist."""
    try:
        return streams.count(connection, stream) or 0
    except NotFound:
        return None


def last(connection: Any, stream: str, read: Callable[[bytes], _Read | None]) -> _Read | None:
    """Return what the last record of a stream says that can be read; None if there is none."""
    if count(connection, stream) is None:
        return None
    # The last few may be of somebody else.
    for begin in ("last", "first"):
        latest: _Read | None = None
        is_empty = True
        for page in streams.pages(connection, stream, begin):
            is_empty = False
            for record in page:
                value = read(bytes(record.body))
                latest = latest if value is None else value
        if is_empty or latest is not None:
            return latest
    return None
