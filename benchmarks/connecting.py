"""Purpose: what the first delayed task of a connection costs, where the ladder and the queue exist.

    python -m benchmarks.connecting TRANSPORT URL COUNT BROKER_PID

Sends so many tasks with a countdown, each on a connection of its own (``broker_pool_limit = 0``).
Says as JSON what they took, together: milliseconds, the broker's CPU and for how long that was
watched, in seconds, frames sent, and round trips.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from struct import Struct
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from amqp.transport import _AbstractTransport
from celery import Celery
from kombu import Connection, Exchange, Queue

from benchmarks.rig import Row, Scale, cpu_of, idle_cpu, in_turns, let_rest, summary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dev.broker import Broker

TRANSPORTS = {"celery": "pyamqp", "ours": "kombu_binary_delay:Transport"}
#: By the keys of the results, but for the transport before them: titles, and how many tasks a
#: process sends.
KINDS = {"pool-0": ("a connection for each task", 100), "process": ("a process for each task", 1)}
WHOSE = {"celery": "Celery on Kombu's own transport", "ours": "ours"}
TITLES = {
    f"{name}-{kind}": f"{whose}, {title}"
    for kind, (title, _) in KINDS.items()
    for name, whose in WHOSE.items()
}
#: Of Celery's usual kind. Something is in it, as if there were workers.
TASKS = Queue(
    "tasks",
    Exchange("tasks", "direct"),
    routing_key="tasks",
    queue_arguments={"x-max-length": 1000},
)
LONGEST = 3600  # seconds
#: How long the broker goes on with what a connection has left to do, in seconds.
AFTERWARDS = 0.05
_FRAME = Struct(">BHI")


def connecting(broker: Broker, scale: Scale) -> dict[str, Row]:
    """Measure a task, sent by a connection and by a process that are made for it."""
    vhosts = {name: broker.vhost() for name in TRANSPORTS}
    figures: dict[str, Row] = {}
    for name, vhost in vhosts.items():
        with Connection(vhost.url, transport=TRANSPORTS[name]) as connection:
            TASKS(connection.default_channel).declare()
            publish = connection.Producer().publish
            publish("not delayed", routing_key="tasks")
            # All levels.
            publish("x", routing_key="tasks", headers={"x-delay": LONGEST * 1000})
    let_rest(broker)
    [idle] = idle_cpu([broker], scale.idle)

    def measure(key: str) -> Row:
        name, _, kind = key.partition("-")
        count = scale.pick(KINDS[kind][1], 1)
        arguments = [TRANSPORTS[name], vhosts[name].url, str(count), str(broker.pids[0])]
        let_rest(broker)
        start = time.perf_counter()
        said = subprocess.check_output([sys.executable, "-m", __spec__.name, *arguments])
        program = time.perf_counter() - start
        row: Row = json.loads(said)
        cpu = (row["cpu"] - idle * row["watched"]) * 1000
        total = {"ms": row["ms"], "cpu_ms": cpu, "frames": row["frames"], "trips": row["trips"]}
        return {"program_ms": program * 1000} | {name: total[name] / count for name in total}

    for kind in KINDS:
        keys = [f"{name}-{kind}" for name in TRANSPORTS]
        figures |= summary(in_turns(keys, scale, measure, "connecting", 10), keys[0])
    for vhost in vhosts.values():
        vhost.delete()
    return figures


@contextmanager
def counted() -> Iterator[Row]:
    """Count the frames that py-amqp sends, and how often it then waits for the broker."""
    row = {"frames": 0, "trips": 0}
    has_sent = False
    write, read = _AbstractTransport.write, _AbstractTransport.read_frame

    def counting_write(transport: Any, data: Any) -> None:
        nonlocal has_sent
        has_sent = True
        row["frames"] += _frames(bytes(data))
        write(transport, data)

    def counting_read(transport: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal has_sent
        row["trips"] += has_sent
        has_sent = False
        return read(transport, *args, **kwargs)

    with (
        patch.object(_AbstractTransport, "write", counting_write),
        patch.object(_AbstractTransport, "read_frame", counting_read),
    ):
        yield row


def _frames(data: bytes) -> int:
    count = at = 0
    while at < len(data):
        count += 1
        # Behind its payload, a frame has one byte more.
        at += _FRAME.size + _FRAME.unpack_from(data, at)[2] + 1
    return count


def nothing(argument: int) -> None:
    """Do what the task does."""


def main(transport: str, url: str, count: int, broker_pid: int) -> None:
    app = Celery("bench", broker=url, broker_transport=transport, task_ignore_result=True)
    app.conf.update(
        broker_pool_limit=0,
        task_queues=[TASKS],
        task_default_queue=TASKS.name,
        task_default_exchange=TASKS.exchange.name,
        task_default_routing_key=TASKS.routing_key,
    )
    send = app.task(name="task")(nothing).apply_async
    # What it takes to import the transport is a part of the program's time.
    Connection(url, transport=transport).get_transport_cls()
    before, start = cpu_of(broker_pid), time.perf_counter()
    with counted() as row:
        for number in range(count):
            send((number,), countdown=random.randint(1, LONGEST))  # noqa: S311 - any delay
    took = time.perf_counter() - start
    time.sleep(AFTERWARDS)
    cpu, watched = cpu_of(broker_pid) - before, time.perf_counter() - start
    print(json.dumps({"ms": took * 1000, "cpu": cpu, "watched": watched, **row}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
