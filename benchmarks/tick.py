"""Purpose: what a finer tick costs the broker, and what it buys in lateness.

By the default ladder with six ticks, in turns, 3,000 persistent messages with random delays of 0.3
to 12 s go at 300 a second, from one process to another, on quorum queues.
"""

from __future__ import annotations

import random
import statistics
import time
from multiprocessing import Pipe, Process
from typing import TYPE_CHECKING

from kombu import Connection, Message, Queue

from benchmarks.rig import Row, Scale, broker_cpu, idle_cpu, in_turns, percentiles, summary
from kombu_binary_delay import Ladder
from kombu_binary_delay.ladder.ladder import hops

if TYPE_CHECKING:
    from multiprocessing.connection import Connection as End

    from dev.broker import Broker, VHost

TICKS = (1000, 500, 250, 125, 62, 31)  # milliseconds
CHOSEN = "125"
COUNT, RATE = 3000, 300
SHORTEST, LONGEST = 0.3, 12.0  # seconds
QUIET = 5.0  # seconds in which the broker is only watched
PATIENCE = 60.0

INBOX = Queue("inbox", durable=True, queue_arguments={"x-queue-type": "quorum"})


def ticks(broker: Broker, scale: Scale) -> dict[str, Row]:
    """Compare the ticks."""
    draw = random.Random(1)  # noqa: S311 - the same delays for every ladder
    delays = [draw.uniform(SHORTEST, LONGEST) for _ in range(scale.pick(COUNT, 100))]

    def measure(name: str) -> Row:
        return travel(broker, int(name), delays, scale.pick(QUIET, 0.1))

    names = scale.pick([str(tick) for tick in TICKS], ["1000", CHOSEN])
    return summary(in_turns(names, scale, measure, "tick"), CHOSEN)


def travel(broker: Broker, tick: int, delays: list[float], quiet: float) -> Row:
    """Send delayed messages by a ladder of this tick, and see them come."""
    vhost = broker.vhost()
    ours, theirs = Pipe()
    consumer = Process(target=consume, args=(vhost.url, len(delays), theirs), daemon=True)
    with _connect(vhost, tick) as connection:
        INBOX(connection.default_channel).declare()
        producer = connection.Producer()
        # The first delayed message makes the ladder, up to the level of the longest delay.
        producer.publish(0, routing_key=INBOX.name, headers={"x-delay": LONGEST * 1000})
        consumer.start()
        ours.recv()
        time.sleep(2)
        idle = idle_cpu([broker], quiet)[0]
        start, before = time.monotonic(), broker_cpu(broker)
        for number, delay in enumerate(delays):
            time.sleep(max(0.0, start + number / RATE - time.monotonic()))
            producer.publish(
                time.time() + delay, routing_key=INBOX.name, headers={"x-delay": delay * 1000}
            )
        if not ours.poll(LONGEST + PATIENCE):
            raise TimeoutError(f"not all of {len(delays)} messages arrived")
        lateness: list[float] = ours.recv()
        cpu = broker_cpu(broker) - before - idle * (time.monotonic() - start)
    consumer.join()
    vhost.delete()
    ladder = Ladder.default(tick=tick)
    late = percentiles(lateness)
    return {
        "waits": statistics.mean(hops(ladder.digits(delay * 1000)) for delay in delays),
        "p50": late["p50"],
        "p99": late["p99"],
        "cpu_us": cpu / len(delays) * 1e6,
        "early": sum(late < 0 for late in lateness),
    }


def consume(url: str, count: int, end: End) -> None:
    lateness = []

    def take(due: float, message: Message) -> None:
        now = time.time()
        message.ack()
        if due:
            lateness.append((now - due) * 1000)

    with (
        Connection(url, transport="kombu_binary_delay:Transport") as connection,
        connection.Consumer(INBOX, callbacks=[take]),
    ):
        end.send("ready")
        while len(lateness) < count:
            connection.drain_events(timeout=LONGEST + PATIENCE)
    end.send(lateness)


def _connect(vhost: VHost, tick: int) -> Connection:
    return Connection(
        vhost.url,
        transport="kombu_binary_delay:Transport",
        transport_options={"binary_delay": {"tick": tick}},
    )
