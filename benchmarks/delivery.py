"""Purpose: what a delivery costs the consumer: a plain one, and Celery's worker.

Messages are there before the consumer is measured, delayed ones as well, so that it never waits.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from kombu import Connection, Consumer, Exchange, Queue
from kombu.transport.native_delayed_delivery import (
    bind_queue_to_native_delayed_delivery_exchange,
    calculate_routing_key,
    declare_native_delayed_delivery_exchanges_and_queues,
)

from benchmarks.amendments import instructions
from benchmarks.publishing import BODY, OURS, STOCK
from benchmarks.rig import Row, Scale, cpu_of, in_turns, let_rest, summary
from benchmarks.travel import PATIENT
from benchmarks.variants import NATIVE
from benchmarks.waiting import WORKER_QUEUE, publish_tasks
from dev.processes import Processes
from dev.service import wait_until
from dev.worker import Worker
from kombu_binary_delay import PublishBatch, cancel
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.foreign import CELERY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dev.broker import Broker, VHost

INBOX = Queue(
    "inbox", Exchange("inbox", "topic"), "inbox", queue_arguments={"x-queue-type": "quorum"}
)
PATIENCE = 120.0
#: The most tasks that a worker with one process takes beforehand.
TAKEN = 4
#: Cancelled ids that a consumer knows, none of which comes.
KNOWN = 1000

#: How a plain consumer connects, and how its messages have come.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "kombu": ("Kombu's own transport", {}),
    "ours": ("ours", {}),
    "ours-amendments": ("ours, a thousand amendments known", {"known": KNOWN}),
    "ours-journal": ("ours, with the journal", {"journal": "stream"}),
    "kombu-native": ("Kombu's own, by Celery's native delivery", {"native": True}),
    "ours-delayed": ("ours, delayed", {"delayed": 125}),
    "ours-delayed-twice": ("ours, delayed, after two waits", {"delayed": 1125}),
    "ours-delayed-journal": (
        "ours, delayed, with the journal",
        {"delayed": 125, "journal": "stream"},
    ),
}
POOLS = ("solo", "prefork")
WORKERS = {
    f"{name}-{pool}": f"{title}, worker with the pool {pool}"
    for pool in POOLS
    for name, title in (
        ("celery", "Kombu's own transport"),
        ("celery-ours", "ours"),
        ("celery-native", "Kombu's own, by Celery's native delivery"),
        ("celery-ours-delayed", "ours, delayed"),
    )
}
TITLES = {name: title for name, (title, _) in WAYS.items()} | WORKERS


def delivery(broker: Broker, scale: Scale) -> dict[str, Row]:
    """Measure the consumer's CPU of a delivery, beside Kombu's own transport."""
    figures = _plain(broker, scale)
    for pool in scale.pick(POOLS, POOLS[:1]):
        names = [name for name in WORKERS if name.endswith(pool)]
        measure = partial(_worker, broker, scale)
        runs = in_turns(names, scale, measure, "delivery", 2)
        figures |= summary(runs, names[0])
    return figures


def _plain(broker: Broker, scale: Scale) -> dict[str, Row]:
    count = scale.pick(5000, 20)
    with ExitStack() as stack:
        consumers = {}
        for name, (_, options) in WAYS.items():
            transport = OURS if name.startswith("ours") else STOCK
            made = _Consuming(broker, transport, **options)
            consumers[name] = stack.enter_context(closing(made))

        def measure(name: str) -> Row:
            consumer = consumers[name]
            consumer.fill(count)
            if not scale.quick:
                let_rest(broker)
            gc.collect()
            with consumer.consuming():
                cpu = time.process_time()
                consumer.drain(count)
                cpu = time.process_time() - cpu
            consumer.fill(10)
            with consumer.consuming():
                counted = instructions(partial(consumer.drain, 10))
            return {"cpu_us": cpu / count * 1e6, "instructions": counted / 10}

        return summary(in_turns(list(consumers), scale, measure, "delivery", 5), "kombu")


class _Consuming:
    """A plain consumer on a virtual host of its own.

    delayed: milliseconds: 125 is one wait of the default ladder, 1125 are two.
    """

    def __init__(
        self,
        broker: Broker,
        transport: str,
        *,
        known: int = 0,
        native: bool = False,
        delayed: int = 0,
        **settings: str,
    ) -> None:
        self._vhost = broker.vhost()
        self._native, self._delayed = native, delayed
        options = {"binary_delay": settings} if settings else {}
        with Connection(self._vhost.url, transport=OURS) as connection:
            INBOX(connection.default_channel).declare()
            if native:
                declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
                bind_queue_to_native_delayed_delivery_exchange(connection, INBOX)
            if known:
                cancel([str(uuid4()) for _ in range(known)], connection=connection)
        self._connection = Connection(
            self._vhost.url, transport=transport, transport_options=options
        )
        self._channel = self._connection.channel()
        self._taken = 0

    def close(self) -> None:
        self._connection.close()
        self._vhost.delete()

    def fill(self, count: int) -> None:
        """Publish messages, and wait until all are in the queue."""
        settings = {"socket_settings": PATIENT}
        with Connection(self._vhost.url, transport=OURS, transport_options=settings) as connection:
            channel = connection.default_channel
            INBOX(channel).declare()
            with PublishBatch(channel) as batch:
                for _ in range(count):
                    headers = {"x-delay": self._delayed} if self._delayed else {}
                    message = channel.prepare_message(
                        BODY,
                        content_type="text/plain",
                        content_encoding="utf-8",
                        headers=headers,
                        properties={"message_id": str(uuid4())},
                    )
                    if self._native:
                        key = calculate_routing_key(1, "inbox")
                        batch.publish(message, exchange=NATIVE, routing_key=key)
                    else:
                        batch.publish(message, exchange="inbox", routing_key="inbox")
            end = time.monotonic() + PATIENCE
            while INBOX(channel).queue_declare(passive=True).message_count < count:
                if time.monotonic() > end:
                    raise TimeoutError("not all messages came")
                time.sleep(0.1)

    def consuming(self) -> Consumer:
        """Return a consumer, to be entered."""
        return Consumer(self._channel, INBOX, callbacks=[self._take], prefetch_count=500)

    def drain(self, count: int) -> None:
        """Take so many messages, and acknowledge each."""
        self._taken = 0
        while self._taken < count:
            self._connection.drain_events(timeout=PATIENCE)

    def _take(self, _: Any, message: Any) -> None:
        self._taken += 1
        message.ack()


def _worker(broker: Broker, scale: Scale, name: str) -> Row:
    """Let a worker do tasks that do nothing, and return the CPU of all its processes for each."""
    count = scale.pick(2000, 10)
    way, _, pool = name.rpartition("-")
    transport = OURS if "ours" in way else STOCK
    vhost = broker.vhost()
    if way == "celery-native":
        queue = WORKER_QUEUE.routing_key
        _native_to(vhost, queue)
        to = Destination(NATIVE, calculate_routing_key(1, queue))
        publish = partial(publish_tasks, vhost, STOCK, delay=1.0, to=to)
    else:
        delay = 1.0 if way == "celery-ours-delayed" else None
        publish = partial(publish_tasks, vhost, OURS, delay=delay)
    env = {"BENCH_BROKER": vhost.url, "BENCH_TRANSPORT": transport, "PYTHONPATH": "."}
    with Processes("bench") as processes:
        worker = Worker(processes, "benchmarks.worker_app", env, "-P", pool, "-c", "1")
        publish(10)
        _wait_for(worker, 10)
        if not scale.quick:
            let_rest(broker)
        with _stopped(worker):
            publish(count)
            wait_until(lambda: _ready(vhost) >= count - TAKEN, PATIENCE, "not all tasks came")
            before = cpu_of(worker.pid)
        _wait_for(worker, 10 + count)
        cpu = cpu_of(worker.pid) - before
    vhost.delete()
    return {"cpu_us": cpu / count * 1e6}


@contextmanager
def _stopped(worker: Worker) -> Iterator[None]:
    """Stop a worker meanwhile: it stays connected, and takes nothing."""
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker.pid, signal.SIGCONT)


def _ready(vhost: VHost) -> int:
    return vhost.waiting(WORKER_QUEUE.routing_key).get(WORKER_QUEUE.routing_key, 0)


def _native_to(vhost: VHost, name: str) -> None:
    """Let Celery's native delivery lead to a queue, whatever exchange its tasks come by."""
    with Connection(vhost.url, transport=STOCK) as connection:
        declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
        channel = connection.default_channel
        Queue(name)(channel).declare()
        channel.queue_bind(name, CELERY.delivery, f"#.{name}")


def _wait_for(worker: Worker, count: int) -> None:
    end = time.monotonic() + PATIENCE
    while worker.log().count("succeeded in") < count:
        if time.monotonic() > end or not worker.is_running:
            raise TimeoutError(f"not all tasks ran:\n{worker.log()[-2000:]}")
        time.sleep(0.1)
