"""The schedules of all apps of a namespace, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kombu_binary_delay.schedules.listing import Schedules, listing, names_among

from .management import Management
from .snapshot import queues_now


def scheduled(connection: Any, management: Management, namespace: str) -> tuple[Schedules, ...]:
    """Return the schedules of all apps.

    :param connection: a :class:`kombu.Connection`.
    :raises UnreachableError: if the management API does not answer.
    """
    names = names_among(namespace, queues_now(management))
    return tuple(listing(connection.connection, app_names) for app_names in names)


def standstills(of_apps: Iterable[Schedules]) -> Iterable[tuple[str, str, str]]:
    """Yield what stands still, what was found of it, and what to do."""
    for app in of_apps:
        if app.schedules and app.workers is None:
            yield (
                f"the schedules of {app.app}",
                "their queue does not exist",
                "'schedule apply' with -A and that app makes it",
            )
        do = "see the log of its workers" if app.workers else "start a worker of that app"
        for schedule in app.overdue:
            overdue = f"overdue, and {app.workers or 'no'} workers could send it"
            yield f"the schedule {schedule.name} of {app.app}", overdue, do
