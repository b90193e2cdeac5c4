"""The functions that a program calls to amend waiting messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from amqp.exceptions import RecoverableConnectionError
from kombu.log import get_logger

from kombu_binary_delay.errors import AmendmentError
from kombu_binary_delay.wire.following import is_consuming
from kombu_binary_delay.wire.mechanism import delays, mechanism_of, without_transport

from .generations import LONGEST_KEYED
from .record import GENERATION, MAX_TIME, REPLACES, Cancel, Postpone, check_name, split
from .stream import Amendments

logger = get_logger(__package__)

#: A time before this is in the past, whatever the clock says; in seconds.
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def cancel(tasks: Any, *, eta: datetime | None = None, connection: Any = None) -> None:
    """Cancel waiting tasks or messages; return when the broker has confirmed it.

    A consumer that reads amendments drops each message on delivery; a Celery worker discards it as
    a revoked task. A task that is already running continues.

    :param tasks: an id, a key, a result of Celery's, or several of these.
    :param eta: the due time, or the last one of several tasks; a datetime with a time zone. The
        cancellation is kept for the time in the setting ``amendments_max_age``: from now and, if
        ``eta`` is more than two days ahead, again from a day before it.
    :param connection: a :class:`kombu.Connection` with our transport. By default, a connection of
        the results' Celery app, or of the current app.
    :raises AmendmentError: if an id or the time is invalid, or the broker cannot record it.
    :raises kombu.exceptions.OperationalError: if the broker does not answer, after three more
        attempts to connect. A connection that breaks raises one of the connection's
        ``connection_errors``: do it again, as a second record has no effect.
    """
    tasks, names = _checked(tasks)
    now = _now()
    due = None if eta is None else _milliseconds(eta, now)
    # The name may be a key: its messages are due soon.
    is_soon = due is None or due - now <= LONGEST_KEYED
    keyed = split(names, now, due, keyed=True) if is_soon else []

    def write(amendments: Amendments) -> None:
        waits = due is not None and amendments.waits_on_ladder(due, now)
        if due is not None and (not waits or len(names) > 1):
            # Of several, others may be due before the last.
            amendments.require_remembered(due, now)
        if due is None or due - now <= amendments.max_age:
            amendments.write([*keyed, *split(names, now, due)])
            if due is not None and waits:
                # Again before that time, for consumers that start after now.
                with _best_effort(amendments, "for no longer than usual"):
                    _write_ahead(amendments, split(names, now, due), due)
            return
        # Only the record on the ladder holds: the stream drops another before the due time.
        _write_ahead(amendments, split(names, now, due), due)
        if keyed:
            amendments.write(keyed)
        with _best_effort(amendments, "lists show the task until then"):
            amendments.write(split(names, now))

    _amend(write, connection, tasks)


def reschedule(
    tasks: Any,
    *,
    eta: datetime | None = None,
    countdown: float | None = None,
    connection: Any = None,
) -> None:
    """Postpone waiting tasks or messages; return when the broker has confirmed it.

    At its original due time, each message is delayed again for the rest. That time must be within
    ``amendments_max_age`` from now. None runs before it, nor before a later time that it already
    waits for again: :func:`replace` runs a task earlier.

    :param tasks: an id, a result of Celery's, or several of these.
    :param eta: the later time, a datetime with a time zone.
    :param countdown: the later time in seconds from now, instead of ``eta``.
    :param connection: as for :func:`cancel`.
    :raises AmendmentError: as for :func:`cancel`, or if not exactly one time is given.
    :raises kombu.exceptions.OperationalError: as for :func:`cancel`.
    """
    tasks, names = _checked(tasks)
    now = _now()
    if (eta is None) == (countdown is None):
        raise AmendmentError(
            f"give exactly one of eta and countdown, got eta {eta!r} and countdown {countdown!r}"
        )
    due = _milliseconds(eta if eta is not None else _after(countdown), now)
    records = [Postpone(name, due, now) for name in names]
    _amend(lambda amendments: amendments.write(records), connection, tasks)


def replace(signature: Any, task_id: str, **options: Any) -> Any:
    """Send a task that replaces the waiting task with the same id; return its result.

    Of all tasks sent with this id, only the latest runs. It can have other arguments or another
    time, earlier or later. The replaced task must be due within ``amendments_max_age`` from now.

    :param signature: of the task, with its new arguments.
    :param task_id: of the waiting task, and of the new one.
    :param options: as for ``signature.apply_async``, such as ``countdown`` or ``eta``.
    :raises AmendmentError: as for :func:`cancel`. If the error comes after the task was sent, it
        says so, and both tasks may run.
    """
    check_name(task_id, "the id of a task")
    given = getattr(signature, "options", None)
    if not isinstance(given, Mapping) or hasattr(signature, "tasks"):
        raise AmendmentError(
            f"the new task must be the signature of one task, got {signature!r}; use task.s()"
        )
    headers = options.pop("headers", None) or given.get("headers") or {}
    if not isinstance(headers, Mapping):
        raise AmendmentError(f"headers must be a mapping, got {headers!r}")
    asked = {**given, **options}
    client = asked.get("connection") or getattr(asked.get("producer"), "connection", None)
    if not signature.app.conf.task_always_eager:
        with _connected(client, signature) as connected:
            if not delays(connected.get_transport_cls()):
                # Nothing would read the header: both tasks would run.
                raise AmendmentError(without_transport(connected))
    # A signature made from a task has that of the task, by which this one would supersede nothing.
    headers = {name: headers[name] for name in headers if name != GENERATION} | {REPLACES: task_id}
    return signature.apply_async(task_id=task_id, headers=headers, **options)


def _write_ahead(amendments: Amendments, records: Iterable[Cancel], due: int) -> None:
    for record in records:
        amendments.write_ahead(record, due)


@contextmanager
def _best_effort(amendments: Amendments, less: str) -> Iterator[None]:
    """Write what a cancellation does not depend on; if that is refused, warn.

    :param less: what it lacks then.
    """
    try:
        yield
    except AmendmentError as exc:
        amendments.end_if_unanswered(exc)
        logger.warning("a cancellation is recorded, but %s: %s", less, exc)


def _checked(tasks: Any) -> tuple[list[Any], list[str]]:
    """Return the single ids and results of what a user has given, and their ids, each once."""
    single = list(_single(tasks))
    names = [check_name(getattr(task, "id", task), "the id of a task") for task in single]
    if not names:
        raise AmendmentError("got no task; give at least one id")
    return single, list(dict.fromkeys(names))


def _single(tasks: Any) -> Iterator[Any]:
    children = getattr(tasks, "results", None)
    if isinstance(children, (list, tuple)):
        # A group's.
        yield from _single(children)
    elif hasattr(tasks, "id"):
        yield tasks
    elif isinstance(tasks, Iterable) and not isinstance(tasks, (str, bytes, Mapping)):
        for task in tasks:
            yield from _single(task)
    else:
        yield tasks


def _amend(write: Callable[[Amendments], None], connection: Any, tasks: Any) -> None:
    with _connected(connection, tasks) as connected:
        for attempt in range(2):
            # A pooled one has no program's consumers, though `inspect` may have left one in it.
            consumes = connection is not None and is_consuming(connected._connection)  # noqa: SLF001 - does not connect
            if consumes and not connected.connected:
                # A new connection would not consume, and its program would not notice.
                raise RecoverableConnectionError("the connection, which consumes, is lost")
            try:
                connected.ensure_connection(max_retries=3)
                _amend_on(connected, write)
            except connected.connection_errors:
                if attempt or consumes:
                    raise
                # A second copy of a record has no effect.
                connected.collect()
            else:
                return


def _amend_on(connected: Any, write: Callable[[Amendments], None]) -> None:
    mechanism = mechanism_of(connected.connection)
    if mechanism is None:
        raise AmendmentError(without_transport(connected))
    amendments: Amendments = mechanism.amendments
    amendments.require()
    try:
        write(amendments)
    except AmendmentError as exc:
        amendments.end_if_unanswered(exc)
        raise


@contextmanager
def _connected(connection: Any, tasks: Any) -> Iterator[Any]:
    if connection is not None:
        if not hasattr(connection, "connection_errors"):
            raise AmendmentError(f"connection must be a kombu.Connection, got {connection!r}")
        yield connection
        return
    app = _app_of(tasks) or _current_app()
    with app.connection_or_acquire() as pooled:
        yield pooled


def _current_app() -> Any:
    try:
        from celery import current_app  # noqa: PLC0415 - Celery is no dependency
    except ImportError:
        raise AmendmentError("Celery is not installed; give a connection") from None
    return current_app


def _app_of(tasks: Any) -> Any:
    """Return the Celery app of a signature or of results; None if there are only ids.

    :raises AmendmentError: if they are of several apps, which may have other brokers.
    """
    given = [getattr(task, "app", None) for task in (tasks if isinstance(tasks, list) else [tasks])]
    # Celery's current app is a proxy.
    real = (getattr(app, "_get_current_object", lambda app=app: app)() for app in given if app)
    apps = {id(app): app for app in real}
    if len(apps) > 1:
        raise AmendmentError(
            f"the results are of {len(apps)} Celery apps; give those of one app, or a connection"
        )
    return next(iter(apps.values()), None)


def _after(countdown: Any) -> datetime:
    if isinstance(countdown, bool):
        raise AmendmentError(f"countdown must be a number of seconds, got {countdown!r}")
    try:
        return datetime.now(UTC) + timedelta(seconds=countdown)
    except (TypeError, ValueError, OverflowError):
        raise AmendmentError(f"countdown must be a number of seconds, got {countdown!r}") from None


def _milliseconds(eta: Any, now: int) -> int:
    if not isinstance(eta, datetime) or eta.tzinfo is None:
        raise AmendmentError(f"eta must be a datetime with a time zone, got {eta!r}")
    # Rounded up: what is delayed again must not be early.
    due = -((_EPOCH - eta) // timedelta(milliseconds=1))
    if due <= now:
        raise AmendmentError(f"{eta.isoformat()} has passed; give a time in the future")
    if due > MAX_TIME:
        raise AmendmentError(
            f"{eta.isoformat()} is after the year 9999 in UTC; give an earlier time"
        )
    return due


def _now() -> int:
    return time.time_ns() // 1_000_000
