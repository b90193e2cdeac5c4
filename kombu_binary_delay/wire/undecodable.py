"""Receive messages whose properties or routing key py-amqp cannot decode.

RabbitMQ accepts them: a ``message_id`` or a routing key that is not UTF-8, a timestamp after the
year 9999, tables in tables a thousand deep. py-amqp decodes a message before any callback sees it,
and raises the error where the connection is read, each time the broker delivers the message. A
channel that :func:`take_undecodable` was called with gets such a message with its body, and
:func:`undecodable` returns the rest as bytes.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import amqp
from amqp import spec

from kombu_binary_delay.ladder.envelope import HEADERS, OFFSET
from kombu_binary_delay.ladder.returns import RETURNS

from .header_frames import HEADER_FRAME, Frame, find_headers

#: In a header frame, where the body's size begins and where the property flags do.
_SIZE, _FLAGS = 4, 12
#: The size of an empty body.
_EMPTY = bytes(8)
#: The flags of a message that has headers and no other property.
_HEADERS_ONLY = b"\x20\0"
#: No publisher can guess the names of the headers in which the bytes reach :func:`undecodable`.
_SECRET = secrets.token_hex(8)
_WHY, _PROPERTIES, _KEY = (f"{_SECRET}-{meaning}" for meaning in ("why", "properties", "key"))
#: The headers that RabbitMQ writes when it delivers a message; their values are numbers.
_BROKERS = frozenset((OFFSET.encode(), RETURNS.encode()))
#: At most so many characters of an error: it can quote the value.
_LONGEST = 200
#: How much deeper than by :func:`_why_not` a header can be decoded elsewhere, in calls.
_MARGIN = 20
_DELIVER, _GET_OK, _RETURN = (
    struct.pack(">HH", *method)
    for method in (spec.Basic.Deliver, spec.Basic.GetOk, spec.Basic.Return)
)


@dataclass(frozen=True)
class Undecodable:
    """What py-amqp could not decode of a message.

    :param why: the error.
    :param properties: the property flags and the properties, as in the header frame.
    :param routing_key: the routing key, or empty if it can be decoded.
    """

    why: str
    properties: bytes
    routing_key: bytes


def take_undecodable(channel: Any) -> None:
    """Make a channel of py-amqp get messages that cannot be decoded, too.

    Such a message has no properties but the offset of a stream, and how often it was returned to a
    quorum queue. If its routing key cannot be decoded, that is empty.
    """
    connection = channel.connection
    channel.takes_undecodable = True
    ids: set[int] | None = getattr(connection.on_inbound_frame, "take_undecodable", None)
    if ids is None:
        ids = set()
        connection.on_inbound_frame = _handler(connection, connection.on_inbound_frame, ids)
    ids.add(channel.channel_id)


def undecodable(message: Any) -> Undecodable | None:
    """Return what could not be decoded of a message; None for any other message."""
    headers = message.properties.get(HEADERS)
    if not headers or _WHY not in headers:
        return None
    why: bytes = headers[_WHY]
    return Undecodable(why.decode(), headers[_PROPERTIES], headers[_KEY])


class RawProperties(dict[str, Any]):
    """The properties of a message to publish that are written as bytes.

    :param raw: the property flags and the properties, as in a header frame.
    :param known: those of the values that somebody may have to read.
    """

    def __init__(self, raw: bytes, **known: Any) -> None:
        super().__init__(known)
        self.raw = raw

    def copy(self) -> RawProperties:
        """Return a copy, with the same bytes."""
        return RawProperties(self.raw, **self)


def decode(payload: bytes) -> Any:
    """Return a message of py-amqp without a body, from the payload of its header frame.

    If that cannot be decoded, it is as :func:`take_undecodable` says.
    """
    message = amqp.Message()
    try:
        message.inbound_header(payload)
    except Exception as exc:  # noqa: BLE001 - whatever a publisher can cause
        message.inbound_header(_replacement(payload, _text(exc)))
    return message


def _handler(
    connection: Any, decode: Callable[[Frame], Any], ids: set[int]
) -> Callable[[Frame], Any]:
    """Return a function that handles each frame of a connection, as ``decode`` where that can.

    :param ids: of the channels that take what cannot be decoded, and perhaps of later ones.
    """
    #: The routing keys that cannot be decoded, by channel, until the message's header frame comes.
    keys: dict[int, bytes] = {}

    def on_inbound_frame(frame: Frame) -> Any:
        # Called for each frame of each message, so the usual case is decided first.
        if frame[1] not in ids:
            return decode(frame)
        kind, channel_id, payload = frame
        channel = (connection.channels or {}).get(channel_id)
        if kind > HEADER_FRAME or not getattr(channel, "takes_undecodable", False):
            return decode(frame)
        if kind != HEADER_FRAME:
            at = _key_in(payload)
            if at and not _is_utf8(key := payload[at + 1 : at + 1 + payload[at]]):
                keys[channel_id] = key
                payload = b"".join((payload[:at], b"\0", payload[at + 1 + len(key) :]))
            return decode((kind, channel_id, payload))
        key = keys.pop(channel_id, b"")
        if key:
            why = "its routing key is not UTF-8"
        elif payload[_SIZE:_FLAGS] == _EMPTY:
            # py-amqp dispatches it with this frame: an error can be one of the program's own.
            why = _why_not(payload)
            if not why:
                return decode(frame)
        else:
            try:
                return decode(frame)
            except Exception as exc:  # noqa: BLE001 - whatever a publisher can cause
                why = _text(exc)
        return decode((kind, channel_id, _replacement(payload, why, key)))

    on_inbound_frame.take_undecodable = ids  # type: ignore[attr-defined]
    return on_inbound_frame


def _key_in(payload: bytes) -> int:
    """Return where the routing key of a method frame with a message begins; 0 without a message."""
    method = payload[:4]
    if method == _DELIVER:
        # The consumer's tag, the delivery's tag, and a flag.
        at = 5 + payload[4] + 9
    elif method == _GET_OK:
        at = 4 + 9
    elif method == _RETURN:
        # A code and a text.
        at = 7 + payload[6]
    else:
        return 0
    # The exchange. RabbitMQ refuses the name of one that is not UTF-8.
    return at + 1 + payload[at]


def _is_utf8(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        # As py-amqp reads it.
        data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


def _why_not(payload: bytes, margin: int = _MARGIN) -> str:
    """Return why a header frame cannot be decoded; empty if it can."""
    if margin:
        # What can just be decoded here may be too deep where it is called from more functions.
        return _why_not(payload, margin - 1)
    try:
        amqp.Message().inbound_header(payload)
    except Exception as exc:  # noqa: BLE001 - whatever a publisher can cause
        return _text(exc)
    return ""


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST]


def _replacement(payload: bytes, why: str, key: bytes = b"") -> bytes:
    """Return a header frame's payload that py-amqp can decode, with the other one in it."""
    values = {_WHY: why.encode(errors="replace"), _PROPERTIES: payload[_FLAGS:], _KEY: key}
    fields = [
        b"%c%bx%b%b" % (len(name), name.encode(), len(value).to_bytes(4, "big"), value)
        for name, value in values.items()
    ]
    table = b"".join((*fields, *_brokers_own(payload)))
    return b"".join((payload[:_FLAGS], _HEADERS_ONLY, len(table).to_bytes(4, "big"), table))


def _brokers_own(payload: bytes) -> list[bytes]:
    """Return the fields of the headers that RabbitMQ has written at this delivery."""
    fields = []
    # What comes from a stream was encoded by RabbitMQ. Anything else can end anywhere.
    with suppress(IndexError, struct.error):
        for begin, value, stop in find_headers(payload, _BROKERS).values():
            # As RabbitMQ writes it: a long.
            if payload[value : value + 1] == b"l" and stop == value + 9 <= len(payload):
                fields.append(payload[begin:stop])
    return fields
