"""The functions by which an app's schedules are changed and listed."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kombu_binary_delay.errors import ScheduleError, shown
from kombu_binary_delay.publishing import PublishBatch

from .definitions import ALLOW, Applied, Definitions, Schedule, merge, of_entry
from .listing import Schedules, listing
from .scheduler import Run, send
from .series import Occurrence, expected
from .store import Store


def apply(app: Any, *, dry_run: bool = False, connection: Any = None) -> Applied:
    """Make the schedules on the broker those of an app's ``beat_schedule``.

    :param app: of Celery.
    :param dry_run: whether to change nothing.
    :param connection: a :class:`kombu.Connection` with our transport; by default, one of the app's.
    :returns: what has changed.
    :raises ScheduleError: if a schedule is invalid, or the broker has no streams.
    """
    wanted = {name: of_entry(name, entry, app) for name, entry in _entries(app).items()}
    with _store(app, connection) as store:
        if dry_run:
            return merge(store.definitions(), wanted, _series(), _now())[1]
        if any(schedule.overlap != ALLOW for schedule in wanted.values()):
            store.mechanism.amendments.prepare()
        with store.locked():
            store.declare()
            before = store.definitions()
            after, done = merge(before, wanted, _series(), _now())
            _write(store, before, after)
        return done


def _entries(app: Any) -> dict[str, Any]:
    """Return the entries of an app's ``beat_schedule``, with that which beat adds."""
    app.finalize()
    app.loader.import_default_modules()
    entries = dict(app.conf.beat_schedule or {})
    if entries and app.conf.result_expires and not app.backend.supports_autoexpire:
        from celery.schedules import crontab  # noqa: PLC0415 - Celery is no dependency

        cleanup = "celery.backend_cleanup"
        at_night = {"task": cleanup, "schedule": crontab("0", "4"), "options": {"expires": 43200}}
        entries.setdefault(cleanup, at_night)
    return entries


def listed(app: Any, *, connection: Any = None) -> Schedules:
    """Return an app's schedules as they stand."""
    with _store(app, connection) as store:
        return listing(store.connection, store.names)


def pause(app: Any, name: str, *, connection: Any = None) -> None:
    """Pause a schedule: nothing is sent until it is resumed.

    :raises ScheduleError: if there is no such schedule.
    """
    _change(
        app,
        name,
        connection,
        lambda old: old if old.paused else old.renewed(old.series, _now(), paused=True),
    )


def resume(app: Any, name: str, *, connection: Any = None) -> None:
    """Resume a schedule; what was due meanwhile does not run.

    :raises ScheduleError: if there is no such schedule.
    """
    _change(
        app,
        name,
        connection,
        lambda old: old.renewed(next(_series()), _now()) if old.paused else old,
    )


def remove(app: Any, name: str, *, connection: Any = None) -> None:
    """Remove a schedule, until the next :func:`apply` of an app that has it.

    :raises ScheduleError: if there is no such schedule.
    """
    _change(app, name, connection, lambda _: None)


def trigger(app: Any, name: str, *, connection: Any = None) -> str:
    """Send a schedule's task now, beside its occurrences; return the id of the task.

    :raises ScheduleError: if there is no such schedule.
    """
    with _store(app, connection) as store:
        schedule = _known(store.definitions(), name)
        task_id = str(uuid.uuid4())
        with store.client.Producer() as producer:
            send(app, Run(schedule, _now(), task_id), producer, store.names)
        return task_id


def _change(
    app: Any, name: str, connection: Any, change: Callable[[Schedule], Schedule | None]
) -> None:
    with _store(app, connection) as store:
        store.declare_queue()
        with store.locked():
            before = store.definitions()
            changed = change(_known(before, name))
            after = {other: before[other] for other in before if other != name}
            _write(store, before, {**after, name: changed} if changed else after)


def _known(known: Definitions, name: str) -> Schedule:
    if name not in known:
        names = ", ".join(map(repr, sorted(known)[:5])) or "none"
        raise ScheduleError(f"there is no schedule {shown(name)}; there are {names}")
    return known[name]


def _write(store: Store, before: Definitions, after: Definitions) -> None:
    """Write the schedules, and then the first occurrences of new series."""
    if after == before:
        return
    store.write(after)
    began = [
        Occurrence(name, schedule.series, due)
        for name, schedule in after.items()
        if (name not in before or before[name].series != schedule.series)
        and (due := expected(schedule, 0)) is not None
    ]
    with PublishBatch(store.client.default_channel) as batch:
        store.arm(batch, began)


@contextmanager
def _store(app: Any, connection: Any) -> Iterator[Store]:
    if connection is None:
        with app.connection_for_write() as made:
            made.ensure_connection(max_retries=3)
            store = Store(app, made)
            store.require()
            yield store
        return
    store = Store(app, connection)
    store.require()
    yield store


def _series() -> Iterator[str]:
    while True:
        yield secrets.token_hex(8)


def _now() -> int:
    return time.time_ns() // 1_000_000
