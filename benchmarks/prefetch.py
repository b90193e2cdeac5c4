"""Purpose: what the prefetch of RabbitMQ's dead-letter workers costs, and what it buys a herd.

In turns, each on a new broker with another `dead_letter_worker_consumer_prefetch`: a herd of 20,000
messages by the default ladder, and then one of 2,000 messages of 64 KiB, for the memory. Each is
published at once, so that many wait in the same queues, and leave them together.
"""

from __future__ import annotations

import os

from benchmarks.herd import WAYS, Herd, release
from benchmarks.rig import Row, Scale, in_turns, summary
from dev.broker import Broker

PREFETCH = (32, 128, 512, 1024)
DEFAULT = 32
#: Seconds after which a message that is not confirmed is sent again.
AGAIN = 5
SMALL = Herd(20_000, over=1, more=2 * AGAIN + 2)
LARGE = SMALL._replace(messages=2_000, size=65_536)


def prefetch(_: Broker, scale: Scale) -> dict[str, Row]:
    """Compare the prefetches."""
    names = [str(count) for count in scale.pick(PREFETCH, (DEFAULT, 512))]

    def measure(name: str) -> Row:
        advanced = (
            f"[{{rabbit, [{{dead_letter_worker_consumer_prefetch, {name}}},"
            f" {{dead_letter_worker_publisher_confirm_timeout, {1000 * AGAIN}}}]}}]."
        )
        with Broker(os.environ.get("RABBITMQ_ROOT"), advanced=advanced) as broker:
            small, large = (release(broker, WAYS["ours"](), herd, scale) for herd in (SMALL, LARGE))
        return {**small, **{f"large_{key}": value for key, value in large.items()}}

    return summary(in_turns(names, scale, measure, "prefetch"), str(DEFAULT))
