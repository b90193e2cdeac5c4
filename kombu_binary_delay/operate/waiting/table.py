"""The one table of waiting tasks: what a source has shown, in a temporary SQLite file.

The terminal, the pages and what amends tasks search and count here. The file has no name and is
deleted with its table: it is a cache, not a database that you have to maintain.
"""

from __future__ import annotations

import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from operator import attrgetter
from typing import Any

from kombu_binary_delay.amendments.names import POSTPONED
from kombu_binary_delay.operate.errors import OperationError

from .task import COUNTED, Count, Selection, WaitingTask

#: SQLite's own memory, in KiB; the rest is on disk.
_CACHE = 8192
_BATCH = 1000
_FIELDS = tuple(field.name for field in fields(WaitingTask))
_COLUMNS = ", ".join(_FIELDS)
_values = attrgetter(*_FIELDS, "queue")
#: ``amended`` says how a task was amended, and ``note`` is what :meth:`TaskTable.settle` passes on.
_TABLE = f"create table task ({_COLUMNS}, queue, amended, note)"
_INSERT = f"insert into task values ({', '.join('?' * (len(_FIELDS) + 3))})"  # noqa: S608 - our own words
_SET = ", ".join(f"{name} = ?" for name in (*_FIELDS, "queue", "amended"))
#: The tasks that will run.
_VALID = f"amended in ('', '{POSTPONED}')"
ALL = Selection()

#: Returns a task and how it was amended, for a task with its note; None for one that is over.
Settle = Callable[[WaitingTask, Any], "tuple[WaitingTask, str] | None"]


class TaskTable:
    """The tasks of one reading of a source. Several threads may read it.

    :param source: ``"journal"`` or ``"node"``.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        #: Whether all that the source has was read.
        self.complete = True
        #: Sentences about what the source cannot see, and what was not read.
        self.missing: tuple[str, ...] = ()
        self._lock = threading.Lock()
        # Without a name, SQLite uses a temporary file that it deletes at the close.
        self._database = sqlite3.connect("", check_same_thread=False)
        weakref.finalize(self, self._database.close)
        self._database.execute(f"pragma cache_size = -{_CACHE}")
        self._database.execute("pragma journal_mode = off")
        self._database.execute("pragma synchronous = off")
        self._database.execute(_TABLE)

    # -- filling it ----------------------------------------------------------------------------

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Take the tasks of a source, and make what is searched fast.

        :raises OperationError: if the file cannot be written.
        """
        try:
            self._database.execute("create index by_id on task (id)")
            yield
            self._database.execute("create index by_due on task (due)")
        except sqlite3.OperationalError as exc:
            raise OperationError(
                f"the temporary database of what waits cannot be written: {exc}; free some space, "
                f"or name another folder in SQLITE_TMPDIR"
            ) from exc

    def add(self, task: WaitingTask, amended: str = "", note: str | None = None) -> None:
        """Add a task."""
        self._database.execute(_INSERT, (*_row(task), amended, note))

    def remove(self, task_id: str, due: int | None = None) -> None:
        """Remove the tasks with an id or, if ``due`` is given, those of them that are due then."""
        when, values = ("", []) if due is None else (" and due = ?", [due])
        self._database.execute(f"delete from task where id = ?{when}", [_stored(task_id), *values])  # noqa: S608 - our own words

    def settle(self, settle: Settle) -> None:
        """Replace each task by what a function returns for it and its note."""
        rows = self._database.execute(f"select rowid, note, {_COLUMNS} from task order by rowid")  # noqa: S608 - as above
        for rowid, note, *values in rows:
            settled = settle(_task(values), note)
            if settled is None:
                self._database.execute("delete from task where rowid = ?", [rowid])
            else:
                task, amended = settled
                self._database.execute(
                    f"update task set {_SET}, note = null where rowid = ?",  # noqa: S608 - as above
                    [*_row(task), amended, rowid],
                )

    def hide_arguments(self) -> None:
        """Forget the arguments of the tasks."""
        self._database.execute("update task set args = null, kwargs = null")

    # -- reading it ----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[WaitingTask]:
        return self.tasks()

    def tasks(
        self, select: Selection = ALL, limit: int = -1, offset: int = 0
    ) -> Iterator[WaitingTask]:
        """Yield the tasks that will run, those due first before the others; -1 is no limit."""
        rest = "order by due, rowid limit ? offset ?"
        for row in self._rows(_COLUMNS, select, rest, limit, offset):
            yield _task(row)

    def count(self, select: Selection = ALL) -> int:
        """Count the tasks that will run."""
        return int(next(self._rows("count(*)", select))[0])

    def taken_back(self, select: Selection = ALL) -> int:
        """Count the tasks that still wait and will not run: cancelled and superseded ones."""
        return int(next(self._rows("count(*)", select, valid=False))[0])

    def count_by(self, what: str, select: Selection = ALL, limit: int = -1) -> list[Count]:
        """Count the tasks that will run by ``"name"`` or ``"queue"``, the most first.

        A message that is not a task has the name ``""``.
        """
        if what not in COUNTED:
            raise ValueError(f"what must be one of {COUNTED}, got {what!r}")
        columns = f"coalesce({what}, ''), count(*), min(due), max(due)"
        rows = self._rows(columns, select, "group by 1 order by 2 desc, 1 limit ?", limit)
        return [Count(str(_loaded(value)), *figures) for value, *figures in rows]

    def histogram(self, start: int, end: int, bins: int) -> list[int]:
        """Return how many tasks are due in each of ``bins`` equal parts of a time.

        :param start: milliseconds since the epoch, as ``end``.
        """
        width = max((end - start) / bins, 1.0)
        counts = [0] * bins
        columns = f"cast((due - {int(start)}) / {float(width)} as integer), count(*)"
        for place, count in self._rows(columns, Selection(after=start, before=end), "group by 1"):
            counts[min(max(place, 0), bins - 1)] += count
        return counts

    def last(self) -> int | None:
        """Return the last due time, in milliseconds since the epoch; None without tasks."""
        latest: int | None = next(self._rows("max(due)", ALL))[0]
        return latest

    def unseen(self, select: Selection = ALL) -> tuple[str, ...]:
        """Return sentences about what is missing here, and about what was taken back."""
        count = self.taken_back(select)
        return (*self.missing, taken_back(count)) if count else self.missing

    def _rows(
        self, columns: str, select: Selection, rest: str = "", *more: int, valid: bool = True
    ) -> Iterator[tuple[Any, ...]]:
        condition, values = _where(select)
        those = _VALID if valid else f"not {_VALID}"
        statement = f"select {columns} from task where {those}{condition} {rest}"  # noqa: S608 - as above
        with self._lock:
            cursor = self._database.execute(statement, [*values, *more])
            rows = cursor.fetchmany(_BATCH)
        while rows:
            yield from rows
            with self._lock:
                rows = cursor.fetchmany(_BATCH)


def taken_back(count: int) -> str:
    """Return a sentence with the number of waiting tasks that are not listed."""
    if count == 1:
        return "1 cancelled or superseded task is not shown; it will not run"
    return f"{count:,} cancelled or superseded tasks are not shown; they will not run"


def _where(select: Selection) -> tuple[str, list[Any]]:
    """Return the conditions of a selection in SQL, each after an "and", and their values."""
    conditions: list[str] = []
    values: list[Any] = []

    def add(condition: str, *given: Any) -> None:
        conditions.append(f" and {condition}")
        values.extend(map(_stored, given))

    for column, wanted in (("name", select.name), ("queue", select.queue)):
        if wanted is not None:
            add(*_matches(f"coalesce({column}, '')", wanted, loose=select.loose))
    if select.arguments is not None:
        written = "lower(coalesce(args, '') || ' ' || coalesce(kwargs, ''))"
        add(f"instr({written}, lower(?)) > 0", select.arguments)
    if select.ids:
        add(f"id in ({', '.join('?' * len(select.ids))})", *select.ids)
    if select.id_begins:
        add("substr(coalesce(id, ''), 1, ?) = ?", len(select.id_begins), select.id_begins)
    if select.after is not None:
        add("due >= ?", select.after)
    if select.before is not None:
        add("due < ?", select.before)
    return "".join(conditions), values


def _matches(value: str, wanted: str, *, loose: bool) -> tuple[str, str]:
    """Return the condition that a value matches a pattern or, if ``loose``, has a part."""
    if loose and len(wanted) > 1 and wanted[0] == wanted[-1] == '"':
        return f"{value} = ?", wanted[1:-1]
    if loose and not any(sign in wanted for sign in "*?["):
        return f"instr(lower({value}), lower(?)) > 0", wanted
    # SQLite writes [^a] where a shell writes [!a].
    return f"{value} glob ?", wanted.replace("[!", "[^")


def _row(task: WaitingTask) -> tuple[Any, ...]:
    return tuple(map(_stored, _values(task)))


def _task(values: Any) -> WaitingTask:
    return WaitingTask(*map(_loaded, values))


def _stored(value: Any) -> Any:
    """Return a value as SQLite keeps it: a name with half a pair of surrogates is no text there."""
    if not isinstance(value, str):
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")
    return value


def _loaded(value: Any) -> Any:
    """Return a value that :func:`_stored` wrote."""
    return value.decode("utf-8", "surrogatepass") if isinstance(value, bytes) else value
