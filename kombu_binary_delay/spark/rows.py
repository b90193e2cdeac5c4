"""Rows that are sent, a column at a time, and what their receipts say. Does not import Spark."""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa

from kombu_binary_delay.errors import DelayError

from . import schema as s

#: What all messages of one kind have in common: the columns that say what is sent where, and
#: whether it has headers, and expires.
KindOf = tuple[Any, ...]
_OF_KIND = ("task", "queue", "exchange", "routing_key", "priority")


class Row(NamedTuple):
    """A row; times are in microseconds since the epoch, and arguments and headers are JSON.

    With the ``action`` "cancel" or "reschedule" it amends the task with its id; ``eta`` is then
    when the task is due, if that is known, or will be.
    """

    task_id: str
    task: str = ""
    queue: str | None = None
    exchange: str | None = None
    routing_key: str | None = None
    priority: int | None = None
    args: str | None = None
    kwargs: str | None = None
    headers: str | None = None
    eta: int | None = None
    #: In seconds.
    countdown: float | None = None
    expires: int | None = None
    due: int | None = None
    action: str | None = None


#: The columns of a row.
COLUMNS = Row._fields


class Rows:
    """The rows of a batch, by their places in it, and the values of their receipts, so far.

    :param batch: with columns of :class:`Row`; those that are missing are null.
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._columns: dict[str, list[Any]] = {}
        nothing: list[Any] = [None] * batch.num_rows
        for name in COLUMNS:
            self._columns[name] = nothing
            if name in batch.schema.names:
                column = batch.column(name)
                if column.null_count < len(column):
                    self._columns[name] = column.to_pylist()
        #: What each does.
        self.actions: list[str] = [action or s.PUBLISH for action in self["action"]]
        #: The due times in the rows, and when the messages are due, with jitter; None if there is
        #: none, and before a countdown has begun.
        self.asked: list[Any] = self["eta"].copy()
        if self["countdown"] is not nothing:
            pairs = zip(self.asked, self["countdown"], strict=True)
            self.asked = [eta if countdown is None else None for eta, countdown in pairs]
        self.due = self.asked.copy()
        are_none = ([value is None for value in self[name]] for name in ("headers", "expires"))
        #: The kind of each.
        self.kinds: list[KindOf] = list(
            zip(*map(self.__getitem__, _OF_KIND), *are_none, strict=True)
        )
        #: Their headers, read; None before they are begun.
        self.loaded = nothing.copy()
        #: When they were published, as far as one can say before that, or recorded.
        self.published_at = nothing.copy()
        self.queue, self.status, self.detail = nothing.copy(), nothing.copy(), nothing.copy()
        #: Why ``send_task`` made their messages, by indices in ``REASONS``; None if a template did.
        self.reason = nothing.copy()

    def __getitem__(self, column: str) -> list[Any]:
        return self._columns[column]

    def __len__(self) -> int:
        return len(self.status)

    def row(self, place: int) -> Row:
        """Return a row."""
        return Row._make(column[place] for column in self._columns.values())

    def begin(self, place: int, now: int) -> None:
        """Note that a countdown begins.

        :raises DelayError: if the row has none.
        """
        countdown = self["countdown"][place]
        if countdown is None:
            raise DelayError("neither eta nor countdown")
        # It has the precision of a float.
        self.asked[place] = self.due[place] = now + round(countdown * 1_000_000)
