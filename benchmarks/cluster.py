"""Purpose: a million messages wait on a cluster of three, and a node is lost and comes back.

All nodes run on the same machine, so a rate says less than whether it goes on.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from kombu import Connection

from benchmarks.rig import Row, Scale, broker_memory, disk, say, summary
from benchmarks.waiting import (
    BODY,
    OURS,
    RESTART,
    WEEK,
    delay_four_seconds,
    publish,
    publish_many,
    reachable,
    with_inbox,
)
from dev.cluster import Cluster
from dev.server import VHost
from dev.service import wait_until

if TYPE_CHECKING:
    from dev.broker import Broker


def lose_a_node(_: Broker, scale: Scale) -> dict[str, Row]:
    """Let messages wait, kill the node that leads all of the cluster's queues, and start it."""
    count, some = scale.pick((1_000_000, 10_000), (1000, 20))
    runs: dict[str, list[Row]] = {}
    for _round in range(scale.rounds):
        with Cluster(os.environ.get("RABBITMQ_ROOT")) as cluster:
            for when, row in _lose_a_node(cluster, count, some).items():
                runs.setdefault(when, []).append(row)
    return summary(runs)


def _lose_a_node(cluster: Cluster, count: int, some: int) -> dict[str, Row]:
    first, second, _ = cluster.nodes
    vhost = first.vhost()
    with Connection(vhost.url, transport=OURS) as connection:
        with_inbox(connection)
        publish(vhost.url, [(BODY, WEEK)] * 10)
    start = time.monotonic()
    publish_many(vhost, count, WEEK)
    figures = {
        "whole": {"publish_rate": count / (time.monotonic() - start), **_look(cluster, vhost, some)}
    }
    elsewhere = VHost(second, vhost.name)
    start = time.monotonic()
    first.kill()
    reachable(elsewhere)
    # Until then, RabbitMQ 3.10 refuses a new channel's messages, for as long as the node is away.
    wait_until(
        lambda: all(row.get("node", first.node) != first.node for row in elsewhere.queues()),
        RESTART,
        f"{first.node} still leads a queue",
    )
    figures["a node lost"] = {
        "usable_seconds": time.monotonic() - start,
        **_look(cluster, elsewhere, some),
    }
    start = time.monotonic()
    first.start(RESTART)
    cluster.wait_until_whole(RESTART)
    figures["the node back"] = {
        "restart_seconds": time.monotonic() - start,
        **_look(cluster, elsewhere, some),
    }
    return figures


def _look(cluster: Cluster, vhost: VHost, some: int) -> Row:
    """Release some messages, and weigh the nodes that run."""
    row = delay_four_seconds(vhost, some)
    running = [node for node in cluster if node.is_running]
    row["waiting"] = sum(vhost.waiting(*(queue["name"] for queue in vhost.queues())).values())
    row["memory_of_all"] = sum(map(broker_memory, running))
    row["disk_of_all"] = sum(disk(node.folder) for node in running)
    say(f"cluster {row}")
    return row
