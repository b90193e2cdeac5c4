"""Cancel or reschedule many waiting tasks by their ids."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kombu_binary_delay.amendments import api
from kombu_binary_delay.amendments.record import MAX_TIME, check_name
from kombu_binary_delay.errors import AmendmentError
from kombu_binary_delay.wire.mechanism import mechanism_of, without_transport

from .waiting import WaitingTask

CANCEL, RESCHEDULE = "cancel", "reschedule"
_THOSE = "choose only tasks that are due within that time, and the others later"


@dataclass(frozen=True)
class Chosen:
    """The tasks to amend.

    :param dues: the due times by id, in milliseconds since the epoch; None if not known.
    :param without_id: the number of messages without an id, which cannot be amended.
    :param by_search: whether a search returned them: one that cannot be amended is then no reason
        to refuse the others.
    """

    dues: Mapping[str, int | None]
    without_id: int = 0
    by_search: bool = False


@dataclass(frozen=True)
class Amended:
    """What was recorded or, in a dry run, would be.

    :param action: ``cancel`` or ``reschedule``.
    :param due: for ``reschedule`` the new due time, in milliseconds since the epoch.
    :param until: when the last record expires, in milliseconds since the epoch.
    :param left: why a task that was found cannot be amended, by its id; it runs when it is due.
    """

    action: str
    ids: tuple[str, ...]
    due: int | None
    until: int
    without_id: int = 0
    left: Mapping[str, str] = field(default_factory=dict)


def choose(tasks: Iterable[WaitingTask]) -> Chosen:
    """Choose waiting tasks, as returned by :func:`from_journal` or :func:`from_node`."""
    dues: dict[str, int | None] = {}
    without_id = 0
    for task in tasks:
        if task.id:
            dues[task.id] = max(dues.get(task.id) or 0, task.due)
        else:
            without_id += 1
    return Chosen(dues, without_id, by_search=True)


def amend(
    connection: Any, action: str, chosen: Chosen, due: int | None = None, *, dry_run: bool = False
) -> Amended:
    """Record that tasks are cancelled or rescheduled; return when the broker has confirmed it.

    :param connection: a :class:`kombu.Connection` with our transport.
    :param due: for ``reschedule`` the new due time, in milliseconds since the epoch.
    :raises AmendmentError: for a bad id or time of a task that was not found by a search, or a bad
        new time, or if the broker has no streams or refuses. For a task that is known to be due
        later than records are kept, if it is to be rescheduled, or if the record of a cancellation
        cannot wait on the ladder. Then nothing is recorded.
    """
    now = time.time_ns() // 1_000_000
    mechanism = mechanism_of(connection.connection)
    if mechanism is None:
        raise AmendmentError(without_transport(connection))
    amendments = mechanism.amendments
    amendments.require()
    dues, left = _amendable(amendments, action, chosen, now)
    until = amendments.kept_until(None, now)
    latest = max((known or now for known in dues.values()), default=now)
    if due is not None:
        _check_time(due)
    if action == CANCEL:
        if not amendments.can_wait_on_ladder:
            amendments.require_remembered(latest, now, "a cancellation", _THOSE)
        for names, eta in _together(dues, now + amendments.max_age):
            until = max(amendments.kept_until(eta, now), until)
            if not dry_run:
                api.cancel(names, eta=_time(eta) if eta > now else None, connection=connection)
    elif dues and due is not None:
        amendments.require_remembered(latest, now, "a rescheduling", _THOSE)
        if not dry_run:
            api.reschedule(tuple(dues), eta=_time(due), connection=connection)
    return Amended(action, tuple(dues), due, until, chosen.without_id, left)


def _amendable(
    amendments: Any, action: str, chosen: Chosen, now: int
) -> tuple[dict[str, int | None], dict[str, str]]:
    """Return the due times of the tasks that can be amended, and why others cannot, by id.

    :raises AmendmentError: for one that cannot, if no search has found it.
    """
    dues: dict[str, int | None] = {}
    left: dict[str, str] = {}
    for name, due in chosen.dues.items():
        try:
            check_name(name, "the id of a task")
            if due is not None:
                _check_time(due)
                if action == CANCEL:
                    amendments.require_room(due, now)
        except AmendmentError as exc:
            if not chosen.by_search:
                raise
            left[name] = str(exc)
        else:
            dues[name] = due
    return dues, left


def _check_time(due: int) -> None:
    if due > MAX_TIME:
        raise AmendmentError(
            f"a due time of {due} ms since the epoch is after the year 9999; give an earlier one, "
            f"or choose only tasks that are due before"
        )


def _together(dues: Mapping[str, int | None], until: int) -> Iterator[tuple[list[str], int]]:
    """Yield ids that can be cancelled together, and the last due time; 0 if not known.

    Tasks that are due later than records are kept are cancelled one by one: consumers read each
    cancellation shortly before the task is due. The broker, or the ladder, can refuse such a
    record, the farthest first: so it is before all others.

    :param until: until when records are kept, in milliseconds since the epoch.
    """
    far = [(due, name) for name, due in dues.items() if due is not None and due >= until]
    for due, name in sorted(far, reverse=True):
        yield [name], due
    soon = [name for name, due in dues.items() if (due or 0) < until]
    if soon:
        yield soon, max(dues[name] or 0 for name in soon)


def _time(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
