"""What a program calls to take back what waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

from kombu_binary_delay.errors import AmendmentError
from kombu_binary_delay.mechanism import mechanism_of

from .door import LONGEST_KEYED
from .record import REPLACES, Postpone, check_name, split
from .stream import KEYS, Amendments

#: A time before this would be one of the past whatever the clock says; in seconds.
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def cancel(tasks: Any, *, eta: datetime | None = None, connection: Any = None) -> None:
    """Cancel tasks or messages that wait; return when the broker has confirmed it.

    A consumer that reads amendments drops each as it arrives; a Celery worker discards it as a
    revoked task. One that is running already goes on.

    :param tasks: an id, a key, a result of Celery's, or several of these.
    :param eta: when the last of them is due, aware of its time zone. Without it, the cancellation
        is remembered for the setting ``amendments_max_age``; with it, for as long after that time.
    :param connection: of Kombu's, with our transport; None for the current Celery app's.
    :raises AmendmentError: for an id that is none, a time that has passed, or where the broker
        cannot remember it.
    """
    names = [check_name(name, "the id of a task") for name in _names(tasks)]
    if not names:
        raise AmendmentError("no task is named; give the id of one at least")
    now = _now()
    due = None if eta is None else _milliseconds(eta, now)

    def write(amendments: Amendments) -> None:
        records = split(names, now, due)
        if due is None or due - now <= LONGEST_KEYED:
            # One may be a key: those have a stream, and an order, of their own.
            amendments.write(records, KEYS)
        if due is None:
            amendments.write(records)
            return
        for each in records:
            amendments.write_ahead(each, due)

    _amend(write, connection)


def reschedule(
    task: Any,
    *,
    eta: datetime | None = None,
    countdown: float | None = None,
    connection: Any = None,
) -> None:
    """Postpone a task or message that waits; return when the broker has confirmed it.

    At its first due time, which is to be within ``amendments_max_age`` from now, it is delayed
    again, for what is left. An earlier time than that changes nothing: use :func:`replace`.

    :param task: its id, or its result.
    :param eta: the later time, aware of its time zone.
    :param countdown: or in how many seconds from now.
    :param connection: as for :func:`cancel`.
    :raises AmendmentError: as for :func:`cancel`, and unless exactly one time is given.
    """
    (name,) = (check_name(each, "the id of a task") for each in _names(task))
    now = _now()
    if (eta is None) == (countdown is None):
        raise AmendmentError(f"give either eta or countdown, got {eta!r} and {countdown!r}")
    due = _milliseconds(eta if eta is not None else _after(countdown), now)
    record = Postpone(name, due, now)
    _amend(lambda amendments: amendments.write([record]), connection)


def replace(signature: Any, task_id: str, **options: Any) -> Any:
    """Send a task in place of the one that waits with the same id, and return its result.

    Of all that were sent with this id, only the latest runs: with other arguments, or at another
    time, earlier or later. What it replaces is to be due within ``amendments_max_age`` from now.

    :param signature: of the task, with its new arguments.
    :param task_id: of the task that waits, and of the new one.
    :param options: as for ``signature.apply_async``, such as ``countdown`` or ``eta``.
    :raises AmendmentError: as for :func:`cancel`. Where that happens after the task was sent, both
        may run; the error says so.
    """
    check_name(task_id, "the id of a task")
    headers = {**(options.pop("headers", None) or {}), REPLACES: task_id}
    return signature.apply_async(task_id=task_id, headers=headers, **options)


def _names(tasks: Any) -> Iterator[Any]:
    if isinstance(tasks, str) or not isinstance(tasks, Iterable) or hasattr(tasks, "id"):
        children = getattr(tasks, "results", None)
        if children is not None:
            # A group's.
            yield from _names(children)
        else:
            yield getattr(tasks, "id", tasks)
    else:
        for each in tasks:
            yield from _names(each)


def _amend(write: Callable[[Amendments], None], connection: Any) -> None:
    with _connected(connection) as connected:
        for attempt in range(2):
            try:
                connected.ensure_connection(max_retries=3)
                mechanism = mechanism_of(connected.connection)
                if mechanism is None:
                    raise AmendmentError(
                        f"{connected.as_uri()} is a connection without the transport "
                        f"kombu_binary_delay:Transport; give one that has it"
                    )
                mechanism.amendments.require()
                write(mechanism.amendments)
            except connected.connection_errors:  # noqa: PERF203 - two attempts are no loop
                # To write a record twice changes nothing.
                connected.collect()
                if attempt:
                    raise
            else:
                return


@contextmanager
def _connected(connection: Any) -> Iterator[Any]:
    if connection is not None:
        yield connection
        return
    try:
        from celery import current_app  # noqa: PLC0415 - Celery is no dependency
    except ImportError:
        raise AmendmentError("give the connection, since there is no Celery here") from None
    with current_app.connection_or_acquire() as pooled:
        yield pooled


def _after(countdown: Any) -> datetime:
    try:
        return datetime.now(timezone.utc) + timedelta(seconds=countdown)
    except (TypeError, ValueError, OverflowError):
        raise AmendmentError(f"countdown must be a number of seconds, got {countdown!r}") from None


def _milliseconds(eta: Any, now: int) -> int:
    if not isinstance(eta, datetime) or eta.tzinfo is None:
        raise AmendmentError(f"eta must be a datetime that is aware of its time zone, got {eta!r}")
    due = (eta - _EPOCH) // timedelta(milliseconds=1)
    if due <= now:
        raise AmendmentError(f"{eta.isoformat()} has passed; give a time that is still to come")
    return due


def _now() -> int:
    return time.time_ns() // 1_000_000
