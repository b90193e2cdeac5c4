"""Purpose: ten million waiting messages on one node, and a million on a cluster that loses a node.

    python -m benchmarks.millions [--counts N,N,...] [--on-cluster N] [--into FOLDER]

The messages wait for an hour to a week, on quorum queues. The node may use 8 GB of memory, and
after each count it is restarted. It takes an hour or two, so `make bench` leaves it out. Writes
FOLDER/results/millions.json, and cluster.json. RABBITMQ_ROOT chooses another broker.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kombu import Connection

from benchmarks.record import DOCS, Recording
from benchmarks.rig import Row, Scale, broker_memory, disk, machine, say
from benchmarks.waiting import (
    DAY,
    OURS,
    RESTART,
    delay_four_seconds,
    fill,
    publish,
    publish_many,
    reachable,
    with_inbox,
)
from dev.broker import Broker
from dev.cluster import Cluster
from dev.server import VHost

if TYPE_CHECKING:
    from collections.abc import Sequence

WEEK = 7 * DAY
LIMIT = {"vm_memory_high_watermark.absolute": "8GB"}
#: Messages that are published and released beside those that wait.
SOME = 10_000


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.millions")
    parser.add_argument("--counts", default="1000000,3000000,10000000", help="on one node")
    parser.add_argument("--on-cluster", type=int, default=1_000_000, help="on a cluster of three")
    parser.add_argument("--into", type=Path, default=DOCS, help="the folder to write to")
    given = parser.parse_args(arguments)
    root = os.environ.get("RABBITMQ_ROOT")
    if counts := [int(each) for each in given.counts.split(",") if each]:
        recording = Recording("millions", 1, given.into)
        with Broker(root, LIMIT) as broker:
            found: dict[str, Row] = {}
            for count, row in fill(broker, Scale(), counts, WEEK):
                found[count] = row
                recording.write(machine(broker), found)
    if given.on_cluster:
        recording = Recording("cluster", 1, given.into)
        with Cluster(root) as cluster:
            found = lose_a_node(cluster, given.on_cluster)
            recording.write(machine(cluster.nodes[0]), found)


def lose_a_node(cluster: Cluster, count: int) -> dict[str, Row]:
    """Let messages wait on a cluster, kill the node that leads all of its queues, and start it."""
    first, second, _ = cluster.nodes
    vhost = first.vhost()
    with Connection(vhost.url, transport=OURS) as connection:
        with_inbox(connection)
        publish(vhost.url, 10, lambda: WEEK)
    start = time.monotonic()
    publish_many(vhost, count, WEEK)
    found = {"whole": {"publish_rate": count / (time.monotonic() - start), **_look(cluster, vhost)}}
    elsewhere = VHost(second, vhost.name)
    start = time.monotonic()
    first.kill()
    reachable(elsewhere)
    found["a node lost"] = {
        "usable_seconds": time.monotonic() - start,
        **_look(cluster, elsewhere),
    }
    start = time.monotonic()
    first.start(RESTART)
    cluster.wait_until_whole(RESTART)
    found["the node back"] = {
        "restart_seconds": time.monotonic() - start,
        **_look(cluster, elsewhere),
    }
    return found


def _look(cluster: Cluster, vhost: VHost) -> Row:
    """Release some messages, and weigh the nodes that run."""
    row = delay_four_seconds(vhost, SOME)
    running = [node for node in cluster if node.is_running]
    row["waiting"] = sum(vhost.waiting(*(each["name"] for each in vhost.queues())).values())
    row["memory_of_all"] = sum(map(broker_memory, running))
    row["disk_of_all"] = sum(disk(node.folder) for node in running)
    say(f"cluster {row}")
    return row


if __name__ == "__main__":
    main()
