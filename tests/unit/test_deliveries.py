"""Deliveries that are read in bulk: each once, whatever the pieces that they come in."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest

from kombu_binary_delay.wire import deliveries

CHANNEL = 5
HEARTBEAT = b"\x08\x00\x00\x00\x00\x00\x00\xce"


def frame(kind, payload, channel=CHANNEL):
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def delivery(tag, body):
    deliver = struct.pack(">HH", 60, 60) + b"\x01t" + struct.pack(">Q", tag) + b"\x00\x03abc\x00"
    header = struct.pack(">HHQH", 60, 0, len(body), 0)
    parts = [body[:2], body[2:]] if body else []
    return frame(1, deliver) + frame(2, header) + b"".join(frame(3, part) for part in parts)


def connect(data, piece=10_000):
    """Make what py-amqp would be, on which bytes come in pieces, and then no more."""
    pieces = [data[first : first + piece] for first in range(0, len(data), piece)]
    other: list[Any] = []
    beats: list[None] = []
    return SimpleNamespace(
        transport=SimpleNamespace(
            sock=SimpleNamespace(
                recv=lambda _: pieces.pop(0) if pieces else b"",
                gettimeout=lambda: None,
                settimeout=lambda _: None,
            ),
            _read_buffer=b"",
        ),
        other=other,
        on_inbound_frame=other.append,
        bytes_recv=0,
        heartbeat=10,
        beats=beats,
        send_heartbeat=lambda: beats.append(None),
    )


def read(connection, count):
    taken: list[Any] = []

    def take(delivery):
        assert (delivery.message.properties, delivery.may_have("x-none")) == ({}, False)
        assert delivery.consumer == b"t"
        taken.append((delivery.tag, delivery.exchange, delivery.body))

    deliveries.read(connection, CHANNEL, take, lambda: len(taken) >= count)
    return taken


@pytest.mark.parametrize("piece", [1, 7, 64, 10_000])
def test_each_is_taken_once_and_what_is_not_ours_is_dispatched(piece):
    bodies = [b"", b"x", b"y" * 300]
    data = HEARTBEAT + b"".join(delivery(tag, body) for tag, body in enumerate(bodies))
    connection = connect(data[5:], piece)
    connection.transport._read_buffer = data[:5]  # noqa: SLF001 - where py-amqp puts it back
    assert read(connection, 3) == [(tag, b"abc", body) for tag, body in enumerate(bodies)]
    assert connection.other == [(8, 0, b"")]


def test_what_is_read_too_far_is_given_back():
    connection = connect(delivery(1, b"x") + HEARTBEAT[:4])
    assert len(read(connection, 1)) == 1
    assert connection.transport._read_buffer == HEARTBEAT[:4]  # noqa: SLF001 - as above


def test_both_sides_are_known_to_be_alive_while_it_takes_long(monkeypatch):
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(deliveries, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    connection = connect(b"".join(delivery(tag, b"x") for tag in range(9)))
    read(connection, 9)
    assert connection.bytes_recv == 9
    # A heartbeat is due every five seconds, and the clock goes on by two with each delivery.
    assert len(connection.beats) == 3


def test_a_connection_that_ends_is_an_error():
    with pytest.raises(OSError, match="closed the connection"):
        read(connect(delivery(1, b"x")), 2)
