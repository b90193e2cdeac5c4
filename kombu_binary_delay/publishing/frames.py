"""Encode messages faster than py-amqp, and write many at once, without frames between them.

For each message, py-amqp makes a system call, which wakes the broker, and parses a format string
letter by letter. The bytes written here are the same as py-amqp's. This module must not import
anything of ours but errors.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from math import inf, isfinite
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import FrameSyntaxError
from amqp.serialization import dumps

from kombu_binary_delay.errors import SMALLER

#: The errors for values that AMQP cannot encode.
UNWRITABLE = (
    AttributeError,
    FrameSyntaxError,
    LookupError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
#: The end of each frame, after its type, channel, size and payload.
_END = b"\xce"
#: The end of the frame before a header frame, and that frame's type.
_BEFORE = (0xCE, 2)
_METHOD = struct.Struct(">BHIHH")
_HEADER = struct.Struct(">BBHIHHQ")
_BODY = struct.Struct(">BHI")
_PUBLISH = spec.Basic.Publish
_BASIC = _PUBLISH[0]
_INT = struct.Struct(">ci")
_LONG = struct.Struct(">cq")
#: The bytes of a frame in addition to its payload.
_OVERHEAD = 8
#: The bytes of a header frame's payload before the properties.
_BEFORE_PROPERTIES = 12


class TooLargeError(ValueError):
    """A message's headers and other properties do not fit into a frame."""


class EncodedMessage(amqp.Message):
    """A message for py-amqp to publish, of which we know that it can be written.

    :param body: bytes, or a string, which is encoded in its ``content_encoding``.
    :param frame_max: the largest frame that the broker accepts, in bytes.
    :raises TooLargeError: if its headers and other properties do not fit into one.
    :raises UNWRITABLE: if AMQP cannot encode a value.
    """

    def __init__(self, body: Any, properties: dict[str, Any], frame_max: int) -> None:
        self._encoded: bytes
        body, self._encoded = encode(body, properties, frame_max)
        super().__init__(body)
        self.properties = properties

    def _serialize_properties(self) -> bytes:
        return self._encoded


def encode(body: Any, properties: dict[str, Any], frame_max: int) -> tuple[Any, bytes]:
    """Return the body, as bytes, and the flags and properties of a message as they are written.

    The parameters and errors are those of :class:`EncodedMessage`.
    """
    if isinstance(body, str):
        encoding = properties["content_encoding"] = properties.get("content_encoding") or "utf-8"
        body = body.encode(encoding)
    header = _write_properties(properties)
    _check_size(header, frame_max - _OVERHEAD)
    return body, header


def _check_size(header: bytes, room: int) -> None:
    size = _BEFORE_PROPERTIES + len(header)
    # RabbitMQ would close the connection.
    if size > room:
        raise TooLargeError(
            f"its headers and other properties take {size} bytes, and at most {room} fit into a "
            f"frame; {SMALLER}"
        )


class Messages:
    """Messages for a channel that are gathered and then written in one piece."""

    def __init__(self, connection: Any, channel_id: int) -> None:
        self._connection = connection
        self._writer = _Writer.of(connection)
        self._channel_id = channel_id
        self._pieces: list[Any] = []
        #: The approximate number of gathered bytes.
        self.size = 0

    def add(
        self,
        body: Any,
        properties: dict[str, Any],
        exchange: str,
        routing_key: str,
        flags: tuple[bool, bool],
    ) -> None:
        """Add a message, encoded as by py-amqp's ``basic_publish``.

        :param body: bytes, or a string, which is written in its ``content_encoding``.
        :param flags: mandatory, immediate.
        :raises UNWRITABLE: if AMQP cannot encode a value, or the headers are too large for a frame;
            nothing of the message is added.
        """
        body, header = encode(body, properties, self._connection.frame_max)
        self.add_encoded([(body, header, (exchange, routing_key))], flags)

    def add_encoded(
        self,
        messages: Iterable[tuple[Any, bytes, tuple[str, str]]],
        flags: tuple[bool, bool],
        most: float = inf,
    ) -> int:
        """Add messages whose flags and properties are encoded, as :func:`encode` does.

        :param messages: the body, the flags and properties, and the exchange and the routing key
            of each.
        :param most: the size from which on no more are added.
        :returns: how many were added.
        :raises UNWRITABLE: as :meth:`add`; those before it are added.
        """
        room, channel = self._connection.frame_max - _OVERHEAD, self._channel_id
        pieces, count = self._pieces, 0
        bits = bool(flags[0]) + 2 * bool(flags[1])
        for body, header, (exchange, key) in messages:
            if self.size >= most:
                break
            if _BEFORE_PROPERTIES + len(header) > room:
                _check_size(header, room)
            # A reserved 0, two short strings, and two bits.
            arguments = b"\0\0%b%b%c" % (write_name(exchange), write_short(key), bits)
            if type(body) is not bytes:
                # A view is cut without a copy, and accepts only bytes.
                body = memoryview(body).cast("B")  # noqa: PLW2901 - the same body
            size = len(body)
            pieces += (
                _METHOD.pack(1, channel, 4 + len(arguments), *_PUBLISH),
                arguments,
                _HEADER.pack(*_BEFORE, channel, _BEFORE_PROPERTIES + len(header), _BASIC, 0, size),
                header,
                _END,
            )
            if 0 < size <= room:
                pieces += (_BODY.pack(3, channel, size), body, _END)
            else:
                view = memoryview(body)
                for start in range(0, size, room):
                    part = view[start : start + room]
                    pieces += (_BODY.pack(3, channel, len(part)), part, _END)
            self.size += len(arguments) + len(header) + size
            count += 1
        return count

    def clear(self) -> None:
        """Drop the gathered messages."""
        self._pieces.clear()
        self.size = 0

    def send(self) -> None:
        """Write the gathered messages to the broker.

        :raises OSError: if not all of them could be written.
        """
        data = b"".join(self._pieces)
        self.clear()
        self._writer.write(data)
        # py-amqp uses this counter for its heartbeats.
        self._connection.bytes_sent += 1


class _Writer:
    """A connection's writer of frames, which also writes larger pieces.

    Another thread may write to the connection, such as a heartbeat. py-amqp's own lock is not
    accessible, so all writes go through this one.
    """

    @classmethod
    def of(cls, connection: Any) -> _Writer:
        writer = connection.frame_writer
        if not isinstance(writer, cls):
            writer = connection.frame_writer = cls(connection)
        return writer

    def __init__(self, connection: Any) -> None:
        self._transport = connection.transport
        self._write_frame = connection.frame_writer
        # Looked up only now, after gevent or eventlet may have replaced it.
        self._lock = threading.Lock()

    def __call__(self, *frame: Any) -> Any:
        with self._lock:
            return self._write_frame(*frame)

    def write(self, data: bytes) -> None:
        with self._lock:
            self._transport.write(data)


def _write_properties(properties: dict[str, Any]) -> bytes:
    """Encode the property flags and the given properties, unless they are bytes already."""
    if (raw := getattr(properties, "raw", None)) is not None:
        return bytes(raw)
    flags, values = 0, []
    for name, flag, write in _those_of(tuple(properties)):
        value = properties[name]
        if value is not None:
            flags |= flag
            values.append(write(value))
    return b"%b%b" % (flags.to_bytes(2, "big"), b"".join(values))


# Messages of one kind have the same properties.
@lru_cache(maxsize=256)
def _those_of(names: tuple[str, ...]) -> tuple[tuple[str, int, Callable[[Any], bytes]], ...]:
    return tuple(property_ for property_ in PROPERTIES if property_[0] in names)


def write_short(text: Any) -> bytes:
    """Encode a text with its length in one byte.

    :raises OverflowError: if it has more than 255 bytes.
    """
    if not text:
        return b"\0"
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return b"%c%b" % (len(data), data)


# Headers repeat, and so do their names.
@lru_cache(maxsize=1024)
def write_name(name: object) -> bytes:
    """Encode the name of a header."""
    if not isinstance(name, (str, bytes)):
        raise TypeError(f"the name of a header must be a string, got {name!r}")
    return write_short(name)


#: The last value of each header, and the bytes of both: most headers of a task stay the same.
_LAST: dict[str, tuple[object, bytes]] = {}
#: The most headers to remember, and the longest in bytes.
_MOST, _LONGEST = 1024, 256
_IMMUTABLE = frozenset((str, int, bool, float, type(None)))


def write_fields(table: Mapping[str, Any]) -> bytes:
    """Encode what a table holds, without its length."""
    fields: list[bytes] = []
    for name, value in table.items():
        known = _LAST.get(name)
        # The same object: equal values of two types have different bytes.
        if known is None or known[0] is not value:
            write = _VALUES.get(type(value), _write_other)
            known = value, write_name(name) + write(value)
            if type(value) in _IMMUTABLE and len(known[1]) <= _LONGEST:
                if len(_LAST) >= _MOST:
                    _LAST.clear()
                _LAST[name] = known
        fields.append(known[1])
    return b"".join(fields)


def write_value(value: Any) -> bytes:
    """Encode a value in a table."""
    return _VALUES.get(type(value), _write_other)(value)


def _write_table(table: dict[str, Any] | None) -> bytes:
    return counted(write_fields(table or {}))


# For each level of nesting, they call no more functions than py-amqp, whose limit then is ours.
def _write_dict(value: Any) -> bytes:
    return b"F" + counted(write_fields(value))


def _write_list(value: Any) -> bytes:
    written = []
    for item in value:
        write = _VALUES.get(type(item), _write_other)
        written.append(write(item))
    return b"A" + counted(b"".join(written))


def _write_other(value: object) -> bytes:
    if isinstance(value, float) and not isfinite(value):
        # RabbitMQ would close the connection.
        raise ValueError(f"a header cannot be {value}, which is no finite number")
    # As in a table of its own: behind its length, and an empty name.
    return _write("F", {"": value})[5:]


def _write_str(value: Any) -> bytes:
    return b"S" + counted(value.encode("utf-8", "surrogatepass"))


def _write_int(value: Any) -> bytes:
    return _INT.pack(b"I", value) if abs(value) < 2**31 else _LONG.pack(b"L", value)


def counted(data: bytes) -> bytes:
    """Return data behind its length."""
    return len(data).to_bytes(4, "big") + data


#: The writers of what headers are made of; of subclasses, py-amqp knows how.
_VALUES: dict[type, Callable[[Any], bytes]] = {
    str: _write_str,
    int: _write_int,
    bool: lambda value: b"t\1" if value else b"t\0",
    type(None): lambda _: b"V",
    dict: _write_dict,
    list: _write_list,
    tuple: _write_list,
}


def _write(kind: str, value: object) -> bytes:
    written: bytes = dumps(kind, (value,))
    return written


#: The encoders of the types that nearly all properties have.
_WRITERS: dict[str, Callable[[Any], bytes]] = {
    "s": write_short,
    "o": struct.Struct("B").pack,
    "F": _write_table,
}
#: The properties of a message, in their order: each with its flag, and what encodes it.
PROPERTIES = tuple(
    (name, 1 << (15 - place), _WRITERS.get(kind) or partial(_write, kind))
    for place, (name, kind) in enumerate(amqp.Message.PROPERTIES)
)
