"""Write the amendments of many rows with few records. Does not import Spark.

A record of a cancellation has up to a thousand ids. A rescheduling has a record of its own, and a
thousand records are confirmed at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kombu_binary_delay.amendments.record import MAX_IDS, Cancel, Postpone
from kombu_binary_delay.errors import AmendmentError
from kombu_binary_delay.wire.mechanism import TRANSPORT, mechanism_of

from . import schema as s

if TYPE_CHECKING:
    from kombu_binary_delay.amendments.stream import Amendments

    from .rows import Row

_DAY = 86_400_000  # milliseconds
#: In place of the number of a span: now.
_NEAR = -1


class Amendment(NamedTuple):
    """A row that cancels or reschedules a task.

    :param tag: the caller's name for it.
    """

    row: Row
    tag: Any

    @property
    def name(self) -> str:
        """The id of the task."""
        return str(self.row.task_id)

    @property
    def due(self) -> int:
        """The last known due time in milliseconds since the epoch; 0 if none is known."""
        return 0 if self.row.eta is None else -(-self.row.eta // 1000)

    @property
    def first_due(self) -> int:
        """The first known due time: a row's ``due``, where its ``eta`` is the last one."""
        return self.due if self.row.due is None else self.row.due // 1000


#: Amendments, and the function that writes their records and waits for the broker's confirms.
Group = tuple[list[Amendment], Callable[[], None]]


def writes(connection: Any, pending: list[Amendment]) -> Iterator[Group]:
    """Yield groups of rows that are recorded together, each with the function that does it.

    :param connection: of py-amqp.
    :raises AmendmentError: from the functions, as from
        :meth:`~kombu_binary_delay.amendments.stream.Amendments.write`.
    """
    mechanism = mechanism_of(connection)
    if mechanism is None:
        yield pending, _no_mechanism
        return
    amendments, now = mechanism.amendments, time.time_ns() // 1_000_000
    moves = [one for one in pending if one.row.action == s.RESCHEDULE]
    if moves:
        records = [Postpone(move.name, move.due, now) for move in moves]
        yield moves, partial(amendments.write, records)
    kept_until = now + amendments.max_age
    # A record comes a day before the due times of its group, or half of its age if that is less. A
    # task may arrive up to a span sooner, where that has both of its due times: half is left then.
    span = min(_DAY // 2, amendments.max_age // 4)
    near: list[Amendment] = []
    far: dict[tuple[int, int], list[Amendment]] = {}
    for one in pending:
        if one.row.action != s.CANCEL:
            continue
        if one.due <= kept_until:
            near.append(one)
        else:
            # What the receipts and the row say may differ, and the task may arrive at either time.
            first = one.first_due
            times = one.due // span, first // span if first > kept_until else _NEAR
            far.setdefault(times, []).append(one)
    for group in _parts(near):
        record = _cancel(group, now)
        yield group, partial(amendments.write, [record])
    for (last, first), of_span in far.items():
        for group in _parts(of_span):
            dues = [min(one.due for one in group)]
            if first not in (_NEAR, last):
                dues.append(min(one.first_due for one in group))
            write = partial(_write_far, amendments, group, now, dues, is_near=first == _NEAR)
            yield group, write


def _write_far(
    amendments: Amendments, group: list[Amendment], now: int, dues: list[int], *, is_near: bool
) -> None:
    """Write records that wait on the ladder, since records are not kept until the due times.

    :param dues: the times before which a record is needed, in milliseconds since the epoch.
    :param is_near: whether a record is needed at once as well.
    """
    record = _cancel(group, now)
    for due in dues:
        # It can be refused, so it is first.
        amendments.write_ahead(record, due)
    if is_near:
        amendments.write([record])


def _cancel(group: list[Amendment], now: int) -> Cancel:
    last = max(one.due for one in group)
    return Cancel(tuple(one.name for one in group), now, last if last > now else None)


def _parts(group: list[Amendment]) -> Iterator[list[Amendment]]:
    for at in range(0, len(group), MAX_IDS):
        yield group[at : at + MAX_IDS]


def _no_mechanism() -> None:
    raise AmendmentError(
        f"the application's transport is not {TRANSPORT}, which records amendments"
    )
