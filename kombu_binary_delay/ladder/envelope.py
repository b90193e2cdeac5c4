"""Add the ladder's header to a delayed message, and remove it on delivery. Pure.

The header :data:`HEADER` holds a table: the absolute ``due`` time in milliseconds since the epoch,
and the properties that the ladder cannot keep in place but the consumer must get back:

* ``expiration``: the per-message TTL, which would cut the delay short.
* ``death``: the ``x-death`` headers that were there before. RabbitMQ before 4.0.1 takes them for a
  dead-letter cycle and drops the message.
* ``to``: the destination, where the address holds only its digest.
* ``cc``: the ``CC`` header, whose keys become addresses of their own.
* ``bcc``: the ``BCC`` header, whose keys become addresses at the end of the ``CC`` header. RabbitMQ
  removes a ``BCC`` header, and 3.10 forgets its keys where it hands a dead letter on again.
* ``as``: the destination to show to the consumer, where the address names its queue instead. Then
  ``cc`` is only to be shown, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeGuard

from kombu_binary_delay.errors import DelayError, shown

from .address import Destination, has_digest
from .delay import ETA, ID, JITTER, TASK, X_DELAY, bounded, due_time
from .ladder import MAX_TTL
from .returns import RETURNS

HEADER = "x-binary-delay"
#: The argument by which to begin to read a stream, and the header of what comes from one.
OFFSET = "x-stream-offset"
#: A message's headers among its properties, by py-amqp's name.
HEADERS = "application_headers"
DEATHS = "x-death"
#: A message's time in the newest death of a ladder, kept of deaths that are left out of its frame.
LEFT = "x-delay-left"
#: The newest death comes first in the list; these headers repeat its first and last entry.
_ENDS = {
    f"x-{end}-death-{part}": (position, part)
    for end, position in (("first", -1), ("last", 0))
    for part in ("exchange", "queue", "reason")
}
DEATH_HEADERS = (DEATHS, *_ENDS)
#: The headers with further routing keys.
COPIES = ("CC", "BCC")
#: Headers that a message seldom has at its first publish.
_RARE = frozenset({HEADER, LEFT, RETURNS, OFFSET, *DEATH_HEADERS, *COPIES})

#: An ``expiration`` as RabbitMQ reads it.
_MILLISECONDS = re.compile(r"0*[0-9]{1,12}", re.ASCII)

Owns = Callable[[object], bool]


def wrap(
    properties: dict[str, Any],
    destination: Destination,
    due: int,
    address: Callable[[Destination], str],
    owns: Owns,
) -> tuple[dict[str, Any], str]:
    """Return a message's properties and routing key for the ladder; the ones given do not change.

    :param due: milliseconds since the epoch.
    :param address: writes the routing key for a destination.
    :param owns: returns whether a queue belongs to a ladder, by its name.
    :returns: the properties and the routing key to publish with.
    :raises DelayError: if RabbitMQ would refuse its ``expiration``.
    """
    headers = dict(properties.get(HEADERS) or {})
    packed: dict[str, Any] = {"due": due}
    key = address(destination)
    if has_digest(key):
        packed["to"] = [destination.exchange, destination.routing_key]
    headers.pop(X_DELAY, None)
    if not _RARE.isdisjoint(headers):
        _take_off(headers, owns)
        # A retry has those of its task. It has not come back yet, and is in no stream.
        for name in (RETURNS, OFFSET):
            headers.pop(name, None)
        deaths = {name: headers.pop(name) for name in DEATH_HEADERS if name in headers}
        if deaths:
            packed["death"] = deaths
        copies = dict(_copies(headers))
        # RabbitMQ refuses a message with any other such header.
        if copies and copies.keys() == headers.keys() & set(COPIES):
            headers.pop("BCC", None)
            keys = further_keys(copies)
            headers["CC"] = [address(Destination(destination.exchange, key)) for key in keys]
            packed |= {name.lower(): keys for name, keys in copies.items()}
    properties = dict(properties)
    if (expiration := properties.pop("expiration", None)) is not None:
        if not is_expiration(expiration):
            raise DelayError(
                f"expiration must be a number of milliseconds from 0 to {MAX_TTL}, as text, got "
                f"{shown(expiration)}; leave it out for none"
            )
        packed["expiration"] = expiration
    headers[HEADER] = packed
    properties[HEADERS] = headers
    return properties, key


def due_in(headers: Mapping[str, Any]) -> int | None:
    """Return the due time in the ladder's header, in milliseconds since the epoch; None if none is.

    :raises DelayError: if it is after the year 9999.
    """
    packed = headers.get(HEADER)
    due = packed.get("due") if isinstance(packed, dict) else None
    return bounded(int(due)) if isinstance(due, int) else None


def due_of(headers: Mapping[str, Any]) -> int | None:
    """Return when a message that comes from a ladder was due, in microseconds since the epoch.

    :returns: None if neither the ladder's header nor an ``eta`` says it.
    """
    try:
        due = due_in(headers)
        if due is not None:
            return due * 1000
        asked = {name: headers[name] for name in (ETA, TASK, ID, JITTER) if name in headers}
        return due_time(asked, 0)
    except DelayError:
        return None


def left_at(headers: Mapping[str, Any], owns: Owns) -> int | None:
    """Return when a message left its last level, in whole seconds since the epoch, by the broker.

    :returns: None if its headers do not say.
    """
    left = headers.get(LEFT)
    deaths = headers.get(DEATHS)
    if left is None and isinstance(deaths, list):
        ours = (death for death in deaths if isinstance(death, dict) and owns(death.get("queue")))
        left = next(ours, {}).get("time")
    if not isinstance(left, datetime):
        return None
    return int((left if left.tzinfo else left.replace(tzinfo=UTC)).timestamp())


def further_keys(headers: dict[str, Any]) -> list[str]:
    """List the routing keys in a message's ``CC`` and ``BCC`` headers."""
    if headers.keys().isdisjoint(COPIES):
        return []
    return [key for _, keys in _copies(headers) for key in keys]


def _blind_keys(headers: dict[str, Any]) -> list[str]:
    """Return the keys of the ``BCC`` header that a wrapped message had."""
    packed = headers.get(HEADER)
    keys = packed.get("bcc") if isinstance(packed, dict) else None
    return keys if _is_list_of_str(keys) else []


def seen_as(headers: dict[str, Any], destination: Destination, copies: dict[str, Any]) -> None:
    """Record, in place, how a wrapped message was published that now goes to one queue only.

    :param copies: its ``CC`` and ``BCC`` headers, which were removed.
    """
    packed = {**(headers.get(HEADER) or {}), "as": list(destination)}
    if _is_list_of_str(copies.get("CC")):
        packed["cc"] = copies["CC"]
    headers[HEADER] = packed


def published_as(headers: dict[str, Any]) -> tuple[Destination, dict[str, Any]] | None:
    """Return the destination and the ``CC`` header that :func:`seen_as` recorded; None if not."""
    packed = headers.get(HEADER)
    if not isinstance(packed, dict):
        return None
    noted = packed.get("as")
    if not _is_list_of_str(noted) or len(noted) != 2:
        return None
    copies = {"CC": packed["cc"]} if _is_list_of_str(packed.get("cc")) else {}
    return Destination(noted[0], noted[1]), copies


def carried(headers: dict[str, Any]) -> Destination | None:
    """Return the destination in the ladder's header; None if it has none."""
    packed = headers.get(HEADER)
    to = packed.get("to") if isinstance(packed, dict) else None
    if not _is_list_of_str(to) or len(to) != 2:
        return None
    return Destination(to[0], to[1])


def unwrap(properties: dict[str, Any], owns: Owns, *, is_read: bool = True) -> None:
    """Remove, in place, everything that the ladder added, and restore what its header kept.

    The result may be published again: a message that goes to one queue only, by :func:`seen_as`,
    gets no ``CC``. Values that :func:`wrap` would not write come from another program; they are
    ignored.

    :param is_read: whether a consumer gets it, who must not see a ``BCC``. What is published again
        in its place needs it.
    """
    headers = properties[HEADERS]
    packed = headers.get(HEADER)
    blind = _blind_keys(headers)
    _take_off(headers, owns)
    if not isinstance(packed, dict):
        return
    if is_expiration(packed.get("expiration")):
        properties["expiration"] = packed["expiration"]
    if blind:
        headers.pop("CC", None)
        if not is_read:
            headers["BCC"] = blind
    if _is_list_of_str(packed.get("cc")) and published_as({HEADER: packed}) is None:
        headers["CC"] = packed["cc"]
    deaths = packed.get("death")
    if isinstance(deaths, dict):
        _put_back(headers, {name: deaths[name] for name in DEATH_HEADERS if name in deaths})


def name_deaths(
    headers: dict[str, Any],
    wrapped: dict[str, Any],
    published: Callable[[str, str], Destination | None],
) -> None:
    """Write, in place, the user's names into the deaths of a message that a ladder had delivered.

    RabbitMQ records the exchange and the keys by which the message came to the queue.

    :param wrapped: the headers as they came. Those keys that were in a ``BCC`` are left out.
    :param published: returns the destination that an exchange and a key of a ladder stand for; None
        if they are none.
    """
    deaths = headers.get(DEATHS)
    if not isinstance(deaths, list):
        return
    blind = len(_blind_keys(wrapped))
    addresses = wrapped.get("CC") if blind else None
    hidden = frozenset(addresses[-blind:]) if _is_list_of_str(addresses) else frozenset()
    named = [_named_death(death, published, hidden) for death in deaths]
    if named == deaths:
        return
    headers[DEATHS] = named
    for name, (position, part) in _ENDS.items():
        if part == "exchange" and name in headers and deaths[position] != named[position]:
            headers[name] = named[position][part]


def _named_death(
    death: Any, published: Callable[[str, str], Destination | None], hidden: frozenset[str]
) -> Any:
    keys = death.get("routing-keys") if isinstance(death, dict) else None
    exchange = death.get("exchange") if isinstance(death, dict) else None
    if not (isinstance(exchange, str) and _is_list_of_str(keys)):
        return death
    keys = keys[:1] + [key for key in keys[1:] if key not in hidden]
    meant = [published(exchange, key) for key in keys]
    originals = [original for original in meant if original is not None]
    if not originals:
        return death
    return {
        **death,
        "exchange": originals[0].exchange,
        "routing-keys": [
            key if original is None else original.routing_key
            for key, original in zip(keys, meant, strict=True)
        ],
    }


def _copies(headers: dict[str, Any]) -> list[tuple[str, list[str]]]:
    values = ((name, headers.get(name)) for name in COPIES)
    # RabbitMQ refuses anything but a list of strings; amqp writes a tuple as a list.
    listed = ((name, _texts(keys)) for name, keys in values)
    return [(name, keys) for name, keys in listed if _is_list_of_str(keys)]


def _texts(keys: object) -> object:
    if not isinstance(keys, (list, tuple)):
        return keys
    # amqp writes bytes as it writes the text that they encode.
    return [str(key, errors="replace") if isinstance(key, bytes) else key for key in keys]


def _take_off(headers: dict[str, Any], owns: Owns) -> None:
    """Remove our header and every death on a ladder; other deaths stay, in their order."""
    headers.pop(HEADER, None)
    headers.pop(LEFT, None)
    deaths = headers.get(DEATHS)
    if not isinstance(deaths, list):
        return
    kept = [death for death in deaths if not (isinstance(death, dict) and owns(death.get("queue")))]
    if len(kept) == len(deaths):
        return
    if not kept:
        for name in DEATH_HEADERS:
            headers.pop(name, None)
        return
    headers[DEATHS] = kept
    for name, (position, part) in _ENDS.items():
        if headers.pop(name, None) is not None and isinstance(kept[position], dict):
            headers[name] = kept[position].get(part)


def _put_back(headers: dict[str, Any], deaths: dict[str, Any]) -> None:
    """Put the deaths from before the ladder behind those that came after it."""
    newer = headers.get(DEATHS)
    if isinstance(newer, list) and isinstance(deaths.get(DEATHS), list):
        last = {name: headers[name] for name in _ENDS if "last" in name and name in headers}
        deaths = {**deaths, DEATHS: newer + deaths[DEATHS], **last}
    headers.update(deaths)


def is_expiration(value: object) -> bool:
    """Return whether RabbitMQ takes a value for the ``expiration`` of a message."""
    # With any other, the broker would close the channel that publishes the message again.
    return isinstance(value, str) and bool(_MILLISECONDS.fullmatch(value)) and int(value) <= MAX_TTL


def _is_list_of_str(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(element, str) for element in value)
