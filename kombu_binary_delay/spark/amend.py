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
    soon, far = [], {}  # type: list[Sent], dict[int, list[Sent]]
    for each in pending:
        if each.action != s.CANCEL:
            continue
        if _due(each) <= now + amendments.max_age:
            soon.append(each)
        else:
            far.setdefault(_due(each) // _DAY, []).append(each)
    for group in _parts(soon):
        record = _cancel(group, now)
        yield group, partial(amendments.write, [record])
    # Records are not kept for so long: these wait on the ladder until shortly before.
    for of_day in far.values():
        for group in _parts(of_day):
            first = min(map(_due, group))
            yield group, partial(amendments.write_ahead, _cancel(group, now), first)


def _cancel(group: list[Sent], now: int) -> Cancel:
    last = max(map(_due, group))
    return Cancel(tuple(map(_name, group)), now, last if last > now else None)


def _parts(group: list[Sent]) -> Iterator[list[Sent]]:
    for at in range(0, len(group), MAX_IDS):
        yield group[at : at + MAX_IDS]


def _name(sent: Sent) -> str:
    return str(sent.row["task_id"])


def _due(sent: Sent) -> int:
    """Return the due time in milliseconds since the epoch; 0 if it is not known."""
    return 0 if sent.due is None else -(-sent.due // 1000)


def _no_mechanism() -> None:
    raise AmendmentError(
        "the application's transport is not kombu_binary_delay:Transport, which records amendments"
    )
