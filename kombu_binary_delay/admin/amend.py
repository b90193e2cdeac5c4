"""Cancel or reschedule many tasks that wait, by their ids."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from kombu_binary_delay.amendments import api
from kombu_binary_delay.amendments.record import check_name

from .waiting import WaitingTask

_DAY = 86_400_000
CANCEL, RESCHEDULE = "cancel", "reschedule"


@dataclass(frozen=True)
class Chosen:
    """The tasks to amend.

    :param dues: by their ids, when they are due, in milliseconds since the epoch; None where that
        is not known.
    :param without_id: how many messages cannot be amended, since they have no id.
    """

    dues: Mapping[str, int | None]
    without_id: int = 0


@dataclass(frozen=True)
class Amended:
    """What was recorded, or would be.

    :param action: ``cancel`` or ``reschedule``.
    :param due: of ``reschedule`` the new due time, in milliseconds since the epoch.
    :param until: when the last of it is forgotten, in milliseconds since the epoch.
    """

    action: str
    ids: tuple[str, ...]
    due: int | None
    until: int
    without_id: int = 0


def choose(tasks: Iterable[WaitingTask]) -> Chosen:
    """Choose tasks that wait, such as :func:`from_journal` or :func:`from_node` return."""
    dues: dict[str, int | None] = {}
    without_id = 0
    for task in tasks:
        if task.id:
            dues[task.id] = min(dues.get(task.id) or task.due, task.due)
        else:
            without_id += 1
    return Chosen(dues, without_id)


def amend(
    connection: Any, action: str, chosen: Chosen, due: int | None = None, *, dry_run: bool = False
) -> Amended:
    """Record that tasks are cancelled or rescheduled; return when the broker has confirmed it.

    :param connection: a :class:`kombu.Connection` by our transport.
    :param due: of ``reschedule`` the new due time, in milliseconds since the epoch.
    :raises AmendmentError: for a bad id or time, and where the broker cannot.
    """
    ids = tuple(check_name(each, "the id of a task") for each in chosen.dues)
    now = time.time_ns() // 1_000_000
    amendments = connection.connection.delay_mechanism.amendments
    amendments.require()
    last = due or now
    if action == CANCEL:
        # One after the other, for what was cancelled before an error to be what is due first.
        for first, names in sorted(_by_day(chosen.dues, now).items()):
            last = max(first, last)
            if not dry_run:
                api.cancel(names, eta=_time(first) if first > now else None, connection=connection)
    elif ids and not dry_run and due is not None:
        api.reschedule(ids, eta=_time(due), connection=connection)
    return Amended(action, ids, due, last + amendments.max_age, chosen.without_id)


def _by_day(dues: Mapping[str, int | None], now: int) -> dict[int, list[str]]:
    """Put together what is due in the same day, by when the first of it is due.

    A record of what is due far ahead reaches consumers shortly before that.
    """
    days: dict[int, list[str]] = defaultdict(list)
    for name, due in dues.items():
        days[(max(due or 0, now) - now) // _DAY].append(name)
    return {min(max(dues[name] or 0, now) for name in names): names for names in days.values()}


def _time(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, timezone.utc)
