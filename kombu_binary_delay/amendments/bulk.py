"""Read many deliveries of one channel with few system calls.

For each frame, py-amqp reads the seven bytes of its head, its payload and its last byte separately,
and it makes a message object of every three frames. That is right for tasks. A hundred thousand
records of a stream would take three times as long as with this module.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from amqp.transport import TCPTransport

from kombu_binary_delay.wire.undecodable import decode

from .parts import ENTERED

_HEAD = struct.Struct(">BHI")
_METHOD, _HEADER, _BODY = 1, 2, 3
_DELIVER = struct.pack(">HH", 60, 60)
#: The position of the body's size in a content header.
_SIZE = struct.Struct(">4xQ")
_TAG = struct.Struct(">Q")
_AT_ONCE = 65536
_ENTERED = ENTERED.encode()

#: Takes a delivery tag, the delivery's exchange, the body, a function that decodes the properties
#: into a message, and whether these may have the header :data:`.parts.ENTERED`.
Take = Callable[[int, bytes, bytes, Callable[[], Any], bool], object]


def is_possible(connection: Any) -> bool:
    """Whether a connection can be read this way: not with TLS, whose buffer is not accessible."""
    return type(connection.transport) is TCPTransport


def read(connection: Any, channel_id: int, take: Take, is_done: Callable[[], bool]) -> None:
    """Read until ``is_done``, and no delivery is incomplete.

    Frames for other channels are dispatched as usual.

    :param take: called with each delivery on the channel.
    :param is_done: called after each frame.
    :raises TimeoutError: if the socket's timeout expires.
    """
    method, header, size, done = b"", b"", 0, False
    heard = time.monotonic()
    parts: list[bytes] = []

    def is_over() -> bool:
        return done and not method

    for frame in _frames(connection.transport, is_over):
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
            body = b"".join(parts)
            take(*read_deliver(method), body, partial(decode, header), _ENTERED in header)
            method = b""
            # py-amqp's heartbeats compare these counters.
            connection.bytes_recv += 1
            if connection.heartbeat and time.monotonic() - heard > connection.heartbeat / 2:
                heard = time.monotonic()
                connection.send_heartbeat()
        done = done or is_done()


def read_deliver(payload: Any) -> tuple[int, bytes]:
    """Return the delivery tag and the exchange from the method frame of a delivery."""
    # Behind class and method: the consumer tag, the delivery tag, a flag, the exchange, the key.
    end = 5 + payload[4]
    (tag,) = _TAG.unpack_from(payload, end)
    begin = end + 10
    return tag, bytes(payload[begin : begin + payload[end + 9]])


def consumer_of(payload: Any) -> bytes:
    """Return the consumer's tag from the method frame of a delivery."""
    return bytes(payload[5 : 5 + payload[4]])


def _frames(transport: Any, is_done: Callable[[], bool]) -> Iterator[tuple[int, int, bytes]]:
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
            read = transport.sock.recv(_AT_ONCE)
            if not read:
                raise OSError("the broker closed the connection")
            data, at = data[at:] + read, 0
    finally:
        transport._read_buffer = data[at:]  # noqa: SLF001
