"""Cancel or reschedule many tasks that wait, by their ids."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from kombu_binary_delay.amendments import api
from kombu_binary_delay.amendments.record import check_name

from .waiting import WaitingTask

CANCEL, RESCHEDULE = "cancel", "reschedule"


@dataclass(frozen=True)
class Chosen:
    """The tasks to amend.

    :param ids: each once.
    :param due: when the last of them is due, in milliseconds since the epoch; None where that is
        not known.
    :param without_id: how many messages cannot be amended, since they have no id.
    """

    ids: tuple[str, ...]
    due: int | None = None
    without_id: int = 0


@dataclass(frozen=True)
class Amended:
    """What was recorded, or would be.

    :param action: ``cancel`` or ``reschedule``.
    :param due: of ``reschedule`` the new due time, of ``cancel`` that of the last task, in
        milliseconds since the epoch; None where it is not known.
    :param until: how long it is remembered, in milliseconds since the epoch.
    """

    action: str
    ids: tuple[str, ...]
    due: int | None
    until: int
    without_id: int = 0


def choose(tasks: Iterable[WaitingTask]) -> Chosen:
    """Choose tasks that wait, such as :func:`from_journal` or :func:`from_node` return."""
    ids: dict[str, None] = {}
    due = without_id = 0
    for task in tasks:
        if task.id:
            ids[task.id] = None
            due = max(due, task.due)
        else:
            without_id += 1
    return Chosen(tuple(ids), due or None, without_id)


def amend(
    connection: Any, action: str, chosen: Chosen, due: int | None = None, *, dry_run: bool = False
) -> Amended:
    """Record that tasks are cancelled or rescheduled; return when the broker has confirmed it.

    :param connection: a :class:`kombu.Connection` by our transport.
    :param due: of ``reschedule`` the new due time, in milliseconds since the epoch.
    :raises AmendmentError: for a bad id or time, and where the broker cannot.
    """
    ids = tuple(dict.fromkeys(check_name(each, "the id of a task") for each in chosen.ids))
    now = time.time_ns() // 1_000_000
    if action == CANCEL and chosen.due is not None and chosen.due > now:
        due = chosen.due
    amendments = connection.connection.delay_mechanism.amendments
    amendments.require()
    if ids and not dry_run:
        eta = None if due is None else datetime.fromtimestamp(due / 1000, timezone.utc)
        if action == CANCEL:
            api.cancel(ids, eta=eta, connection=connection)
        else:
            api.reschedule(ids, eta=eta, connection=connection)
    until = max(now, due or 0) + amendments.max_age
    return Amended(action, ids, due, until, chosen.without_id)
