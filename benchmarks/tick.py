"""Purpose: what a finer tick costs the broker, and what it buys in lateness.

    python -m benchmarks.tick [ROUNDS]

Ladders of one reach, 8.5 years, and of six ticks; through each, in turns, 3,000 persistent
messages with random delays of 0.3 to 12 s go at 300 a second, from one process to another, on
quorum queues. Writes docs/explanation/performance/results/tick.json: medians of the rounds.
`python -m docs.generate` makes the table of docs/explanation/tick.md of it. RABBITMQ_ROOT chooses
another broker.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from multiprocessing import Pipe, Process
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kombu import Connection, Message, Queue

from benchmarks.__main__ import DOCS, save
from benchmarks.rig import Row, machine
from dev.broker import Broker
from kombu_binary_delay import Ladder
from kombu_binary_delay.model.ladder import hops

if TYPE_CHECKING:
    from multiprocessing.connection import Connection as End

    from dev.broker import VHost

LADDERS = {1000: 28, 500: 29, 250: 30, 125: 31, 62: 32, 31: 33}  # tick in ms: levels
CHOSEN = 125
COUNT, RATE = 3000, 300
SHORTEST, LONGEST = 0.3, 12.0  # seconds
QUIET = 5.0  # seconds in which the broker is only watched
PATIENCE = 60.0

_random = random.Random(1)  # noqa: S311 - the same delays for every ladder
DELAYS = [_random.uniform(SHORTEST, LONGEST) for _ in range(COUNT)]
INBOX = Queue("inbox", durable=True, queue_arguments={"x-queue-type": "quorum"})


class Run(NamedTuple):
    """What one ladder did in one round."""

    lateness: list[float]  # milliseconds
    cpu: float  # of the broker, in milliseconds a message


def main(rounds: int = 3) -> None:
    runs: dict[int, list[Run]] = {tick: [] for tick in LADDERS}
    with Broker(os.environ.get("RABBITMQ_ROOT")) as broker:
        print(f"RabbitMQ {broker.version}, {rounds} rounds", file=sys.stderr)
        for number in range(rounds):
            # Not always in the same order: whatever else the machine does is spread evenly.
            for tick in list(LADDERS) if number % 2 == 0 else list(LADDERS)[::-1]:
                runs[tick].append(measure(broker, tick))
                print(number, tick, _row(tick, runs), file=sys.stderr, flush=True)
        on = machine(broker)
    found = {str(tick): _row(tick, runs) for tick in LADDERS}
    save(DOCS, "tick", {"machine": on, "rounds": rounds, "found": found})


def measure(broker: Broker, tick: int) -> Run:
    vhost = broker.vhost()
    ours, theirs = Pipe()
    consumer = Process(target=consume, args=(vhost.url, theirs), daemon=True)
    with _connect(vhost, tick) as connection:
        INBOX(connection.default_channel).declare()
        producer = connection.Producer()
        # The first delayed message makes the ladder, up to the level of the longest delay.
        producer.publish(0, routing_key=INBOX.name, headers={"x-delay": LONGEST * 1000})
        consumer.start()
        ours.recv()
        time.sleep(2)
        start, before = time.monotonic(), _cpu(broker)
        time.sleep(QUIET)
        idle = (_cpu(broker) - before) / (time.monotonic() - start)
        start, before = time.monotonic(), _cpu(broker)
        for number, delay in enumerate(DELAYS):
            time.sleep(max(0.0, start + number / RATE - time.monotonic()))
            producer.publish(
                time.time() + delay, routing_key=INBOX.name, headers={"x-delay": delay * 1000}
            )
        if not ours.poll(LONGEST + PATIENCE):
            raise TimeoutError(f"not all of {COUNT} messages arrived")
        lateness = ours.recv()
        cpu = _cpu(broker) - before - idle * (time.monotonic() - start)
    consumer.join()
    vhost.delete()
    return Run(lateness, cpu * 1000 / COUNT)


def consume(url: str, end: End) -> None:
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
        while len(lateness) < COUNT:
            connection.drain_events(timeout=LONGEST + PATIENCE)
    end.send(lateness)


def _connect(vhost: VHost, tick: int) -> Connection:
    settings = {"tick": tick, "radix": 2, "levels": LADDERS[tick]}
    return Connection(
        vhost.url,
        transport="kombu_binary_delay:Transport",
        transport_options={"binary_delay": settings},
    )


def _cpu(broker: Broker) -> float:
    """Return the seconds of CPU that the node has used so far."""
    fields = Path(f"/proc/{broker.pids[0]}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _row(tick: int, runs: dict[int, list[Run]]) -> Row:
    ladder = Ladder.binary(LADDERS[tick], tick)
    waits = statistics.mean(hops(ladder.digits(delay * 1000)) for delay in DELAYS)
    earliest = min(min(run.lateness) for run in runs[tick])
    if earliest < 0:
        raise AssertionError(f"a message was {-earliest:.1f} ms early")
    cuts = [statistics.quantiles(run.lateness, n=100) for run in runs[tick]]
    p50, p99 = (statistics.median(each[percent - 1] for each in cuts) for percent in (50, 99))
    # Each round against its own 125 ms: what slowed one down slowed both.
    pairs = list(zip(runs[tick], runs[CHOSEN], strict=False))
    ratio = statistics.median(run.cpu / chosen.cpu for run, chosen in pairs) if pairs else 0
    return {
        "levels": {"median": ladder.levels},
        "waits": {"median": waits},
        "p50": {"median": p50},
        "p99": {"median": p99},
        "cpu_us": {"ratio": ratio},
    }


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
