"""Purpose: what the size of RabbitMQ's write-ahead log costs, and what it saves in memory.

In turns, each on a new broker with another `raft.wal_max_size_bytes`: 200,000 messages are
published to wait for an hour to a day.
"""

from __future__ import annotations

import os
import time

from kombu import Connection

from benchmarks.rig import (
    Row,
    Scale,
    broker_cpu,
    broker_memory,
    disk,
    in_turns,
    let_rest,
    summary,
)
from benchmarks.waiting import BODY, DAY, OURS, publish, publish_many, with_inbox
from dev.broker import Broker

#: In MiB. The last is RabbitMQ's default.
SIZES = (64, 512)
COUNT = 200_000


def wal(_: Broker, scale: Scale) -> dict[str, Row]:
    """Compare the sizes."""
    count = scale.pick(COUNT, 100)

    def measure(name: str) -> Row:
        config = {"raft.wal_max_size_bytes": int(name) * 2**20}
        with Broker(os.environ.get("RABBITMQ_ROOT"), config) as broker:
            return fill(broker, count)

    runs = in_turns([str(size) for size in SIZES], scale, measure, "wal")
    return summary(runs, str(SIZES[-1]))


def fill(broker: Broker, count: int) -> Row:
    """Let many messages wait, and say what they cost."""
    vhost = broker.vhost()
    with Connection(vhost.url, transport=OURS) as connection:
        with_inbox(connection)
        publish(vhost.url, [(BODY, DAY)] * 10)
    let_rest(broker)
    before, began, empty = broker_cpu(broker), time.monotonic(), broker_memory(broker)
    publish_many(vhost, count, DAY)
    took = time.monotonic() - began
    let_rest(broker, 30)
    return {
        "rate": count / took,
        "cpu_us": (broker_cpu(broker) - before) / count * 1e6,
        "memory": broker_memory(broker),
        "more_memory": broker_memory(broker) - empty,
        "disk": disk(broker.folder),
    }
