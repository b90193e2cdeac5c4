"""Read the destination and the due time of a waiting message. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from kombu_binary_delay.amendments.parts import exchange_name, way_of_records
from kombu_binary_delay.errors import AddressError, DelayError, LadderError
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.delay import ETA, TASK, bounded, due_time
from kombu_binary_delay.ladder.envelope import HEADERS, carried, due_in, unwrap
from kombu_binary_delay.ladder.recognise import parking_of
from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.publishing.way_out import Outgoing, back_onto

#: NServiceBus's header with the send time, in the form ``2030-01-31 12:00:00:000000 Z``. A delayed
#: retry keeps the first send time, and has its own in another header.
TIME_SENT = "NServiceBus.TimeSent"
TIME_RETRIED = "NServiceBus.Retries.Timestamp"
_TIME_SENT_FORMAT = "%Y-%m-%d %H:%M:%S:%f Z"
#: The number that NServiceBus gives each publish for its confirms; it must not be sent again.
_CONFIRMATION = "NServiceBus.Transport.RabbitMQ.ConfirmationId"
#: The errors that reading a malformed message of another program can raise.
UNREADABLE_ERRORS = (
    AddressError,
    DelayError,
    LadderError,
    ValueError,
    TypeError,
    ArithmeticError,
    LookupError,
)
#: Stands for the destination of a message without an address. No queue has an empty name.
UNREADABLE = Destination("", "")


@dataclass(frozen=True)
class Reading:
    """A message as it was before it was delayed; ``due`` in milliseconds since the epoch."""

    destination: Destination
    due: int
    properties: dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A queue in which messages wait.

    :param name: the queue's name.
    :param topology: its ladder; None for an ordinary queue.
    :param wait: how long messages wait in it, in milliseconds; 0 for an ordinary queue.
    :param level: its level; 0 for a direct queue.
    """

    name: str
    topology: Topology | None = None
    wait: int = 0
    level: int = 0


def sources(topology: Topology, existing: Mapping[str, Any]) -> tuple[Source, ...]:
    """Return the existing queues of a ladder, the longest wait first.

    In this order, a message that moves down meanwhile is read again, and none is missed.

    :param existing: the existing queues by name; only the names are read.
    """
    queues = [
        Source(queue.name, topology, queue.wait or 0, level)
        for level, part in enumerate(topology.levels)
        for queue in part.queues
    ]
    waits = delay_queues(topology, existing)
    queues += [Source(name, topology, wait) for name, wait in waits.items()]
    queues = [queue for queue in queues if queue.name in existing]
    return tuple(sorted(queues, key=lambda queue: -queue.wait))


def delay_queues(topology: Topology, names: Iterable[str]) -> dict[str, int]:
    """Return the direct queues among names of queues, with their delays in milliseconds."""
    if not topology.is_ours:
        return {}
    name = re.compile(re.escape(f"{topology.direct}.") + "([1-9][0-9]{0,15})ms", re.ASCII)
    matches = {queue: name.fullmatch(queue) for queue in names}
    return {queue: int(match[1]) for queue, match in matches.items() if match}


def read_address(topology: Topology, key: str, carried: Destination | None = None) -> Destination:
    """Read the destination in the address of a message that has left its ladder.

    A consumer of another namespace that sends a message again can put the address that it came with
    into a new one, so an address can contain an address.

    :returns: :data:`UNREADABLE` if there is no destination.
    """
    destination = UNREADABLE
    with suppress(AddressError):
        # What was parked may have waited on another ladder with this delivery side.
        destination = topology.destination(key, carried)
        while parking_of(destination.exchange):
            destination = topology.destination(destination.routing_key, carried)
    return destination


def read(
    source: Source,
    key: str,
    properties: Mapping[str, Any],
    now: int,
    exchange_of: Callable[[str], str] | None = None,
) -> Reading | None:
    """Read a message in a queue; None if it asks for no delay.

    :param key: the routing key that it came with.
    :param now: milliseconds since the epoch.
    :param exchange_of: returns the exchange for a routing key, for addresses without an exchange.
    :raises AddressError: if its destination cannot be read.
    :raises DelayError: if its due time cannot be read.
    """
    packed = dict(properties)
    headers = dict(packed.get(HEADERS) or {})
    packed[HEADERS] = headers
    if source.topology is None:
        due = _eta(headers)
        if due is None or due <= now:
            return None
        # To this queue only: other queues of its exchange, or of its CC, have their own copies.
        headers.pop("CC", None)
        return Reading(Destination("", source.name), due, packed)
    topology = source.topology
    digits, destination = topology.parse(key, carried(headers))
    if not topology.is_ours and exchange_of is not None:
        exchange = exchange_of(destination.routing_key)
        destination = Destination(exchange, destination.routing_key)
    due = _due(headers)
    if due is None:
        # The whole wait of this queue and of the remaining digits.
        lower = digits[len(digits) - source.level :] if source.level <= len(digits) else digits
        rest = topology.ladder.delay(lower) if source.level else 0
        due = now + source.wait + rest
        stated = _stated_due(headers, topology.delay_header)
        # A time that is impossible at this level is from an earlier publish, or another clock.
        if stated is not None and now + rest <= stated <= due:
            due = stated
    unwrap(packed, topology.owns, is_read=False)
    headers.pop(_CONFIRMATION, None)
    return Reading(destination, due, packed)


def put_back(
    source: Source, key: str, properties: dict[str, Any], now: int, came_by: str = ""
) -> Outgoing | None:
    """Return how to publish a waiting message to its ladder again, for the rest of its delay.

    :param came_by: the exchange by which it came into its queue. A record of amendments counts by
        the one that it was published to, and so goes there again, if it has come from there.
    :returns: all but the digits as it was; None where it cannot be read, or would no longer count.
    """
    topology = source.topology
    try:
        reading = read(source, key, properties, now)
        if topology is None or reading is None:
            return None
        digits, destination = topology.parse(key, carried(properties.get(HEADERS) or {}))
        left = topology.ladder.digits(max(reading.due - now, 1))
    except UNREADABLE_ERRORS:
        return None
    if len(left) > len(digits):
        # It is due later than its level can hold it, and higher levels may not exist.
        return None
    exchange = topology.level_of(left)
    if destination == way_of_records(topology):
        if came_by != exchange_name(topology.namespace):
            return None
        # It has a way to the level by which it entered, and to none below.
        levels = range(len(digits) - 1, len(left) - 1, -1)
        left = (*(topology.ladder.word(level, 0) for level in levels), *left)
        exchange = came_by
    return back_onto(topology, properties, Destination(exchange, key), len(digits), left)


def _due(headers: Mapping[str, Any]) -> int | None:
    # A worker without the transport sends our header again with a retry, and a newer eta.
    times = (due_in(headers), _eta(headers))
    return max((time for time in times if time is not None), default=None)


def _stated_due(headers: Mapping[str, Any], delay_header: str | None) -> int | None:
    """Return the due time from the headers of NServiceBus."""
    if delay_header is None or delay_header not in headers or TIME_SENT not in headers:
        return None
    sent = max(_sent(name, headers[name]) for name in (TIME_SENT, TIME_RETRIED) if name in headers)
    return sent + _seconds(headers[delay_header]) * 1000


def _eta(headers: Mapping[str, Any]) -> int | None:
    if headers.get(ETA) is None or TASK not in headers:
        return None
    due = due_time({ETA: headers[ETA], TASK: headers[TASK]}, 0)
    return None if due is None else bounded(-(-due // 1000))


def _sent(name: str, value: object) -> int:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    try:
        sent = datetime.strptime(text, _TIME_SENT_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        raise DelayError(f"{name} is {text!r}, which is not a valid time") from None
    return -((datetime(1970, 1, 1, tzinfo=UTC) - sent) // timedelta(milliseconds=1))


def _seconds(value: object) -> int:
    if isinstance(value, (int, str, bytes)):
        try:
            return int(value)
        except ValueError:
            pass
    raise DelayError(f"{value!r} is not a valid delay in seconds")
