"""Read many deliveries of one channel with few system calls.

For each frame, py-amqp reads the seven bytes of its head, its payload and its last byte separately,
and it makes a message object of every three frames. That is right for tasks. A hundred thousand
records of a stream would take three times as long as with this module.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

from amqp.transport import TCPTransport

from kombu_binary_delay.ladder.envelope import HEADERS, OFFSET

from .undecodable import decode, undecodable

_HEAD = struct.Struct(">BHI")
_METHOD, _HEADER, _BODY = 1, 2, 3
_DELIVER = struct.pack(">HH", 60, 60)
#: The position of the body's size in a content header.
_SIZE = struct.Struct(">4xQ")
_TAG = struct.Struct(">Q")
_AT_ONCE = 65536
#: How often to ask whether the reading is over while nothing comes, in seconds.
_EVERY = 0.05


class StreamRecord:
    """A message as it was delivered, whose properties are decoded only if somebody asks for them.

    :param method: the payload of its method frame.
    :param header: the payload of its header frame, if ``message`` is None.
    :param message: what py-amqp has made of it.
    """

    __slots__ = ("_header", "_message", "_method", "body", "exchange", "tag")

    def __init__(self, method: Any, body: Any, header: bytes = b"", message: Any = None) -> None:
        self._method, self._header, self._message, self.body = method, header, message, body
        # Behind class and method: the consumer tag, the delivery tag, a flag, the exchange.
        end = 5 + method[4]
        (self.tag,) = _TAG.unpack_from(method, end)
        begin = end + 10
        self.exchange = bytes(method[begin : begin + method[end + 9]])

    @property
    def consumer(self) -> bytes:
        """The consumer's tag."""
        return bytes(self._method[5 : 5 + self._method[4]])

    @property
    def message(self) -> Any:
        """The message with its properties; see :func:`~.undecodable.undecodable`."""
        if self._message is None:
            self._message = decode(self._header)
        return self._message

    @property
    def offset(self) -> int:
        """Its offset in the stream."""
        return int((self.message.properties.get(HEADERS) or {}).get(OFFSET, -1))

    def may_have(self, header: str) -> bool:
        """Return whether it may have this header, for less than it takes to decode all."""
        if self._message is None:
            return header.encode() in self._header
        odd = undecodable(self._message)
        held = self._message.headers or {} if odd is None else odd.properties
        return (header if odd is None else header.encode()) in held


def is_possible(connection: Any) -> bool:
    """Whether a connection can be read this way: not with TLS, whose buffer is not accessible."""
    return type(connection.transport) is TCPTransport


def read(
    connection: Any,
    channel_id: int,
    take: Callable[[StreamRecord], object],
    is_done: Callable[[], bool],
) -> None:
    """Read until ``is_done``, and no delivery is incomplete.

    Frames for other channels are dispatched as usual.

    :param take: called with each delivery on the channel.
    :param is_done: called after each frame, and while none comes.
    """
    method, header, size, done = b"", b"", 0, False
    heard = time.monotonic()
    parts: list[bytes] = []

    def is_over() -> bool:
        return (done or is_done()) and not method

    with closing(_frames(connection.transport, is_over)) as frames:
        for frame in frames:
            kind, channel, payload = frame
            if channel != channel_id or (kind == _METHOD and payload[:4] != _DELIVER):
                connection.on_inbound_frame(frame)
            elif kind == _METHOD:
                method, parts = payload, []
            elif kind == _HEADER:
                header = payload
                (size,) = _SIZE.unpack_from(payload)
            else:
                parts.append(payload)
                size -= len(payload)
            if method and kind != _METHOD and size == 0:
                take(StreamRecord(method, b"".join(parts), header))
                method = b""
                # py-amqp's heartbeats compare these counters.
                connection.bytes_recv += 1
                if connection.heartbeat and time.monotonic() - heard > connection.heartbeat / 2:
                    heard = time.monotonic()
                    connection.send_heartbeat()
            done = done or is_done()


def _frames(
    transport: Any, is_done: Callable[[], bool]
) -> Generator[tuple[int, int, bytes], None, None]:
    """Yield complete frames; at the end, give the rest back to py-amqp."""
    data, at = bytes(transport._read_buffer), 0  # noqa: SLF001 - where py-amqp itself puts it back
    transport._read_buffer = b""  # noqa: SLF001
    try:
        while True:
            while len(data) - at >= _HEAD.size:
                kind, channel, size = _HEAD.unpack_from(data, at)
                end = at + _HEAD.size + size
                if len(data) <= end:
                    break
                frame = kind, channel, data[at + _HEAD.size : end]
                at = end + 1
                yield frame
            if is_done():
                return
            read = _receive(transport.sock)
            if read is not None:
                data, at = data[at:] + read, 0
    finally:
        transport._read_buffer = data[at:]  # noqa: SLF001


def _receive(sock: Any) -> bytes | None:
    """Return the next bytes; None if there are none for a moment."""
    limit = sock.gettimeout()
    # Not for what is written meanwhile, which must be written whole.
    sock.settimeout(_EVERY)
    try:
        read: bytes = sock.recv(_AT_ONCE)
    except TimeoutError:
        return None
    finally:
        sock.settimeout(limit)
    if not read:
        raise OSError("the broker closed the connection")
    return read
