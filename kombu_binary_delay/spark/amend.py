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
from kombu_binary_delay.mechanism import mechanism_of

from . import schema as s

if TYPE_CHECKING:
    from kombu_binary_delay.amendments.stream import Amendments

    from .send import Sent

_DAY = 86_400_000  # milliseconds

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
    moves = [each for each in pending if each.action == s.RESCHEDULE]
    if moves:
        records = [Postpone(_name(each), _due(each), now) for each in moves]
        yield moves, partial(amendments.write, records)
    kept_until = now + amendments.max_age
    # A record waits on the ladder until at most half of its age before the first task of its
    # group, and is there for the last one, too.
    span = min(_DAY, amendments.max_age // 4)
    near: list[Sent] = []
    far: dict[tuple[int, bool], list[Sent]] = {}
    for each in pending:
        if each.action != s.CANCEL:
            continue
        if _due(each) <= kept_until:
            near.append(each)
        else:
            # What the receipts and the row say may differ, and the task may arrive at either time.
            is_near = _first_due(each) <= kept_until
            far.setdefault((_due(each) // span, is_near), []).append(each)
    for group in _parts(near):
        record = _cancel(group, now)
        yield group, partial(amendments.write, [record])
    for (_, is_near), of_span in far.items():
        for group in _parts(of_span):
            yield group, partial(_write_far, amendments, group, now, is_near=is_near)


def _write_far(amendments: Amendments, group: list[Sent], now: int, *, is_near: bool) -> None:
    """Write a record that waits on the ladder, since records are not kept until the due times.

    :param is_near: whether a record is needed at once as well.
    """
    record = _cancel(group, now)
    if is_near:
        amendments.write([record])
    amendments.write_ahead(record, min(map(_due, group)))


def _cancel(group: list[Sent], now: int) -> Cancel:
    last = max(map(_due, group))
    return Cancel(tuple(map(_name, group)), now, last if last > now else None)


def _parts(group: list[Sent]) -> Iterator[list[Sent]]:
    for at in range(0, len(group), MAX_IDS):
        yield group[at : at + MAX_IDS]


def _name(sent: Sent) -> str:
    return str(sent.row["task_id"])


def _due(sent: Sent) -> int:
    """Return the last known due time in milliseconds since the epoch; 0 if none is known."""
    return 0 if sent.due is None else -(-sent.due // 1000)


def _first_due(sent: Sent) -> int:
    """Return the first known due time: a row's ``due``, where its ``eta`` is the last one."""
    due = sent.row.get("due")
    return _due(sent) if due is None else due // 1000


def _no_mechanism() -> None:
    raise AmendmentError(
        "the application's transport is not kombu_binary_delay:Transport, which records amendments"
    )
