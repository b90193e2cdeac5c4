"""Write the amendments of many rows with few records. Does not import Spark.

A record of a cancellation has up to a thousand ids. A rescheduling has a record of its own, and a
thousand records are confirmed at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from kombu_binary_delay.amendments.record import MAX_IDS, Cancel, Postpone
from kombu_binary_delay.errors import AmendmentError
from kombu_binary_delay.wire.mechanism import TRANSPORT, mechanism_of

from . import schema as s

if TYPE_CHECKING:
    from kombu_binary_delay.amendments.stream import Amendments

    from .send import Sent

_DAY = 86_400_000  # milliseconds
#: In place of the number of a span: now.
_NEAR = -1

#: Rows, and the function that writes their records and waits for the broker's confirms.
Group = tuple[list["Sent"], Callable[[], None]]


def writes(connection: Any, pending: list[Sent]) -> Iterator[Group]:
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
    moves = [sent for sent in pending if sent.action == s.RESCHEDULE]
    if moves:
        records = [Postpone(_name(move), _due(move), now) for move in moves]
        yield moves, partial(amendments.write, records)
    kept_until = now + amendments.max_age
    # A record comes a day before the due times of its group, or half of its age if that is less. A
    # task may arrive up to a span sooner, where that has both of its due times: half is left then.
    span = min(_DAY // 2, amendments.max_age // 4)
    near: list[Sent] = []
    far: dict[tuple[int, int], list[Sent]] = {}
    for sent in pending:
        if sent.action != s.CANCEL:
            continue
        if _due(sent) <= kept_until:
            near.append(sent)
        else:
            # What the receipts and the row say may differ, and the task may arrive at either time.
            first = _first_due(sent)
            times = _due(sent) // span, first // span if first > kept_until else _NEAR
            far.setdefault(times, []).append(sent)
    for group in _parts(near):
        record = _cancel(group, now)
        yield group, partial(amendments.write, [record])
    for (last, first), of_span in far.items():
        for group in _parts(of_span):
            dues = [min(map(_due, group))]
            if first not in (_NEAR, last):
                dues.append(min(map(_first_due, group)))
            write = partial(_write_far, amendments, group, now, dues, is_near=first == _NEAR)
            yield group, write


def _write_far(
    amendments: Amendments, group: list[Sent], now: int, dues: list[int], *, is_near: bool
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


def _cancel(group: list[Sent], now: int) -> Cancel:
    last = max(map(_due, group))
    return Cancel(tuple(map(_name, group)), now, last if last > now else None)


def _parts(group: list[Sent]) -> Iterator[list[Sent]]:
    for at in range(0, len(group), MAX_IDS):
        yield group[at : at + MAX_IDS]


def _name(sent: Sent) -> str:
    return str(sent.row.task_id)


def _due(sent: Sent) -> int:
    """Return the last known due time in milliseconds since the epoch; 0 if none is known."""
    return 0 if sent.due is None else -(-sent.due // 1000)


def _first_due(sent: Sent) -> int:
    """Return the first known due time: a row's ``due``, where its ``eta`` is the last one."""
    due = sent.row.due
    return _due(sent) if due is None else due // 1000


def _no_mechanism() -> None:
    raise AmendmentError(
        f"the application's transport is not {TRANSPORT}, which records amendments"
    )
