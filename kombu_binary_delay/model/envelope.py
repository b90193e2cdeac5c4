"""What travels with a delayed message, and how it is taken off again. Pure.

One header, :data:`HEADER`, holds a table: the absolute ``due`` time in milliseconds since the
epoch, and whatever the ladder would spoil on its way and the consumer must find as it was:

* ``expiration``: the per-message TTL, which would cut the delay short.
* ``death``: the ``x-death`` headers that were there before. RabbitMQ before 4.0.1 takes them for a
  dead-letter cycle and drops the message.
* ``to``: the destination, where the address holds only its digest.
* ``cc``: the ``CC`` header, whose keys become addresses of their own.
* ``as``: the destination that the consumer is told, where the address leads to its queue alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

from .address import Destination, has_digest
from .delay import X_DELAY

HEADER = "x-binary-delay"
_HEADERS = "application_headers"
_DEATHS = "x-death"
#: The newest death is the first in the list; these repeat its two ends.
_ENDS = {
    f"x-{end}-death-{part}": (position, part)
    for end, position in (("first", -1), ("last", 0))
    for part in ("exchange", "queue", "reason")
}
_DEATH_HEADERS = (_DEATHS, *_ENDS)
#: The headers with further routing keys.
COPIES = ("CC", "BCC")
#: What a message on its first way out seldom has.
_RARE = frozenset({HEADER, *_DEATH_HEADERS, *COPIES})

Owns = Callable[[object], bool]


def wrap(
    properties: dict[str, Any],
    destination: Destination,
    due: int,
    address: Callable[[Destination], str],
    owns: Owns,
) -> tuple[dict[str, Any], str]:
    """Pack a message's properties for the ladder, without changing the ones given.

    :param due: milliseconds since the epoch.
    :param address: writes the routing key for a destination.
    :param owns: returns whether a queue's name is a ladder's.
    :returns: the properties and the routing key to publish with.
    """
    headers = dict(properties.get(_HEADERS) or {})
    packed: dict[str, Any] = {"due": due}
    key = address(destination)
    if has_digest(key):
        packed["to"] = [destination.exchange, destination.routing_key]
    headers.pop(X_DELAY, None)
    if not _RARE.isdisjoint(headers):
        _take_off(headers, owns)
        deaths = {name: headers.pop(name) for name in _DEATH_HEADERS if name in headers}
        if deaths:
            packed["death"] = deaths
        for name, keys in _copies(headers):
            headers[name] = [address(Destination(destination.exchange, each)) for each in keys]
            if name == "CC":
                packed["cc"] = keys
    properties = dict(properties)
    if properties.get("expiration") is not None:
        packed["expiration"] = properties.pop("expiration")
    headers[HEADER] = packed
    properties[_HEADERS] = headers
    return properties, key


def further_keys(headers: dict[str, Any]) -> list[str]:
    """List the routing keys that a message has besides its own."""
    if headers.keys().isdisjoint(COPIES):
        return []
    return [key for _, keys in _copies(headers) for key in keys]


def seen_as(headers: dict[str, Any], destination: Destination, copies: dict[str, Any]) -> None:
    """Note, in place, how a wrapped message was published that now goes to one queue alone.

    :param copies: its headers with further routing keys, which were taken off.
    """
    packed = {**(headers.get(HEADER) or {}), "as": list(destination)}
    if _is_list_of_str(copies.get("CC")):
        packed["cc"] = copies["CC"]
    headers[HEADER] = packed


def published_as(headers: dict[str, Any]) -> Destination | None:
    """Read what :func:`seen_as` noted, if it did."""
    packed = headers.get(HEADER)
    noted = packed.get("as") if isinstance(packed, dict) else None
    if not _is_list_of_str(noted) or len(noted) != 2:
        return None
    return Destination(noted[0], noted[1])


def carried(headers: dict[str, Any]) -> Destination | None:
    """Read the destination that travels beside an address with a digest, if one does."""
    packed = headers.get(HEADER)
    to = packed.get("to") if isinstance(packed, dict) else None
    if not _is_list_of_str(to) or len(to) != 2:
        return None
    return Destination(to[0], to[1])


def unwrap(properties: dict[str, Any], owns: Owns) -> None:
    """Take off, in place, all that the ladder added, and put back what it kept.

    What is not as :func:`wrap` packs it is somebody else's doing, and is left out quietly.
    """
    headers = properties[_HEADERS]
    packed = headers.get(HEADER)
    _take_off(headers, owns)
    if not isinstance(packed, dict):
        return
    if isinstance(packed.get("expiration"), str):
        properties["expiration"] = packed["expiration"]
    if _is_list_of_str(packed.get("cc")):
        headers["CC"] = packed["cc"]
    deaths = packed.get("death")
    if isinstance(deaths, dict):
        _put_back(headers, {name: deaths[name] for name in _DEATH_HEADERS if name in deaths})


def _copies(headers: dict[str, Any]) -> list[tuple[str, list[str]]]:
    found = ((name, headers.get(name)) for name in COPIES)
    # RabbitMQ itself refuses what is no list of strings; amqp writes a tuple as one.
    listed = ((name, list(keys) if isinstance(keys, tuple) else keys) for name, keys in found)
    return [(name, keys) for name, keys in listed if _is_list_of_str(keys)]


def _take_off(headers: dict[str, Any], owns: Owns) -> None:
    """Remove our header and every death on a ladder; a user's own deaths stay, in their order."""
    headers.pop(HEADER, None)
    deaths = headers.get(_DEATHS)
    if not isinstance(deaths, list):
        return
    kept = [each for each in deaths if not (isinstance(each, dict) and owns(each.get("queue")))]
    if len(kept) == len(deaths):
        return
    if kept:
        headers[_DEATHS] = kept
    else:
        del headers[_DEATHS]
    for name, (position, part) in _ENDS.items():
        if headers.pop(name, None) is not None and kept and isinstance(kept[position], dict):
            headers[name] = kept[position].get(part)


def _put_back(headers: dict[str, Any], deaths: dict[str, Any]) -> None:
    """Put deaths that are older than the ladder behind those that came after it."""
    newer = headers.get(_DEATHS)
    if isinstance(newer, list) and isinstance(deaths.get(_DEATHS), list):
        last = {name: headers[name] for name in _ENDS if "last" in name and name in headers}
        deaths = {**deaths, _DEATHS: newer + deaths[_DEATHS], **last}
    headers.update(deaths)


def _is_list_of_str(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
