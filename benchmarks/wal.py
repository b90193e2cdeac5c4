"""Purpose: what the size of RabbitMQ's write-ahead log costs, and what it saves in memory.

    python -m benchmarks.wal [ROUNDS]

In turns, each on a new broker with another `raft.wal_max_size_bytes`: 200,000 messages are
published to wait for an hour to a day.
Writes docs/explanation/performance/results/wal.json. RABBITMQ_ROOT chooses another broker.
"""

from __future__ import annotations

import os
import random
import sys
import time

from kombu import Connection

from benchmarks.__main__ import DOCS, save
from benchmarks.rig import (
    Row,
    broker_cpu,
    broker_memory,
    disk,
    in_turns,
    let_rest,
    machine,
    summary,
)
from benchmarks.waiting import DAY, HOUR, OURS, publish, with_inbox
from dev.broker import Broker

#: In MiB. The last is RabbitMQ's default.
SIZES = (64, 512)
COUNT = 200_000


def main(rounds: int = 3) -> None:
    on: Row = {}

    def measure(name: str) -> Row:
        config = {"raft.wal_max_size_bytes": int(name) * 2**20}
        with Broker(os.environ.get("RABBITMQ_ROOT"), config) as broker:
            on.update(on or machine(broker))
            return fill(broker)

    runs = in_turns([str(each) for each in SIZES], rounds, measure, "wal")
    save(DOCS, "wal", {"machine": on, "rounds": rounds, "found": summary(runs, str(SIZES[-1]))})


def fill(broker: Broker) -> Row:
    """Let many messages wait, and say what they cost."""
    draw = random.Random(1)  # noqa: S311 - no secret
    vhost = broker.vhost()
    with Connection(vhost.url, transport=OURS) as connection:
        with_inbox(connection)
        publish(vhost, 10, lambda: DAY)
    let_rest(broker)
    before, began, empty = broker_cpu(broker), time.monotonic(), broker_memory(broker)
    publish(vhost, COUNT, lambda: draw.randint(HOUR, DAY))
    took = time.monotonic() - began
    let_rest(broker, 30)
    return {
        "rate": COUNT / took,
        "cpu_us": (broker_cpu(broker) - before) / COUNT * 1e6,
        "memory": broker_memory(broker),
        "more_memory": broker_memory(broker) - empty,
        "disk": disk(broker.folder),
    }


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
