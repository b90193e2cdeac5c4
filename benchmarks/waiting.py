"""Purpose: what many waiting messages cost: the broker's memory, disk and restart, and a worker's.

The messages are published in batches, with confirms, through our transport, by as many processes as
there are cores.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import amqp
from kombu import Connection, Queue

from benchmarks.rig import (
    Peak,
    Row,
    Scale,
    broker_memory,
    disk,
    in_turns,
    percentiles,
    say,
    summary,
)
from benchmarks.travel import PATIENT
from dev.processes import Processes, resident
from dev.worker import Worker
from kombu_binary_delay import PublishBatch, UnconfirmedError
from kombu_binary_delay.ladder.address import Destination

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dev.broker import Broker, VHost

OURS = "kombu_binary_delay:Transport"
HOUR, DAY, WEEK = 3_600_000, 86_400_000, 604_800_000  # milliseconds
BODY = "x" * 300
#: The queue of worker_app.py, straight by the default exchange.
WORKER_QUEUE = Destination("", "celery")
#: The longest time that a restart may take, in seconds.
RESTART = 900


def broker(broker: Broker, scale: Scale) -> dict[str, Row]:
    """Let up to ten million messages wait for an hour to a week, and restart the broker."""
    vhost = broker.vhost()
    with Connection(vhost.url, transport=OURS) as connection:
        with_inbox(connection)
        # All levels exist, are empty, and have carried messages.
        publish(vhost.url, [(BODY, WEEK)] * 10)
        delay_four_seconds(vhost, scale.pick(1000, 10))
    time.sleep(scale.pick(5, 0))
    empty, empty_disk = broker_memory(broker), disk(broker.folder)
    rows: dict[str, Row] = {"0": {"memory": empty, "disk": empty_disk}}
    waiting = 0
    for count in scale.pick((1_000_000, 3_000_000, 10_000_000), (100,)):
        start = time.monotonic()
        with Peak(broker) as peak:
            publish_many(vhost, count - waiting, WEEK)
        rate = (count - waiting) / (time.monotonic() - start)
        waiting = count
        time.sleep(scale.pick(10, 0))
        row: Row = {
            "publish_rate": rate,
            "memory": broker_memory(broker),
            "memory_at_most": peak.most,
            "memory_per_message": (broker_memory(broker) - empty) / count,
            "disk": disk(broker.folder),
            "disk_per_message": (disk(broker.folder) - empty_disk) / count,
            **delay_four_seconds(vhost, scale.pick(10_000, 20)),
        }
        start = time.monotonic()
        broker.stop()
        # A node with much to recover takes minutes.
        broker.start(RESTART)
        row["restart_seconds"] = time.monotonic() - start
        reachable(vhost)
        row["usable_seconds"] = time.monotonic() - start
        for pause, when in ((0, "after_restart"), (scale.pick(60, 0), "a_minute_later")):
            time.sleep(pause)
            after = delay_four_seconds(vhost, scale.pick(10_000, 20))
            row |= {f"{name}_{when}": value for name, value in after.items()}
        row["memory_after_restart"] = broker_memory(broker)
        say(f"waiting {count}: {row}")
        rows[str(count)] = row
    # Each is measured once, however many rounds are asked for.
    return summary({name: [row] for name, row in rows.items()})


def worker(broker: Broker, scale: Scale) -> dict[str, Row]:
    """Let tasks wait for an hour, and weigh the worker that will run them."""
    count = scale.pick(100_000, 100)
    transports = {"celery": "pyamqp", "ours": OURS}

    def measure(name: str) -> Row:
        vhost = broker.vhost()
        with Processes("bench") as processes:
            env = {
                "BENCH_BROKER": vhost.url,
                "BENCH_TRANSPORT": transports[name],
                "PYTHONPATH": os.pathsep.join(["."]),
            }
            process = Worker(processes, "benchmarks.worker_app", env, "-P", "solo")
            empty = process.memory()
            publish_tasks(vhost, transports[name], count, 3600)
            end = time.monotonic() + scale.pick(240, 10)
            while name == "celery" and time.monotonic() < end and _held(vhost) < count:
                time.sleep(1)
            time.sleep(scale.pick(3, 0))
            held, memory = _held(vhost), resident(process.pid)
        vhost.delete()
        return {
            "held": held,
            "empty": empty,
            "memory": memory,
            # A worker may not have taken all of them yet; where it takes none, all wait.
            "per_task": (memory - empty) / (held or count),
        }

    return summary(in_turns(list(transports), scale, measure, "worker"))


def with_inbox(connection: Connection) -> None:
    arguments = {"x-queue-type": "quorum"}
    Queue("inbox", queue_arguments=arguments, channel=connection.default_channel).declare()


def publish_many(vhost: VHost, count: int, most: int) -> None:
    """Publish messages that wait for an hour to ``most`` ms, in a process for each core."""
    cores = os.cpu_count() or 1
    shares = [count // cores + (number < count % cores) for number in range(cores)]
    with ProcessPoolExecutor(cores, get_context("spawn")) as pool:
        for ended in [
            pool.submit(_publish_share, vhost.url, *share, most) for share in enumerate(shares)
        ]:
            ended.result()


def _publish_share(url: str, number: int, count: int, most: int) -> None:
    draw = random.Random(number)  # noqa: S311 - no secret
    publish(url, ((BODY, draw.randint(HOUR, most)) for _ in range(count)))


def publish(url: str, messages: Iterable[tuple[str, int]]) -> None:
    """Publish bodies, each with its delay in milliseconds, and wait for the confirms."""
    with Connection(url, transport=OURS) as connection:
        channel = connection.default_channel
        with_inbox(connection)
        with PublishBatch(channel) as batch:
            for body, delay in messages:
                message = channel.prepare_message(
                    body,
                    content_type="text/plain",
                    content_encoding="utf-8",
                    headers={"x-delay": delay},
                    properties={"delivery_mode": 2},
                )
                batch.publish(message, routing_key="inbox")


def delay_four_seconds(vhost: VHost, count: int) -> Row:
    """Let some messages wait for four seconds beside all the others, and see them come.

    What comes again counts as ``twice``: its second copy may come with the next messages. What is
    marked as redelivered does not count: a quorum queue returns messages whose acknowledgement was
    under way when the last consumer left.
    """
    mark = uuid.uuid4().hex
    sent: dict[str, float] = {}
    came: dict[str, float] = {}
    others: list[str] = []
    ready = threading.Event()

    def arrived(message: amqp.Message) -> None:
        if message.body in sent and message.body not in came:
            came[message.body] = time.time()
        elif not message.delivery_info["redelivered"]:
            others.append(message.body)

    def consume() -> None:
        with vhost.connect() as connection:
            channel = connection.channel()
            channel.basic_consume("inbox", callback=arrived, no_ack=True)
            ready.set()
            while len(came) < count:
                connection.drain_events(timeout=60)

    def messages() -> Iterator[tuple[str, int]]:
        for number in range(count):
            body = f"{mark} {number}".ljust(len(BODY))
            sent[body] = time.time()
            yield body, 4000

    thread = threading.Thread(target=consume)
    thread.start()
    ready.wait(30)
    start = time.monotonic()
    publish(vhost.url, messages())
    rate = count / (time.monotonic() - start)
    thread.join(120)
    if len(came) < count:
        raise RuntimeError(f"{len(came)} of {count} arrived")
    if BODY in others:
        raise RuntimeError("a message that waits for an hour or more came early")
    late = percentiles(came[body] - sent[body] - 4 for body in sent)
    return {
        "short_publish_rate": rate,
        "release_rate": count / (max(came.values()) - min(came.values())),
        "late_p50_ms": late["p50"] * 1000,
        "late_p99_ms": late["p99"] * 1000,
        "twice": len(others),
    }


def reachable(vhost: VHost) -> None:
    """Wait until a publish is confirmed, as queues come back one after the other."""
    end = time.monotonic() + RESTART
    while time.monotonic() < end:
        with suppress(OSError, amqp.AMQPError, UnconfirmedError):
            return publish(vhost.url, [(BODY, DAY)])
        time.sleep(0.2)
    raise TimeoutError("nothing can be published after the restart")


def _task_messages(count: int, delay: float | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield bodies and headers of tasks, as Celery writes them.

    :param delay: in seconds; None for none.
    """
    eta = None
    if delay is not None:
        eta = (datetime.now(UTC) + timedelta(seconds=delay)).isoformat()
    body = json.dumps(
        [[1], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
    )
    for _ in range(count):
        name = str(uuid.uuid4())
        yield (
            body,
            {
                "lang": "py",
                "task": "task",
                "id": name,
                "root_id": name,
                "eta": eta,
                "retries": 0,
                "timelimit": [None, None],
                "argsrepr": "(1,)",
                "kwargsrepr": "{}",
                "origin": "bench",
            },
        )


def publish_tasks(
    vhost: VHost, transport: str, count: int, delay: float | None, to: Destination = WORKER_QUEUE
) -> None:
    """Publish tasks of worker_app.py, with a delay in seconds, if any."""
    settings = {"socket_settings": PATIENT}
    with Connection(vhost.url, transport=transport, transport_options=settings) as connection:
        channel = connection.default_channel
        with PublishBatch(channel) as batch:
            for body, headers in _task_messages(count, delay):
                message = channel.prepare_message(
                    body,
                    content_type="application/json",
                    content_encoding="utf-8",
                    headers=headers,
                    properties={"delivery_mode": 2, "correlation_id": headers["id"]},
                )
                batch.publish(message, exchange=to.exchange, routing_key=to.routing_key)


def _held(vhost: VHost) -> int:
    """Count the tasks that the worker has taken and not finished."""
    for row in vhost.queues():
        if row["name"] == "celery":
            return int(row.get("messages_unacknowledged", 0))
    return 0
