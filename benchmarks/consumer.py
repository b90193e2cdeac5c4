"""Purpose: the process that consumes for travel.py, and reports how late each message was.

    python -m benchmarks.consumer HOST:PORT VHOST COUNT headers|bodies

With ``bodies``, it reads the headers of one message in a hundred, for their size. py-amqp takes as
long for the headers of a message that has waited several times as for all the rest of it.

Says ``ready``; then, when all have come or nothing more comes, the greatest size of their headers
in bytes, the time of the last arrival in seconds since the epoch, and the seconds of CPU that this
process took for them; then the lateness of each in milliseconds.
"""

from __future__ import annotations

import gc
import struct
import sys
import time
from itertools import count as numbers
from typing import Any

import amqp
from amqp.serialization import PROPERTY_CLASSES

from benchmarks.variants import INBOX

DUE = struct.Struct("<d")
PATIENCE = 120.0
#: The headers of one message in so many are measured.
SAMPLE = 100


def main(address: str, vhost: str, count: int, reads: str) -> None:
    if reads == "bodies":
        _skip_properties()
    lateness: list[float] = []
    sample: list[amqp.Message] = []
    times = [0.0]
    gc.disable()

    def take(message: amqp.Message) -> None:
        now = time.time()
        body = message.body
        if isinstance(body, str):
            body = body.encode("latin1")
        times[0] = now
        lateness.append((now - DUE.unpack_from(body)[0]) * 1000)
        if len(lateness) % SAMPLE == 1:
            sample.append(message)

    with amqp.Connection(address, virtual_host=vhost) as connection:
        channel = connection.channel()
        channel.auto_decode = False
        channel.basic_consume(INBOX, callback=take, no_ack=True)
        print("ready", flush=True)
        before = time.process_time()
        try:
            while len(lateness) < count:
                connection.drain_events(timeout=PATIENCE)
        except TimeoutError:
            pass
        cpu = time.process_time() - before
        size = max((_size(message) for message in sample), default=0)
        print(size, f"{times[0]:.6f} {cpu:.6f}", flush=True)
        print(*(f"{late:.3f}" for late in lateness), flush=True)


def _skip_properties() -> None:
    """Let py-amqp read the properties of the first of each hundred messages only."""
    basic = amqp.spec.Basic.CLASS_ID
    read, number = PROPERTY_CLASSES[basic], numbers()

    def read_some(frame: bytes, offset: int) -> tuple[dict[str, Any], int]:
        return ({}, offset) if next(number) % SAMPLE else read(frame, offset)

    PROPERTY_CLASSES[basic] = read_some


def _size(message: amqp.Message) -> int:
    headers = message.properties.get("application_headers")
    if not headers:
        return 0
    return len(amqp.Message(application_headers=headers)._serialize_properties())  # noqa: SLF001


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
