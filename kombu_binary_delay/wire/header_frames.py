"""Leave a ladder's deaths out of a message's header frame, before py-amqp decodes it.

RabbitMQ adds an entry to the ``x-death`` header at each wait, and on delivery
:func:`.ladder.envelope.unwrap` removes the ladder's entries. To decode them before takes py-amqp
longer than the rest of the delivery. What is left out here is what would be removed then.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

from kombu_binary_delay.ladder.envelope import DEATH_HEADERS, DEATHS, HEADER, LEFT, Owns

Frame = tuple[int, int, bytes]
#: Where a field of a table begins, where the type of its value is, and where the field ends.
Field = tuple[int, int, int]

#: The type of a header frame (AMQP 0-9-1, section 2.3.5).
HEADER_FRAME = 2
#: The bytes before the property flags: class, weight and the body's size.
_FLAGS = 12
_HAS_CONTENT_TYPE, _HAS_CONTENT_ENCODING, _HAS_HEADERS = 0x80, 0x40, 0x20
_MARK, _DEATHS = HEADER.encode(), DEATHS.encode()
_LADDERS = frozenset((_MARK, *(name.encode() for name in DEATH_HEADERS)))
#: Of the fields of a death, those that are needed.
_QUEUE, _TIME = frozenset([b"queue"]), frozenset([b"time"])
_STRING, _TABLE, _ARRAY, _TIMESTAMP = b"SFAT"
_LEFT = bytes([len(LEFT)]) + LEFT.encode()
#: The types whose values begin with their size, and the sizes of the values of all other types, as
#: RabbitMQ has them: https://www.rabbitmq.com/docs/amqp-0-9-1-errata
_SIZED = frozenset(b"SxAF")
_SIZES = {
    ord(kind): size
    for size, kinds in {0: "V", 1: "tbB", 2: "su", 4: "fiI", 5: "D", 8: "dlLT"}.items()
    for kind in kinds
}
#: Reads a size.
_size = struct.Struct(">I").unpack_from


def leave_out_deaths(connection: Any, owns: Owns, keeps_time: Callable[[], bool]) -> None:
    """Make a connection leave the deaths out of what it reads for channels that remove them.

    :param keeps_time: whether to keep the time of the newest.
    """
    decode: Callable[[Frame], Any] = connection.on_inbound_frame

    def on_inbound_frame(frame: Frame) -> Any:
        # Called for each frame of each message, so the usual case is decided first.
        if frame[0] == HEADER_FRAME and _DEATHS in frame[2]:
            kind, channel_id, payload = frame
            channel = (connection.channels or {}).get(channel_id)
            if getattr(channel, "removes_deaths", False):
                shorter = without_deaths(payload, owns, keep_time=keeps_time())
                return decode((kind, channel_id, shorter))
        return decode(frame)

    connection.on_inbound_frame = on_inbound_frame


def without_deaths(payload: bytes, owns: Owns, *, keep_time: bool = False) -> bytes:
    """Return a header frame's payload without ``x-death`` and the headers that repeat parts of it.

    :param keep_time: whether to add, as a header of its own, the time of the newest death.
    :returns: the payload as it is, unless the message has the ladder's header and every death is
        that of a queue which ``owns`` knows.
    """
    try:
        size = _table(payload)
        if not size:
            return payload
        at = size + 4
        end = at + _size(payload, size)[0]
        fields = _find(payload, at, end, _LADDERS)
        if not (fields.pop(_MARK, None) and _all_owned(payload, fields.get(_DEATHS), owns)):
            return payload
        time = _newest(payload, fields[_DEATHS]) if keep_time else b""
    except (IndexError, struct.error):
        # It ends early: py-amqp says so.
        return payload
    kept = []
    for begin, _, stop in fields.values():
        kept.append(payload[at:begin])
        at = stop
    table = b"".join((*kept, payload[at:end], time))
    return b"".join((payload[:size], len(table).to_bytes(4, "big"), table, payload[end:]))


def find_headers(payload: bytes, names: AbstractSet[bytes]) -> dict[bytes, Field]:
    """Return the headers of these names in a header frame's payload.

    :raises IndexError, struct.error: if the payload ends early.
    """
    size = _table(payload)
    if not size:
        return {}
    return _find(payload, size + 4, size + 4 + _size(payload, size)[0], names)


def _table(payload: bytes) -> int:
    """Return where the size of the table of headers is; 0 if a message has none."""
    flags = payload[_FLAGS]
    if not flags & _HAS_HEADERS:
        return 0
    size = _FLAGS + 2
    for flag in (_HAS_CONTENT_TYPE, _HAS_CONTENT_ENCODING):
        if flags & flag:
            size += 1 + payload[size]
    return size


def _all_owned(payload: bytes, deaths: Field | None, owns: Owns) -> bool:
    """Whether a field has deaths, and each is that of a queue which ``owns`` knows."""
    if deaths is None or payload[deaths[1]] != _ARRAY:
        return False
    at, end = deaths[1] + 5, deaths[2]
    if at == end:
        return False
    while at < end:
        if payload[at] != _TABLE:
            return False
        stop = at + 5 + _size(payload, at + 1)[0]
        queue = _find(payload, at + 5, stop, _QUEUE).get(b"queue")
        if queue is None or not owns(_text(payload, queue)):
            return False
        at = stop
    return True


def _newest(payload: bytes, deaths: Field) -> bytes:
    """Return the header with the time of the newest death; empty if it has none."""
    at = deaths[1] + 5
    stop = at + 5 + _size(payload, at + 1)[0]
    time = _find(payload, at + 5, stop, _TIME).get(b"time")
    if time is None or payload[time[1]] != _TIMESTAMP:
        return b""
    return _LEFT + payload[time[1] : time[2]]


def _text(payload: bytes, field: Field) -> str:
    """Return the value of a field; empty if it is not a string."""
    _, value, stop = field
    # A name that is not UTF-8 belongs to no ladder.
    return payload[value + 5 : stop].decode(errors="replace") if payload[value] == _STRING else ""


def _find(payload: bytes, at: int, end: int, names: AbstractSet[bytes]) -> dict[bytes, Field]:
    """Return the fields of a table that have these names; none if a value's type is unknown."""
    fields = {}
    while at < end:
        value = at + 1 + payload[at]
        kind = payload[value]
        if kind in _SIZED:
            stop = value + 5 + _size(payload, value + 1)[0]
        elif kind in _SIZES:
            stop = value + 1 + _SIZES[kind]
        else:
            return {}
        name = payload[at + 1 : value]
        if name in names:
            fields[name] = (at, value, stop)
            if len(fields) == len(names):
                break
        at = stop
    return fields
