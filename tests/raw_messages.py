"""Messages whose properties py-amqp writes as they are, and cannot read."""

from __future__ import annotations

from struct import pack

import amqp


class RawMessage(amqp.Message):
    """A message whose properties are given as bytes, the flags first."""

    def __init__(self, body: bytes, properties: bytes) -> None:
        super().__init__(body)
        self.raw = properties

    def _serialize_properties(self) -> bytes:
        return self.raw


def table(fields: bytes) -> bytes:
    """Return properties with nothing but headers."""
    return pack(">HI", 0x2000, len(fields)) + fields


def _nested(depth: int) -> bytes:
    fields = b""
    for _ in range(depth):
        fields = b"\1tF" + pack(">I", len(fields)) + fields
    return table(fields)


#: By py-amqp's error: properties that RabbitMQ accepts.
RAW = {
    "UnicodeDecodeError: message_id": pack(">H", 0x80) + b"\1\xff",
    "UnicodeDecodeError: content_type": pack(">H", 0x8000) + b"\1\xff",
    "ValueError: after the year 9999": table(b"\1tT" + pack(">Q", 253_402_300_800)),
    "OverflowError: beyond 63 bits": table(b"\1tT" + pack(">Q", 2**64 - 1)),
    "RecursionError": _nested(1200),
}
