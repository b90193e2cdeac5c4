"""An index of the delayed tasks that were read last, in a temporary SQLite file.

The source of tasks is read once for all pages and filters. The file has no name and ends with the
program: it is a cache, not a database that you have to maintain.
"""

from __future__ import annotations

import re
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kombu_binary_delay.operate import Count, Waiters, WaitingTask

_COLUMNS = "id, name, args, kwargs, exchange, key, due, retries, level, source, first_due"
_TABLE = f"create table task ({_COLUMNS}, queue)"
_BY_ID = f"select {_COLUMNS} from task where id = ?"  # noqa: S608 - our own words
_CACHE = 8192  # KiB; the rest is on disk
_BATCH = 1000


@dataclass(frozen=True)
class Filter:
    """Which tasks a page shows: those that match all conditions.

    :param name: a part of the task's name in any case, or a glob pattern such as ``shop.*``.
    :param queue: a glob pattern of the queue, as on the command line; see :func:`exactly`.
    :param id: the beginning of the id.
    :param after: due then or later, in milliseconds since the epoch.
    :param before: due earlier than this, in milliseconds since the epoch.
    """

    name: str = ""
    queue: str = ""
    id: str = ""
    after: int | None = None
    before: int | None = None

    def __bool__(self) -> bool:
        return self != Filter()

    def where(self) -> tuple[str, list[Any]]:
        """Return the condition in SQL, and its values. It excludes tasks that are already due."""
        after = max(self.after or 0, time.time_ns() // 1_000_000)
        conditions: list[str] = ["due >= ?"]
        values: list[Any] = [after]
        if self.name:
            is_pattern = any(each in self.name for each in "*?[")
            conditions.append(
                "coalesce(name, '') glob ?"
                if is_pattern
                else "instr(lower(coalesce(name, '')), lower(?)) > 0"
            )
            values.append(_glob(self.name) if is_pattern else self.name)
        if self.queue:
            conditions.append("queue glob ?")
            values.append(_glob(self.queue))
        if self.id:
            conditions.append("substr(coalesce(id, ''), 1, ?) = ?")
            values += [len(self.id), self.id]
        if self.before is not None:
            conditions.append("due < ?")
            values.append(self.before)
        return " and ".join(conditions), values


def _glob(pattern: str) -> str:
    """Return a pattern as SQLite writes it."""
    return pattern.replace("[!", "[^")


def exactly(queue: str) -> str:
    """Return the pattern of this queue alone; a form keeps no blank at an end of it."""
    return re.sub(r"[*?\[]|\A\s|\s\Z", r"[\g<0>]", queue)


class Index:
    """The tasks of one reading.

    :param hide: whether to leave out the arguments.
    """

    def __init__(self, waiters: Waiters, *, hide: bool) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect("", check_same_thread=False)
        # Pages may still read it when the next index replaces it: it closes after the last of them.
        weakref.finalize(self, self._database.close)
        self._database.execute(f"pragma cache_size = -{_CACHE}")
        self._database.execute("pragma journal_mode = off")
        self._database.execute("pragma synchronous = off")
        self._database.execute(_TABLE)
        marks = ", ".join("?" * 12)
        tasks = iter(waiters)
        while batch := [_row(each, hide=hide) for each in islice(tasks, _BATCH)]:
            self._database.executemany(f"insert into task values ({marks})", batch)  # noqa: S608
        self._database.execute("create index by_due on task (due)")
        self._database.execute("create index by_id on task (id)")
        self.source = waiters.source
        self.complete = waiters.complete
        self.unseen = waiters.unseen()

    def count(self, which: Filter) -> int:
        """Count the tasks that wait."""
        return int(self._select("count(*)", which)[0][0])

    def page(self, which: Filter, limit: int, offset: int = 0) -> list[WaitingTask]:
        """Return a page of the tasks, the earliest due time first."""
        rest = "order by due, rowid limit ? offset ?"
        return [WaitingTask(*row) for row in self._select(_COLUMNS, which, rest, limit, offset)]

    def all_of(self, which: Filter) -> list[WaitingTask]:
        """Return all that match, in no order."""
        return [WaitingTask(*row) for row in self._select(_COLUMNS, which)]

    def by_ids(self, ids: Iterable[str]) -> list[WaitingTask]:
        """Return the tasks with these ids; unknown ids are left out."""
        rows = [row for id_ in ids for row in self._all(_BY_ID, [id_])]
        return [WaitingTask(*row) for row in rows]

    def by_queue(self, limit: int) -> list[Count]:
        """Count the tasks by queue, the most first."""
        rest = "group by queue order by 2 desc, 1 limit ?"
        columns = "queue, count(*), min(due), max(due)"
        return [Count(*row) for row in self._select(columns, Filter(), rest, limit)]

    def histogram(self, start: int, end: int, bins: int) -> list[int]:
        """Return how many tasks are due in each of ``bins`` equal parts of a time.

        :param start: milliseconds since the epoch, as ``end``.
        """
        width = max((end - start) / bins, 1.0)
        which = Filter(after=start, before=end)
        counts = [0] * bins
        place = f"cast((due - {int(start)}) / {float(width)} as integer), count(*)"
        for found, count in self._select(place, which, "group by 1"):
            counts[min(max(found, 0), bins - 1)] += count
        return counts

    def last(self) -> int | None:
        """Return the last due time, in milliseconds since the epoch; None without tasks."""
        found: int | None = self._all("select max(due) from task", [])[0][0]
        return found

    def _select(
        self, columns: str, which: Filter, rest: str = "", *more: int
    ) -> list[tuple[Any, ...]]:
        condition, values = which.where()
        statement = f"select {columns} from task where {condition} {rest}"  # noqa: S608 - our own words
        return self._all(statement, [*values, *more])

    def _all(self, statement: str, values: list[Any]) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._database.execute(statement, values).fetchall()


def _row(task: WaitingTask, *, hide: bool) -> tuple[Any, ...]:
    return (
        _id(task.id),
        _text(task.name),
        None if hide else _text(task.args),
        None if hide else _text(task.kwargs),
        _text(task.exchange),
        _text(task.routing_key),
        task.due,
        task.retries,
        _text(task.level),
        task.source,
        task.first_due,
        _text(task.queue),
    )


def _id(value: str | None) -> str | None:
    """Return an id that a link can name, and an amendment; what stands in for it is another's."""
    return value if _text(value) == value else None


def _text(value: str | None) -> str | None:
    """Return text that SQLite can hold: half a pair of surrogates cannot be encoded."""
    return None if value is None else value.encode("utf-8", "replace").decode()
