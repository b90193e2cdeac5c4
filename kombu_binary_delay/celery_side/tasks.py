"""What a channel needs to know of Celery's tasks: revokes, consumers, and what is sent again.

Revokes are recorded, so that they survive restarts of the workers.

Every way to revoke a task ends in a broadcast to the running workers, which keep it in memory, for
at most three hours and 50,000 ids. So the transport reads the broadcast before it is published, and
records it first. When the task arrives, Celery asks whether its id is in the worker's set of
revoked ids, and is told that it is: Celery itself then discards the task as usual. The set is left
alone. A full one drops an id for each new one, or the new one itself, if the others are from hosts
that have been up for longer.

This module must not import Celery: a Kombu program may not have it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from kombu.exceptions import KombuError
from kombu.log import get_logger
from kombu.serialization import loads

from kombu_binary_delay.amendments.record import (
    GENERATION,
    KEY,
    LONGEST_WAIT,
    MAX_IDS,
    MAX_NAME,
    REPLACES,
    CancelStamped,
    Record,
    split,
)
from kombu_binary_delay.amendments.stream import Amendments
from kombu_binary_delay.ladder.delay import (
    CHORD_UNLOCK,
    EXPIRES,
    ID,
    JITTER,
    RETRIES,
    TASK,
    X_DELAY,
)
from kombu_binary_delay.telemetry.watch import DELIVERED
from kombu_binary_delay.wire.repeating import Warnings

from .patch import replace
from .worker_log import NOT_RECORDED

logger = get_logger(__package__)
_warnings = Warnings(logger)

#: The end of the names of the exchanges for broadcasts to workers and for the replies.
BROADCASTS = ".pidbox"
#: The beginning of the latter.
REPLIES = "reply."
#: The header of a task with the headers that its retries get, instead of the task's own. Tools that
#: trace tasks write it.
NESTED = "headers"
#: The headers of this transport that say which message this is, among those that supersede others.
_IDENTITY = KEY, LONGEST_WAIT, REPLACES, GENERATION
#: The headers of this transport that a retry gets if its task has them.
_KEPT = X_DELAY, JITTER, EXPIRES, *_IDENTITY
#: The id of the task that is to be discarded in this thread or greenlet, and whether Celery has
#: asked for it.
_discarded: ContextVar[dict[str, bool] | None] = ContextVar("discarded", default=None)


def record_broadcast(amendments: Amendments, message: Any, exchange: str) -> None:
    """Record what a broadcast of Celery's revokes, before it is published.

    Where the broker may have no streams, one line in the log says that it is only sent.

    :param exchange: that it goes to; replies go to others.
    """
    why = amendments.why_impossible
    if exchange.startswith(REPLIES) or not (amendments.is_possible or why):
        return
    now = time.time_ns() // 1_000_000
    try:
        records = records_of_broadcast(message.properties, message.body, now)
        if records and why:
            _warnings.warn(f"{NOT_RECORDED}: {why}")
        elif records:
            amendments.write(records)
    except KombuError as exc:
        logger.warning("%s: %s", NOT_RECORDED, exc)


def records_of_broadcast(properties: Mapping[str, Any], body: Any, now: int) -> list[Record]:
    """Return the records for a broadcast; none if it does not revoke anything for all workers.

    A broadcast to some of the workers is not recorded.

    :param now: milliseconds since the epoch.
    :raises KombuError: if the broadcast cannot be decoded.
    """
    content_type = properties.get("content_type")
    # This process has just written it.
    command = loads(
        body, content_type, properties.get("content_encoding") or "utf-8", accept={content_type}
    )
    if not isinstance(command, Mapping) or any(
        command.get(option) for option in ("destination", "pattern", "matcher")
    ):
        return []
    given = command.get("arguments")
    given = given if isinstance(given, Mapping) else {}
    method = command.get("method")
    if method in ("revoke", "terminate"):
        return list(split(filter(_is_name, _listed(given.get("task_id"))), now))
    if method == "revoke_by_stamped_headers":
        return list(_stamped(given.get("headers"), now))
    return []


def may_revoke(body: Any) -> bool:
    """Return whether a broadcast may revoke something, by its body, in any usual serialization."""
    text = body if isinstance(body, str) else bytes(body).decode("latin-1")
    return "revoke" in text or "terminate" in text


def _stamped(headers: Any, now: int) -> Iterator[CancelStamped]:
    if isinstance(headers, list):
        # Celery reads the arguments of its command line in this way.
        pairs = [str(header).split("=") for header in headers]
        headers = {pair[0]: pair[1] for pair in pairs if len(pair) > 1}
    if not isinstance(headers, Mapping):
        return
    for name, values in headers.items():
        listed = [value for value in map(str, _listed(values)) if value]
        for begin in range(0, len(listed), MAX_IDS):
            yield CancelStamped(((str(name), tuple(listed[begin : begin + MAX_IDS])),), now)


def hears_broadcasts(queue: str) -> bool:
    """Whether what is in a queue are broadcasts to workers."""
    return queue.endswith(BROADCASTS)


def is_worker(callback: Any) -> bool:
    """Whether a consumer's callback is a Celery worker's, which discards revoked tasks itself."""
    on_message = getattr(getattr(callback, "__self__", None), "on_message", None)
    return str(getattr(on_message, "__module__", "")).startswith("celery.worker.")


def reads_results(callback: Any) -> bool:
    """Whether a consumer's callback is that of Celery's result backend ``rpc://``."""
    callbacks = getattr(getattr(callback, "__self__", None), "callbacks", None) or ()
    return any(
        str(getattr(function, "__module__", "")).startswith("celery.backends.")
        for function in callbacks
    )


def with_own_nested(headers: dict[str, Any]) -> dict[str, Any]:
    """Return the headers of a task that arrives, so that its retries keep those of this transport.

    What is nested becomes as outside: there, the transport has added its headers, and removed the
    delay that has passed.
    """
    nested = headers.get(NESTED)
    if TASK not in headers or not isinstance(nested, Mapping):
        return headers
    others = {name: nested[name] for name in nested if name not in _KEPT}
    return {**headers, NESTED: others | {name: headers[name] for name in _KEPT if name in headers}}


def as_resent(headers: dict[str, Any]) -> dict[str, Any]:
    """Return the headers of a task as they are to be published, where Celery makes them of others.

    A retry stays the same message also where ``retry(headers=...)`` replaces its task's headers.
    The task that polls a chord is none of the messages that its body's headers are about: Celery
    5.7 copies them.
    """
    if DELIVERED in headers:
        # How late the message was that this one comes from.
        headers = {name: headers[name] for name in headers if name != DELIVERED}
    if headers[TASK] == CHORD_UNLOCK:
        if any(name in headers for name in _KEPT):
            return {name: headers[name] for name in headers if name not in _KEPT}
    elif headers.get(RETRIES) and not (GENERATION in headers or REPLACES in headers):
        before = _headers_of_running(headers.get(ID))
        identity = {name: before[name] for name in _IDENTITY if name in before}
        if identity:
            others = {name: headers[name] for name in headers if name not in _IDENTITY}
            return {**others, **identity}
    return headers


def _headers_of_running(task_id: Any) -> Mapping[str, Any]:
    """Return the headers of the task that runs here, if it has this id."""
    state = sys.modules.get("celery._state")
    task = state and state.get_current_worker_task()
    request = getattr(task, "request", None)
    return (request is not None and request.id == task_id and request.headers) or {}


def discard(task_id: str, receive: Callable[[], object]) -> bool:
    """Make this process's worker discard the task that it receives in this call, and no other.

    :returns: whether Celery asked if the task is revoked. Otherwise it may run.
    """
    collections = sys.modules.get("celery.utils.collections")
    replace(getattr(collections, "LimitedSet", None), "__contains__", _contains_discarded)
    asked = {task_id: False}
    token = _discarded.set(asked)
    try:
        receive()
    finally:
        _discarded.reset(token)
    return asked[task_id]


def _contains_discarded(contains: Any) -> Any:
    def contains_discarded(ids: Any, task_id: Any) -> Any:
        asked = _discarded.get()
        if asked is not None and task_id in asked:
            asked[task_id] = True
            return True
        return contains(ids, task_id)

    return contains_discarded


def accept_here(task_id: str) -> None:
    """Make this process's worker accept a task that replaces a revoked one with the same id."""
    state = sys.modules.get("celery.worker.state")
    if state is not None:
        state.revoked.discard(task_id)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value.encode(errors="replace")) <= MAX_NAME
