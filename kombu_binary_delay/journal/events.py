"""The journal's events: a message's identity, destination and due time. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from kombu_binary_delay.amendments.record import MAX_BYTES, MAX_TIME, judged_by
from kombu_binary_delay.errors import AddressError, BinaryDelayError
from kombu_binary_delay.ladder.delay import ETA, ID, JITTER, TASK, due_time
from kombu_binary_delay.ladder.envelope import HEADER, HEADERS, carried
from kombu_binary_delay.ladder.identity import id_and_headers, is_celery_task
from kombu_binary_delay.ladder.ladder import hops
from kombu_binary_delay.ladder.topology import Topology

SCHEDULED = "scheduled"
RELEASED = "released"
EXECUTED = "executed"
#: The message with this id does not wait any more. A new ``scheduled`` follows the second.
CANCELLED = "cancelled"
POSTPONED = "postponed"
#: The most characters of a task's args, and of its kwargs, as Celery writes them.
MAX_ARGUMENTS = 256

#: The events of one message say its due time in microseconds with differences smaller than this:
#: some have it from the task's ``eta``, and others from the ladder's header, in milliseconds.
ROUNDING = 1_000_000
#: The latest valid time, in microseconds: the end of the year 9999.
_LATEST = MAX_TIME * 1000
#: Celery's count of retries, and ours of hops, are 32 bits in the tables.
_MAX_COUNT = 2**31 - 1


def scheduled(
    topology: Topology,
    properties: dict[str, Any],
    exchange: str,
    key: str,
    *,
    arguments: bool = True,
) -> dict[str, Any] | None:
    """Return the event of a publish; None if the message was not delayed.

    A message that was already due when it was published has zero hops.

    :param properties: as published.
    :param exchange: as published; it may be that of one of several lanes.
    :param arguments: whether to include the arguments of a task that waits.
    """
    headers = properties.get(HEADERS) or {}
    packed = headers.get(HEADER)
    if isinstance(packed, dict):
        try:
            digits, destination = topology.parse(key, carried(headers))
        except AddressError:
            return None
        event = about(properties, destination.exchange, destination.routing_key)
        event["ladder"] = topology.ladder.name
        if (levels := _levels(topology, exchange)) is not None:
            event["levels"] = levels
        event["hops"] = hops(digits)
        if is_celery_task(headers):
            _call(event, headers, arguments=arguments)
        # The list of waiting tasks uses them to leave out amended ones.
        if judged := judged_by(headers):
            event["generation"] = judged
        return event
    if due(headers) is None:
        return None
    return {**about(properties, exchange, key), "hops": 0}


def _levels(topology: Topology, exchange: str) -> str | None:
    """Return the prefix of the names of the levels that a message passes; None if not known."""
    if not topology.is_ours:
        return topology.prefix
    prefix, _, level = exchange.partition(".level-")
    # With a queue for each delay, the broker decides whether it passes levels at all.
    return prefix if level else None


def about(properties: dict[str, Any], exchange: str, routing_key: str) -> dict[str, Any]:
    """Return the fields of an event that identify a message."""
    name, headers = id_and_headers(properties)
    is_task = is_celery_task(headers)
    # Celery does not know that a task without an eta was delayed, so there is no event when it is
    # executed. Readers of the journal expect that event for each task with a name.
    has_eta = is_task and headers.get("eta") is not None
    retries = headers.get("retries")
    event = {
        "id": name,
        "task": headers["task"] if has_eta else None,
        "retries": retries if is_task and _is_count(retries) else None,
        "exchange": exchange,
        "key": routing_key,
        "due": due(headers),
    }
    return {name: value for name, value in event.items() if value not in (None, "")}


def _call(event: dict[str, Any], headers: Mapping[str, Any], *, arguments: bool) -> None:
    """Add the name of a waiting task, if ``about`` has not, and its arguments."""
    if "task" not in event:
        event["name"] = headers["task"]
    if not arguments:
        return
    for name, header in (("args", "argsrepr"), ("kwargs", "kwargsrepr")):
        written = headers.get(header)
        if isinstance(written, str):
            event[name] = cut(written)


def cut(written: str) -> str:
    """Cut written arguments to :data:`MAX_ARGUMENTS` characters."""
    return written if len(written) <= MAX_ARGUMENTS else f"{written[: MAX_ARGUMENTS - 3]}..."


def due(headers: Mapping[str, Any]) -> int | None:
    """Return the earliest due time that the headers allow; jitter is a part of it.

    :returns: microseconds since the epoch, of the years 1970 to 9999: a time beyond them, which no
        ladder keeps, is the first or the last of these; None for a message that was not delayed.
    """
    asked = {
        name: headers[name] for name in (ETA, TASK, ID, JITTER) if headers.get(name) is not None
    }
    try:
        time = due_time(asked, 0)
    except BinaryDelayError:
        time = None
    packed = headers.get(HEADER)
    if time is None and isinstance(packed, dict) and isinstance(packed.get("due"), int):
        # It was rounded up to milliseconds.
        time = packed["due"] * 1000 - 999
    return None if time is None else min(max(time, 0), _LATEST)


def to_line(event: dict[str, Any]) -> str:
    """Write an event as compact JSON, without a line break.

    :raises TypeError, ValueError: if JSON cannot encode a value of the event.
    """
    return json.dumps(event, separators=(",", ":"))


def lines(body: Any) -> list[str] | list[bytes]:
    """Return the lines of a message of the journal's stream, of an event each."""
    return body.split("\n") if isinstance(body, str) else bytes(body).split(b"\n")


def from_line(line: str | bytes) -> dict[str, Any] | None:
    """Read an event that :func:`to_line` wrote; None if the line is not a valid one.

    Anybody may write to the journal who may write to the default exchange. So what is returned has
    the fields of an event and no others, each of its type, and each number within its limits.
    """
    if len(line) > MAX_BYTES:
        return None
    try:
        read = json.loads(line if isinstance(line, str) else str(line, "utf-8"))
        if not isinstance(read, dict):
            return None
        event = {name: read[name] for name in _FIELDS if read.get(name) is not None}
        if not all(_FIELDS[name](value) for name, value in event.items()):
            return None
        if "generation" in event:
            event["generation"] = judged_by(event["generation"])
    except (ValueError, RecursionError):
        return None
    needed = ("event", "at", "due") if event.get("event") == SCHEDULED else ("event", "at")
    return event if all(name in event for name in needed) else None


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_time(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LATEST


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


#: The fields of an event, and what a value of each is.
_FIELDS: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("event", "id", "task", "name", "args", "kwargs"), _is_text),
    **dict.fromkeys(("exchange", "key", "ladder", "levels", "state"), _is_text),
    **dict.fromkeys(("at", "due", "left"), _is_time),
    **dict.fromkeys(("retries", "hops"), _is_count),
    "generation": _is_table,
}
