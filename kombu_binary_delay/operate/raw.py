"""Publish a message again that py-amqp cannot decode, with the bytes that came. Pure.

Its properties are cut into pieces, each as it was encoded, so what must not travel along can be
left out: of a copy in one queue, the keys for other queues, and the time after which it expires.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from typing import Any

import amqp
from amqp.serialization import dumps

from kombu_binary_delay.ladder.envelope import HEADERS
from kombu_binary_delay.wire.header_frames import find_headers
from kombu_binary_delay.wire.undecodable import RawProperties

_PROPERTIES: list[tuple[str, str]] = amqp.Message.PROPERTIES
#: What is before the table in the payload of a header frame of a message with headers only.
_BEFORE_TABLE = bytes(12) + b"\x20\0"
#: The bytes of an AMQP frame and of its header frame's payload around the properties.
_AROUND = 8 + 12
_size = struct.Struct(">I").unpack_from


def raw_copy(
    body: bytes,
    properties: bytes,
    *,
    without: Collection[str] = (),
    note: tuple[str, Mapping[str, Any]] | None = None,
    largest: int = 0,
) -> Any:
    """Return a message to publish.

    :param properties: the property flags and the properties, as in a header frame.
    :param without: the headers and properties to leave out.
    :param note: a header to add, with what was left out in its table; it is not added if the
        message would then not fit into a frame.
    :param largest: the largest frame, in bytes.
    """
    parts = split(properties)
    left_out = [
        _field(name, b"S", _counted(parts.pop(name)[1:]))
        for name in without
        if name in parts and name != HEADERS
    ]
    table = parts.get(HEADERS, bytes(4))[4:]
    names = {name.encode() for name in without}
    # A table can have two fields of one name.
    while headers := find_headers(_BEFORE_TABLE + _counted(table), names):
        begin, _, end = (at - len(_BEFORE_TABLE) - 4 for at in next(iter(headers.values())))
        left_out.append(table[begin:end])
        table = table[:begin] + table[end:]
    if table or HEADERS in parts:
        parts[HEADERS] = _counted(table)
    if note is not None:
        name, values = note
        fields = b"".join((dumps("F", (dict(values),))[4:], *left_out))
        noted = {**parts, HEADERS: _counted(table + _field(name, b"F", _counted(fields)))}
        if len(joined(noted)) + _AROUND <= largest:
            parts = noted
    message = amqp.Message(body)
    user = parts.get("user_id", b"\0")[1:].decode(errors="replace")
    message.properties = RawProperties(joined(parts), **({"user_id": user} if user else {}))
    return message


def split(properties: bytes) -> dict[str, bytes]:
    """Return the properties by name, each as it is encoded: the inverse of :func:`joined`."""
    flags, at = int.from_bytes(properties[:2], "big"), 2
    parts = {}
    for place, (name, kind) in enumerate(_PROPERTIES):
        if not flags & 1 << (15 - place):
            continue
        if kind == "s":
            size = 1 + properties[at]
        elif kind == "F":
            size = 4 + _size(properties, at)[0]
        else:
            size = {"o": 1, "L": 8}[kind]
        parts[name] = properties[at : at + size]
        at += size
    return parts


def joined(parts: Mapping[str, bytes]) -> bytes:
    """Return the property flags and the properties: the inverse of :func:`split`."""
    flags = sum(1 << (15 - at) for at, (name, _) in enumerate(_PROPERTIES) if name in parts)
    values = (parts[name] for name, _ in _PROPERTIES if name in parts)
    return b"".join((flags.to_bytes(2, "big"), *values))


def _field(name: str, kind: bytes, value: bytes) -> bytes:
    return b"".join((len(name).to_bytes(1, "big"), name.encode(), kind, value))


def _counted(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data
