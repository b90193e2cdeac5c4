"""Purpose: what a delayed message costs the broker, and how late it arrives.

One process publishes, another consumes; the broker's CPU is what its process used from the first
publish to the last arrival, less what it takes when idle. Lateness is the time of arrival less the
time of the publish and the delay.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import amqp

from benchmarks.rig import (
    Row,
    Scale,
    brief,
    broker_cpu,
    idle_cpu,
    in_turns,
    percentiles,
    say,
    summary,
)
from benchmarks.variants import INBOX, Bare, Floor, Lanes, OnLadder, Variant, peers, shortened
from dev.cluster import Cluster
from kombu_binary_delay import Topology

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dev.broker import Broker

DUE = struct.Struct("<d")
BODY = b"x" * 292
#: py-amqp gives up after a second in which a busy broker reads nothing; milliseconds.
PATIENT = {socket.TCP_USER_TIMEOUT: 120_000}


def journey(
    nodes: Sequence[Broker],
    variant: Variant,
    delays: list[int],
    rate: float | None = None,
    idle: float = 1.5,
) -> Row:
    """Send messages with these delays in milliseconds, at so many a second or in a burst.

    nodes: the broker, or all nodes of a cluster; publisher and consumer talk to the first.
    """
    broker = nodes[0]
    vhost = broker.vhost()
    address = f"127.0.0.1:{broker.ports[0]}"
    with amqp.Connection(address, virtual_host=vhost.name, socket_settings=PATIENT) as connection:
        channel = connection.channel()
        arguments = {"x-queue-type": "quorum"}
        channel.queue_declare(INBOX, durable=True, auto_delete=False, arguments=arguments)
        variant.declare(vhost, channel)
        consumer = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.consumer", address, vhost.name, str(len(delays))],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
        )
        assert consumer.stdout is not None  # noqa: S101 - it is a pipe
        try:
            consumer.stdout.readline()
            rests = idle_cpu(nodes, idle)
            start, before = time.monotonic(), [broker_cpu(node) for node in nodes]
            _send(channel, variant, delays, rate)
            published = time.monotonic() - start
            arrived, header_bytes = map(int, consumer.stdout.readline().split())
            lateness = [float(each) for each in consumer.stdout.readline().split()]
            took = time.monotonic() - start
            cpus = [
                broker_cpu(node) - used - rest * took
                for node, used, rest in zip(nodes, before, rests, strict=True)
            ]
        finally:
            consumer.kill()
            consumer.wait()
            consumer.stdout.close()
    vhost.delete()
    if not lateness:
        raise RuntimeError(f"nothing arrived: {variant.title}")
    return {
        "cpu_us": sum(cpus) / arrived * 1e6,
        "busiest": max(cpus) / sum(cpus),
        **percentiles(lateness),
        # A millisecond is what the clocks of two processes may make of one moment.
        "early": sum(each < -1 for each in lateness),
        "missing": len(delays) - arrived,
        "publish_rate": len(delays) / published,
        "header_bytes": header_bytes,
    }


def _send(channel: amqp.Channel, variant: Variant, delays: list[int], rate: float | None) -> None:
    start = time.monotonic()
    for number, delay in enumerate(delays):
        if rate is not None and (left := start + number / rate - time.monotonic()) > 0:
            time.sleep(left)
        route = variant.route(channel, delay)
        body = DUE.pack(time.time() + route.wait / 1000) + BODY
        message = amqp.Message(body, delivery_mode=2, application_headers=route.headers)
        channel.basic_publish(message, route.exchange, route.key)


def seconds(count: int, least: int, most: int) -> list[int]:
    """Draw whole seconds, the same for everybody."""
    draw = random.Random(1)  # noqa: S311 - no secret
    return [draw.randint(least, most) * 1000 for _ in range(count)]


def burst(broker: Broker, scale: Scale, queue_type: str = "quorum") -> dict[str, Row]:
    """Send 20,000 messages at once, with delays of whole seconds up to 12."""
    delays = seconds(scale.pick(20_000, 200), 1, scale.pick(12, 1))
    ways = peers(queue_type)
    runs = in_turns(
        list(ways),
        scale.turns,
        lambda n: journey([broker], ways[n], delays, None, scale.idle),
        "burst",
    )
    return summary(runs, "celery-native")


def easy(broker: Broker, scale: Scale) -> dict[str, Row]:
    """Send 300 a second, with delays of whole seconds up to 8."""
    delays = seconds(scale.pick(3000, 100), 1, scale.pick(8, 1))
    ways = peers("quorum")

    def measure(name: str) -> Row:
        return journey([broker], ways[name], delays, 300, scale.idle)

    runs = in_turns(list(ways), scale.turns, measure, "easy")
    return summary(runs, "floor")


def long(broker: Broker, scale: Scale, most: int, what: str) -> dict[str, Row]:
    """Send a burst with delays of whole seconds up to ``most``; no queue waits longer than 2 s."""
    ways = shortened(scale.pick(2000, 100))
    delays = seconds(scale.pick(10_000, 100), 1, most)
    runs = in_turns(
        list(ways),
        scale.turns,
        lambda n: journey([broker], ways[n], delays, None, scale.idle),
        what,
    )
    return summary(runs, "celery-native")


def hops(broker: Broker, scale: Scale) -> dict[str, Row]:
    """Send delays of one to six digits, and the same number of bare dead-letters."""
    topology = Topology()
    ways: dict[str, tuple[Variant, int]] = {"floor": (Floor(), 0)}
    for count in scale.pick((1, 2, 4, 6), (1,)):
        # The digits are neighbours, so no level is passed without a wait.
        delay = topology.ladder.delay(("01",) * count)
        ways[f"ours-{count}"] = (OnLadder("ours", topology, longest=1000), delay)
        ways[f"bare-{count}"] = (Bare("bare", count), 0)
    count = scale.pick(5000, 50)

    def measure(name: str) -> Row:
        variant, delay = ways[name]
        return journey([broker], variant, [delay] * count, 1000, scale.idle)

    return summary(in_turns(list(ways), scale.turns, measure, "hops"), "floor")


def sustained(broker: Broker, scale: Scale) -> dict[str, Row]:
    """Find the highest rate at which 99 % of the messages are less than a second late."""
    ways = peers("quorum")
    rates = scale.pick((250, 500, 1000, 1500, 2000, 3000, 4000, 6000), (200,))
    found: dict[str, Row] = {}
    for name in ("ours", "binary", "celery-native", "nservicebus"):
        best: Row = {"rate": 0, "p99": 0.0}
        for rate in rates:
            delays = seconds(rate * scale.pick(12, 1), 1, scale.pick(8, 1))
            reached = journey([broker], ways[name], delays, rate, scale.idle)
            say(f"sustained {name} at {rate}/s: {brief(reached)}")
            if reached["p99"] > 1000 or reached["publish_rate"] < 0.9 * rate:
                break
            best = {"rate": rate, "p99": reached["p99"]}
        found[name] = {figure: {"median": value} for figure, value in best.items()}
    return found


def lanes(broker: Broker, scale: Scale) -> dict[str, Row]:
    """Send a burst to a cluster of three nodes, on one ladder and on several side by side."""
    del broker
    delays = seconds(scale.pick(10_000, 100), 1, scale.pick(12, 1))
    ways = {"1 lane": Lanes(1), "2 lanes": Lanes(2), "4 lanes": Lanes(4)}
    with Cluster(os.environ.get("RABBITMQ_ROOT")) as cluster:

        def measure(name: str) -> Row:
            return journey(cluster.nodes, ways[name], delays, None, scale.idle)

        return summary(in_turns(list(ways), scale.turns, measure, "lanes"), "1 lane")


def sections() -> dict[str, Any]:
    """Name what can be measured here."""
    return {
        "burst": burst,
        "burst-classic": lambda b, s: burst(b, s, "classic"),
        "easy": easy,
        "hour": lambda b, s: long(b, s, 3600, "hour"),
        "day": lambda b, s: long(b, s, 86_400, "day"),
        "hops": hops,
        "sustained": sustained,
        "lanes": lanes,
    }
