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
from contextlib import contextmanager
from functools import partial
from itertools import count as numbers
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
    undisturbed,
)
from benchmarks.variants import INBOX, Bare, Floor, Lanes, OnLadder, Variant, peers, shortened
from dev.cluster import Cluster
from kombu_binary_delay import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dev.broker import Broker

DUE = struct.Struct("<d")
#: The bytes of a body, if not said otherwise.
SIZE = 300
#: py-amqp gives up after a second in which a busy broker reads nothing; milliseconds.
PATIENT = {socket.TCP_USER_TIMEOUT: 120_000}


class Arrived(NamedTuple):
    """What a consumer has seen.

    lateness:     of each message, in the order of arrival, in milliseconds.
    header_bytes: the greatest size of a message's headers.
    last:         the time of the last arrival, in seconds since the epoch.
    cpu:          the seconds of CPU that it took.
    """

    lateness: list[float]
    header_bytes: int
    last: float
    cpu: float


@contextmanager
def inbox(broker: Broker, variant: Variant) -> Iterator[amqp.Channel]:
    """Make a virtual host with an inbox and all that a variant needs; yield a channel."""
    vhost = broker.vhost()
    address = f"127.0.0.1:{broker.ports[0]}"
    with amqp.Connection(address, virtual_host=vhost.name, socket_settings=PATIENT) as connection:
        channel = connection.channel()
        arguments = {"x-queue-type": "quorum"}
        channel.queue_declare(INBOX, durable=True, auto_delete=False, arguments=arguments)
        variant.declare(vhost, channel)
        yield channel
    vhost.delete()


@contextmanager
def arrivals(
    broker: Broker, vhost: str, count: int, reads: str = "headers"
) -> Iterator[Callable[[], Arrived]]:
    """Start a process that consumes the inbox; yield what waits until it has so many messages.

    :param reads: ``headers``; or ``bodies`` for a consumer that takes less time for a message.
    """
    address = f"127.0.0.1:{broker.ports[0]}"
    consumer = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.consumer", address, vhost, str(count), reads],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert consumer.stdout is not None  # noqa: S101 - it is a pipe
    lines = consumer.stdout

    def arrived() -> Arrived:
        header_bytes, last, cpu = lines.readline().split()
        lateness = [float(late) for late in lines.readline().split()]
        if not lateness:
            raise RuntimeError("nothing arrived")
        return Arrived(lateness, int(header_bytes), float(last), float(cpu))

    try:
        lines.readline()
        yield arrived
    finally:
        consumer.kill()
        consumer.wait()
        lines.close()


def journey(
    nodes: Sequence[Broker],
    variant: Variant,
    delays: list[int],
    rate: float | None,
    idle: float,
) -> Row:
    """Send messages with these delays in milliseconds, at so many a second or in a burst.

    nodes: the broker, or all nodes of a cluster; publisher and consumer talk to the first.
    idle:  how long to watch them beforehand, in seconds.
    """
    with (
        inbox(nodes[0], variant) as channel,
        arrivals(nodes[0], channel.connection.virtual_host, len(delays)) as arriving,
    ):
        rests = idle_cpu(nodes, idle)
        start, before = time.monotonic(), [broker_cpu(node) for node in nodes]
        sending = time.process_time()
        send(channel, variant, delays, rate)
        sending, published = time.process_time() - sending, time.monotonic() - start
        arrived = arriving()
        took = time.monotonic() - start
        cpus = [
            broker_cpu(node) - used - rest * took
            for node, used, rest in zip(nodes, before, rests, strict=True)
        ]
    came = len(arrived.lateness)
    return {
        "cpu_us": sum(cpus) / came * 1e6,
        "publisher_us": sending / len(delays) * 1e6,
        "consumer_us": arrived.cpu / came * 1e6,
        # A quick run may take less than the kernel counts.
        "busiest": max(cpus) / (sum(cpus) or 1),
        **percentiles(arrived.lateness),
        # A millisecond is what the clocks of two processes may make of one moment.
        "early": sum(late < -1 for late in arrived.lateness),
        "missing": len(delays) - came,
        "publish_rate": len(delays) / published,
        "header_bytes": arrived.header_bytes,
    }


def send(
    channel: amqp.Channel,
    variant: Variant,
    delays: Iterable[int],
    rate: float | None,
    size: int = SIZE,
) -> None:
    """Publish a message for each delay in milliseconds, at so many a second or in a burst.

    A delay is taken when its message is sent.

    :param size: the bytes of each body.
    """
    filler = b"x" * (size - DUE.size)
    start = time.monotonic()
    drawn = iter(delays)
    for number in numbers():
        if rate is not None and (left := start + number / rate - time.monotonic()) > 0:
            time.sleep(left)
        delay = next(drawn, None)
        if delay is None:
            return
        route = variant.route(channel, delay)
        body = DUE.pack(time.time() + route.wait / 1000) + filler
        message = amqp.Message(body, delivery_mode=2, application_headers=route.headers)
        if route.expiration is not None:
            message.properties["expiration"] = route.expiration
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
        scale,
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

    runs = in_turns(list(ways), scale, measure, "easy")
    return summary(runs, "floor")


def long(broker: Broker, scale: Scale, most: int, what: str) -> dict[str, Row]:
    """Send a burst with delays of whole seconds up to ``most``; no queue waits longer than 2 s."""
    ways = shortened(scale.pick(2000, 100))
    delays = seconds(scale.pick(10_000, 100), 1, most)
    runs = in_turns(
        list(ways),
        scale,
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
        delay = sum(topology.ladder.weights[-count:])
        ways[f"ours-{count}"] = (OnLadder("ours", topology, longest=1000), delay)
        ways[f"bare-{count}"] = (Bare("bare", count), 0)
    count = scale.pick(5000, 50)

    def measure(name: str) -> Row:
        variant, delay = ways[name]
        return journey([broker], variant, [delay] * count, 1000, scale.idle)

    return summary(in_turns(list(ways), scale, measure, "hops"), "floor")


#: The steps of the search, as ratios: first to a rate that is too high, then back and up to it.
COARSE, FINE = 2.0, 1.1


def sustained(broker: Broker, scale: Scale) -> dict[str, Row]:
    """Find the highest rate at which 99 % of the messages are less than a second late."""
    ways = peers("quorum")
    names = ("ours", "binary", "celery-native", "nservicebus")

    def measure(name: str, rate: float) -> Row:
        delays = seconds(round(rate * scale.pick(12, 1)), 1, scale.pick(8, 1))
        look = partial(journey, [broker], ways[name], delays, rate, scale.idle)
        row = look() if scale.quick else undisturbed(look)
        say(f"sustained {name} at {rate:.0f}/s: {brief(row)}")
        held = row["p99"] <= 1000 and row["publish_rate"] >= 0.9 * rate
        return {"rate": rate, "held": held, **row}

    if scale.quick:
        return summary({name: [measure(name, 200)] for name in names})
    runs: dict[str, list[Row]] = {name: [] for name in names}
    for number in range(scale.rounds):
        for name in names[:: -1 if number % 2 else 1]:
            look, known = partial(measure, name), runs[name]
            # The first round finds where to search.
            best = known[-1] if known else climb(look, 250, COARSE)
            runs[name].append(climb(look, best["rate"], FINE))
    return summary(runs, "celery-native")


def climb(look: Callable[[float], Row], rate: float, step: float) -> Row:
    """Return what was measured at the highest rate that is held, in steps of a ratio."""
    best = look(rate)
    while not best["held"]:
        rate /= step
        best = look(rate)
    while (better := look(rate * step))["held"]:
        best, rate = better, rate * step
    return best


def lanes(broker: Broker, scale: Scale) -> dict[str, Row]:
    """Send a burst to one node, and to a cluster of three on one ladder and on several."""
    delays = seconds(scale.pick(10_000, 100), 1, scale.pick(12, 1))
    ways = {"one node": Lanes(1), "1 lane": Lanes(1), "2 lanes": Lanes(2), "4 lanes": Lanes(4)}
    with Cluster(os.environ.get("RABBITMQ_ROOT")) as cluster:

        def measure(name: str) -> Row:
            nodes = [broker] if name == "one node" else cluster.nodes
            return journey(nodes, ways[name], delays, None, scale.idle)

        return summary(in_turns(list(ways), scale, measure, "lanes"), "1 lane")
