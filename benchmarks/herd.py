"""Purpose: what happens when everything is due in one second.

Messages are published over a minute, each with the delay that is left until one moment; peers that
know whole seconds only round it up. Afterwards, the queue with everything in it is empty as soon as
the broker can: so the rate of release is that of the ladder's last step, and of the destination.
The consumer reads no headers: else it would be the limit, and not the broker.
"""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.rig import Peak, Row, Scale, broker_cpu, broker_memory, idle_cpu, in_turns, summary
from benchmarks.travel import SIZE, arrivals, inbox, send
from benchmarks.variants import (
    INBOX,
    BareByMessage,
    CeleryNative,
    Lanes,
    OnLadder,
    Variant,
)
from kombu_binary_delay import Topology
from kombu_binary_delay.ladder.foreign import NSERVICEBUS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dev.broker import Broker

#: Seconds over which messages are published, and from the last publish to the due time.
OVER, AHEAD = 60, 5

WAYS: dict[str, Callable[[], Variant]] = {
    "bare-a-core": lambda: BareByMessage(
        "bare dead-lettering, a queue a core", os.cpu_count() or 1
    ),
    "ours": lambda: OnLadder("ours", Topology()),
    "lanes": lambda: Lanes(4),
    "celery-native": lambda: CeleryNative("Celery's native delivery"),
    "nservicebus": lambda: OnLadder("NServiceBus v2 ladder", NSERVICEBUS),
}
TITLES = {name: make().title for name, make in WAYS.items()}
TITLES["lanes"] = "ours, four lanes"

#: The ways that a large herd is measured: each takes more than a minute.
FEW = {name: WAYS[name] for name in ("bare-a-core", "ours", "celery-native")}


class Herd(NamedTuple):
    """So many messages that are all due in one second.

    size: the bytes of each body.
    over: the seconds in which they are published.
    more: how many seconds to wait, afterwards, for what comes twice.
    reads: what the consumer reads of each, as in `arrivals`.
    """

    messages: int
    size: int = SIZE
    over: float = OVER
    more: float = 0
    reads: str = "headers"


def measured(
    broker: Broker, scale: Scale, count: int, ways: Mapping[str, Callable[[], Variant]]
) -> dict[str, Row]:
    """Measure a herd of so many messages."""

    def measure(name: str) -> Row:
        return release(broker, ways[name](), Herd(count, reads="bodies"), scale)

    return summary(in_turns(list(ways), scale, measure, "herd"), "bare-a-core")


def release(broker: Broker, variant: Variant, herd: Herd, scale: Scale) -> Row:
    """Publish a herd, and watch it come."""
    count, size, over, more, reads = scale.pick(herd, Herd(200, herd.size, over=1))
    ahead = scale.pick(AHEAD, 1)
    with (
        inbox(broker, variant) as channel,
        arrivals(broker, channel.connection.virtual_host, count, reads) as arriving,
    ):
        rest = idle_cpu([broker], scale.idle)[0]
        start, before = time.monotonic(), broker_cpu(broker)
        due = time.time() + over + ahead
        left = (_left(due, variant.tick) for _ in range(count))
        send(channel, variant, left, count / over, size)
        time.sleep(max(due - time.time(), 0))
        waiting, cpu_at_due = broker_memory(broker), broker_cpu(broker)
        with Peak(broker) as peak:
            arrived = arriving()
        took, cpu = time.monotonic() - start, broker_cpu(broker)
        time.sleep(more)
        # As many as were published have been consumed.
        twice = channel.queue_declare(INBOX, passive=True).message_count
    return {
        "rate": len(arrived.lateness) / (arrived.last - due),
        "last_ms": (arrived.last - due) * 1000,
        "p99": sorted(arrived.lateness)[round((len(arrived.lateness) - 1) * 0.99)],
        "cpu_us": (cpu - before - rest * took) / count * 1e6,
        "consumer_us": arrived.cpu / count * 1e6,
        "release_cpu_us": (cpu - cpu_at_due - rest * (arrived.last - due)) / count * 1e6,
        "waiting_mb": waiting / 1e6,
        "peak_mb": peak.most / 1e6,
        "early": sum(late < -1 for late in arrived.lateness),
        "missing": count - len(arrived.lateness),
        "twice": twice,
    }


def _left(due: float, tick: int) -> int:
    """Return what is left until a time, in milliseconds, rounded up to ticks; at least one.

    A broker that cannot keep up may hold a publisher up until then and longer.
    """
    left = math.ceil((due - time.time()) * 1000)
    return max(-(-left // tick), 1) * tick
