"""Purpose: what the prefetch of RabbitMQ's dead-letter workers costs, and what it buys a herd.

In turns, each on a new broker with another `dead_letter_worker_consumer_prefetch`: 20,000 messages
are published for one moment, and arrive by the default ladder. Then 2,000 messages of 64 KiB, for
the memory.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from multiprocessing import Pipe, Process
from pathlib import Path
from typing import TYPE_CHECKING

import amqp

from benchmarks.rig import Row, Scale, broker_cpu, broker_memory, in_turns, let_rest, summary
from benchmarks.travel import PATIENT
from benchmarks.variants import INBOX, OnLadder
from dev.broker import Broker
from kombu_binary_delay import Topology

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection as End

PREFETCH = (32, 128, 512, 1024)
DEFAULT = 32
#: The messages, and the bytes of each body.
SMALL, LARGE = (20_000, 300), (2_000, 65_536)
#: Seconds from the first publish until all are due: several times what the publishes take.
AHEAD = 20.0
PATIENCE = 60.0
#: Seconds for what may come twice.
MORE = 12.0


def prefetch(_: Broker, scale: Scale) -> dict[str, Row]:
    """Compare the prefetches."""
    names = [str(each) for each in scale.pick(PREFETCH, (DEFAULT, 512))]
    small, large = scale.pick((SMALL, LARGE), ((100, 300), (100, 300)))

    def measure(name: str) -> Row:
        advanced = (
            f"[{{rabbit, [{{dead_letter_worker_consumer_prefetch, {name}}},"
            " {dead_letter_worker_publisher_confirm_timeout, 5000}]}]."
        )
        with Broker(os.environ.get("RABBITMQ_ROOT"), advanced=advanced) as broker:
            heavy = {f"large_{key}": value for key, value in herd(broker, *large).items()}
            return {**herd(broker, *small), **heavy}

    runs = in_turns(names, scale.turns, measure, "prefetch")
    return summary(runs, str(DEFAULT))


def sections() -> dict[str, Callable[[Broker, Scale], dict[str, Row]]]:
    """Name what can be measured here."""
    return {"prefetch": prefetch}


def herd(broker: Broker, count: int, size: int) -> Row:
    """Let messages of ``size`` bytes be due in one moment, and measure their release."""
    vhost = broker.vhost()
    address = f"127.0.0.1:{broker.ports[0]}"
    ladder = OnLadder("ours", Topology())
    ours, theirs = Pipe()
    with amqp.Connection(address, virtual_host=vhost.name, socket_settings=PATIENT) as connection:
        channel = connection.channel()
        quorum = {"x-queue-type": "quorum"}
        channel.queue_declare(INBOX, durable=True, auto_delete=False, arguments=quorum)
        ladder.declare(vhost, channel)
        consumer = Process(target=consume, args=(address, vhost.name, count, theirs), daemon=True)
        consumer.start()
        ours.recv()
        let_rest(broker)
        due = time.time() + AHEAD
        for number in range(count):
            route = ladder.route(channel, round((due - time.time()) * 1000))
            body = number.to_bytes(8, "big") + bytes(size - 8)
            message = amqp.Message(body, delivery_mode=2, application_headers=route.headers)
            channel.basic_publish(message, route.exchange, route.key)
        if (ahead := due - 2 - time.time()) < 0:
            raise RuntimeError(f"published {-ahead:.1f} s too late")
        time.sleep(ahead)
        # From now on, the greatest resident memory is that of the release.
        Path(f"/proc/{broker.pids[0]}/clear_refs").write_text("5")
        memory, before = broker_memory(broker), broker_cpu(broker)
        if not ours.poll(PATIENCE + MORE + 2):
            raise TimeoutError("no messages arrived")
        cpu = broker_cpu(broker)
        arrivals: list[tuple[int, float]] = ours.recv()
        peak = _peak(broker.pids[0])
    consumer.join()
    vhost.delete()
    first: dict[int, float] = {}
    for number, at in arrivals:
        first.setdefault(number, at - due)
    lateness = sorted(first.values())
    if lateness[0] < 0:
        raise AssertionError(f"a message was {-lateness[0]:.3f} s early")
    return {
        "last": lateness[-1],
        "p50": lateness[len(lateness) // 2],
        "rate": len(lateness) / lateness[-1],
        "cpu_us": (cpu - before) / count * 1e6,
        "memory": memory,
        "more_memory": peak - memory,
        "missing": count - len(first),
        "twice": len(arrivals) - len(first),
    }


def consume(address: str, vhost: str, count: int, end: End) -> None:
    arrivals: list[tuple[int, float]] = []

    def take(message: amqp.Message) -> None:
        body = message.body
        body = body.encode("latin1") if isinstance(body, str) else body
        arrivals.append((int.from_bytes(body[:8], "big"), time.time()))

    with amqp.Connection(address, virtual_host=vhost) as connection:
        channel = amqp.Channel(connection, auto_decode=False)
        channel.open()
        channel.basic_consume(INBOX, callback=take, no_ack=True)
        end.send("ready")
        deadline = time.monotonic() + AHEAD + PATIENCE
        while len(arrivals) < count and time.monotonic() < deadline:
            _drain(connection, 1)
        deadline = time.monotonic() + MORE
        while time.monotonic() < deadline:
            _drain(connection, 1)
    end.send(arrivals)


def _drain(connection: amqp.Connection, seconds: float) -> None:
    with suppress(TimeoutError):
        connection.drain_events(timeout=seconds)


def _peak(pid: int) -> int:
    """Return the greatest resident memory of a process since it was reset, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not say VmHWM")
