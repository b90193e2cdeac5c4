"""Purpose: what a publish costs the publisher: CPU, rate, and the first delayed one.

Each way to publish has a connection of its own, and they take turns. Queues that would fill up
drop their oldest messages; delayed ones wait.
"""

from __future__ import annotations

import gc
import random
import time
from contextlib import ExitStack
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from celery import Celery
from kombu import Connection, Exchange, Queue
from kombu.transport.native_delayed_delivery import (
    bind_queue_to_native_delayed_delivery_exchange,
    declare_native_delayed_delivery_exchanges_and_queues,
)

from benchmarks.rig import Row, Scale, in_turns, let_rest, summary
from kombu_binary_delay import Settings, transport

if TYPE_CHECKING:
    from collections.abc import Callable

    from dev.broker import Broker, VHost

OURS = "kombu_binary_delay:Transport"
STOCK = "pyamqp"
BODY = "x" * 200
LONGEST = 3600  # seconds

_random = random.Random(1)  # noqa: S311 - the same delays for everybody
DELAYS = [_random.randint(1, LONGEST) for _ in range(4096)]

#: What Celery's native delivery needs: a quorum queue on a topic exchange.
TASKS = Queue(
    "tasks",
    Exchange("tasks", "topic"),
    routing_key="tasks",
    queue_arguments={"x-queue-type": "quorum", "x-max-length": 1000},
)
INBOX = Queue("inbox", queue_arguments={"x-queue-type": "quorum", "x-max-length": 1000})


def nothing(argument: str) -> None:
    """Do what the task does."""


class Way:
    """A way to publish, with a connection of its own."""

    def __init__(
        self, vhost: VHost, transport: str, *, confirm: bool = False, **settings: str
    ) -> None:
        self.stack = ExitStack()
        options: dict[str, Any] = {"confirm_publish": confirm}
        if settings:
            options["binary_delay"] = settings
        self.connection = self.stack.enter_context(
            Connection(vhost.url, transport=transport, transport_options=options)
        )

    def run(self, count: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.stack.close()


class ByKombu(Way):
    """Kombu's Producer.publish()."""

    def __init__(
        self, vhost: VHost, transport: str, *, delayed: bool = False, **options: Any
    ) -> None:
        super().__init__(vhost, transport, **options)
        INBOX(self.connection.default_channel).declare()
        self.producer = self.connection.Producer()
        self.delayed = delayed

    def run(self, count: int) -> None:
        publish = self.producer.publish
        if self.delayed:
            for number in range(count):
                publish(
                    BODY,
                    routing_key="inbox",
                    headers={"x-delay": DELAYS[number % 4096] * 1000},
                )
        else:
            for _ in range(count):
                publish(BODY, routing_key="inbox", headers={})


class ByBatch(ByKombu):
    """The same inside of Producer.batch()."""

    def run(self, count: int) -> None:
        with self.producer.batch():
            super().run(count)


class ByCelery(Way):
    """A Celery task's apply_async()."""

    def __init__(
        self,
        vhost: VHost,
        transport: str,
        *,
        delayed: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(vhost, transport, **options)
        app = Celery(
            "bench",
            broker=vhost.url,
            broker_transport=transport,
            task_queues=[TASKS],
            task_default_queue=TASKS.name,
            task_default_exchange=TASKS.exchange.name,
            task_default_exchange_type=TASKS.exchange.type,
            task_default_routing_key=TASKS.routing_key,
            task_ignore_result=True,
            set_as_current=False,
        )
        self.task = app.task(name="task")(nothing)
        TASKS(self.connection.default_channel).declare()
        self.producer = self.stack.enter_context(app.amqp.Producer(self.connection))
        self.delayed = delayed

    def run(self, count: int) -> None:
        send = self.task.apply_async
        for number in range(count):
            countdown = DELAYS[number % 4096] if self.delayed else None
            send(("an argument",), countdown=countdown, producer=self.producer)


class ByNative(ByCelery):
    """The same by Celery's native delayed delivery."""

    def __init__(self, vhost: VHost) -> None:
        super().__init__(vhost, STOCK, delayed=True)
        declare_native_delayed_delivery_exchanges_and_queues(self.connection, "quorum")
        bind_queue_to_native_delayed_delivery_exchange(self.connection, TASKS)


#: By the keys of the results: titles, and how each is made.
WAYS: dict[str, tuple[str, Callable[[VHost], Way]]] = {
    "kombu": ("Kombu's own transport", lambda v: ByKombu(v, STOCK)),
    "ours": ("ours, no delay", lambda v: ByKombu(v, OURS)),
    "ours-delayed": ("ours, delayed", lambda v: ByKombu(v, OURS, delayed=True)),
    "ours-journal": (
        "ours, delayed, with the journal",
        lambda v: ByKombu(v, OURS, delayed=True, journal="stream"),
    ),
    "ours-confirm": ("ours, confirmed one by one", lambda v: ByKombu(v, OURS, confirm=True)),
    "ours-confirm-delayed": (
        "ours, delayed, confirmed one by one",
        lambda v: ByKombu(v, OURS, confirm=True, delayed=True),
    ),
    "batch": ("ours, confirmed in batches", lambda v: ByBatch(v, OURS)),
    "batch-delayed": (
        "ours, delayed, confirmed in batches",
        lambda v: ByBatch(v, OURS, delayed=True),
    ),
    "batch-journal": (
        "ours, delayed, confirmed in batches, with the journal",
        lambda v: ByBatch(v, OURS, delayed=True, journal="stream"),
    ),
    "celery": ("Celery on Kombu's own transport", lambda v: ByCelery(v, STOCK)),
    "celery-ours": ("Celery on ours, no delay", lambda v: ByCelery(v, OURS)),
    "celery-native": ("Celery, native delayed delivery", ByNative),
    "celery-ours-delayed": ("Celery on ours, delayed", lambda v: ByCelery(v, OURS, delayed=True)),
}


#: What is measured in turns with one other, and nothing between them: how many messages a turn.
PAIRS: dict[str, tuple[tuple[str, int], tuple[str, int]]] = {
    "undelayed": (("ours", 1000), ("kombu", 1000)),
    "celery-undelayed": (("celery-ours", 250), ("celery", 250)),
    "celery-delayed": (("celery-ours-delayed", 250), ("celery-native", 250)),
    "batch": (("batch", 5000), ("ours-confirm", 500)),
    "batch-delayed": (("batch-delayed", 5000), ("ours-confirm-delayed", 500)),
}


def cost(broker: Broker, scale: Scale) -> Row:
    """Measure CPU and rate of each way, in turns of a few hundred messages."""
    count = scale.pick(1000, 20)
    counts = {name: count // 4 if "confirm" in name else count for name in WAYS}
    return summary(compare(broker, counts, scale, 5), "kombu")


def pairs(broker: Broker, scale: Scale) -> Row:
    """Measure one of each of the :data:`PAIRS` beside the other."""
    figures = {}
    for name, ((ours, many), (theirs, few)) in PAIRS.items():
        counts = {ours: scale.pick(many, 10), theirs: scale.pick(few, 10)}
        # Else one pays for what the other has left the broker to do.
        runs = compare(broker, counts, scale, 10, let_rest)
        both = summary(runs, theirs)
        figures[name] = both[ours]
        if not scale.quick:
            # Of both, the one that was disturbed more.
            shares = [both[variant]["stolen"] for variant in (ours, theirs)]
            figures[name]["stolen"] = max(shares, key=itemgetter("most"))
    return figures


def compare(
    broker: Broker,
    counts: dict[str, int],
    scale: Scale,
    times: int,
    before: Callable[[Broker], object] = lambda _: None,
) -> dict[str, list[Row]]:
    """Let ways publish in turns of so many messages each, and do something before each turn."""
    vhost = broker.vhost()
    ways = {name: WAYS[name][1](vhost) for name in counts}

    def measure(name: str) -> Row:
        way, messages = ways[name], counts[name]
        before(broker)
        gc.collect()
        start, cpu = time.perf_counter(), time.process_time()
        way.run(messages)
        cpu = time.process_time() - cpu
        return {
            "cpu_us": cpu / messages * 1e6,
            "rate": messages / (time.perf_counter() - start),
        }

    for way in ways.values():
        way.run(scale.pick(300, 2))
    runs = in_turns(list(ways), scale, measure, "publish", times)
    for way in ways.values():
        way.close()
    vhost.delete()
    return runs


def first(broker: Broker, scale: Scale) -> dict[str, Row]:
    """Time the first delayed publish of a process, on a broker without and with the ladder."""
    ladders: dict[str, dict[str, Any]] = {
        "ours, 4 levels": {"levels": 4},
        "ours, 8 levels": {"levels": 8},
        "ours, 16 levels": {},
        "ours, binary, 31 levels": {"radix": 2},
    }

    def connected(vhost: VHost, settings: dict[str, Any], longest: int) -> float:
        options = {"binary_delay": settings}
        # It stands for a process of its own, which relies on no earlier connection.
        transport._shared.cache_clear()  # noqa: SLF001
        with Connection(vhost.url, transport=OURS, transport_options=options) as connection:
            INBOX(connection.default_channel).declare()
            producer = connection.Producer()
            start = time.perf_counter()
            producer.publish(BODY, routing_key="inbox", headers={"x-delay": longest})
            return (time.perf_counter() - start) * 1000

    def measure(name: str) -> Row:
        vhost = broker.vhost()
        if name == "celery-native":
            with Connection(vhost.url, transport=STOCK) as connection:
                TASKS(connection.default_channel).declare()
                start = time.perf_counter()
                declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
                bind_queue_to_native_delayed_delivery_exchange(connection, TASKS)
                nothing_there = (time.perf_counter() - start) * 1000
                start = time.perf_counter()
                declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
                bind_queue_to_native_delayed_delivery_exchange(connection, TASKS)
                row = {"cold_ms": nothing_there, "warm_ms": (time.perf_counter() - start) * 1000}
        else:
            settings = ladders[name]
            longest = Settings(**settings).ladder.maximum - 60_000
            longest = max(longest, 20_000)
            row = {
                "cold_ms": connected(vhost, settings, longest),
                "warm_ms": connected(vhost, settings, longest),
            }
        vhost.delete()
        return row

    return summary(in_turns([*ladders, "celery-native"], scale, measure, "first"))
