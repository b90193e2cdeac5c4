"""Purpose: publishers and consumers, each a process of its own, and the ledgers that they keep.

    python -m dev.faults.programs publish|consume|cancel '{...}'

Both recover by kombu's own means, as an application would: a publish is retried by the producer, a
consumer is a `ConsumerMixin`. A message's due time is an absolute `eta`, as Celery's is, so that a
publish which is retried is not due later.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import amqp
from kombu import Connection, Queue
from kombu.mixins import ConsumerMixin

import kombu_binary_delay
from dev.faults.ledger import (
    CANCELLED,
    CANCELLING,
    CONFIRMED,
    DELIVERED,
    DONE,
    DROPPED,
    FAILED,
    SENT,
    Book,
)
from kombu_binary_delay import AmendmentError, on_dropped
from kombu_binary_delay.amendments.record import KEY

TRANSPORT = "kombu_binary_delay:Transport"
QUORUM = {"x-queue-type": "quorum"}
RETRY = {"max_retries": None, "interval_start": 0, "interval_step": 0.1, "interval_max": 1}
PATIENCE = 15  # seconds that a publisher waits for a confirm before it tries again


@dataclass(frozen=True)
class Publishing:
    """The options of a publisher.

    Message n goes to the destination n modulo their number: an exchange, a routing key, and the
    queues where it belongs.
    """

    urls: list[str]
    book: str
    destinations: list[tuple[str, str, list[str]]]
    count: int
    rate: float  # messages per second
    delays: tuple[float, float]  # seconds, the shortest and the longest
    first: int = 0  # the number of the first message
    name: str = "m"
    headers: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    #: Kill itself with this signal once so many are confirmed, before the publish has returned.
    dies_after: int | None = None
    dies_of: int = signal.SIGKILL
    #: Seconds by which this publisher's clock is put forward (or back) after half of the messages.
    clock_step: float = 0.0
    #: Message n has the key n modulo this number; 0 for no keys.
    keys: int = 0
    #: The quorum queues that it declares itself, at its start.
    declares: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Cancelling:
    """The options of a program that cancels."""

    urls: list[str]
    book: str
    names: list[str]
    at_once: int = 1
    rate: float = 100.0  # calls per second
    clock_step: float = 0.0  # seconds, from its start
    celery: bool = False  # by a revoke of Celery's


@dataclass(frozen=True)
class Consuming:
    """The options of a consumer."""

    urls: list[str]
    book: str
    queues: list[str]
    #: Kill itself with SIGKILL at this message, before or after it is acknowledged.
    dies_at: int | None = None
    dies: str = "before"
    #: Seconds by which its clock is put forward (or back) at this message.
    clock_step: float = 0.0
    steps_at: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


def publish(options: Publishing) -> None:
    """Publish, confirm by confirm, and keep the ledger."""
    book = Book(Path(options.book))
    draw = random.Random(options.name)  # noqa: S311 - the same delays each time
    delays = [draw.uniform(*options.delays) for _ in range(options.first + options.count)]
    dying = _Dying(book, options.dies_of)
    with _connect(options.urls, options.settings) as connection:
        producer = connection.Producer()
        for queue in options.declares:
            Queue(queue, queue_arguments=QUORUM)(connection.default_channel).queue_declare()
        start = time.monotonic()
        for number in range(options.first, options.first + options.count):
            since = number - options.first
            if since == options.count // 2 and options.clock_step:
                _step_clock(options.clock_step)
            time.sleep(max(0.0, start + since / options.rate - time.monotonic()))
            name = f"{options.name}-{number}"
            exchange, key, queues = options.destinations[number % len(options.destinations)]
            due = _microsecond(time.time() + delays[number])
            more = {"key": f"key-{number % options.keys}"} if options.keys else {}
            to = {"exchange": exchange, "routing_key": key, "queues": list(queues)}
            book.write(SENT, name, due=due, **to, **more)
            keyed = {KEY: more["key"]} if more else {}
            if since == options.dies_after:
                dying.name = name
            eta = datetime.fromtimestamp(due, UTC).isoformat()
            try:
                producer.publish(
                    name,
                    exchange=exchange,
                    routing_key=key,
                    headers={"task": "program", "id": name, "eta": eta, **keyed, **options.headers},
                    delivery_mode=2,
                    retry=True,
                    retry_policy=RETRY,
                    confirm_timeout=PATIENCE,
                )
            except Exception as exc:  # noqa: BLE001 - whatever it is: it was not confirmed
                book.write(FAILED, name, error=repr(exc))
            else:
                book.write(CONFIRMED, name)


def cancel(options: Cancelling) -> None:
    """Cancel, call by call, and keep the ledger; end where that is refused."""
    book = Book(Path(options.book))
    _step_clock(options.clock_step)
    with _connect(options.urls, {}) as connection:
        for first in range(0, len(options.names), options.at_once):
            names = options.names[first : first + options.at_once]
            for name in names:
                book.write(CANCELLING, name)
            if options.celery:
                _revoke(names, options.urls)
            else:
                _cancel(names, connection)
            for name in names:
                book.write(CANCELLED, name)
            time.sleep(1 / options.rate)


def _revoke(names: list[str], urls: list[str]) -> None:
    from dev.faults.tasks import app  # noqa: PLC0415 - which imports this module

    app.conf.broker_url = ";".join(urls)
    app.control.revoke(names)


def _cancel(names: list[str], connection: Connection) -> None:
    end = time.monotonic() + 150
    while True:
        try:
            kombu_binary_delay.cancel(names, connection=connection)
        except (AmendmentError, *connection.connection_errors) as exc:
            if "may not amend" in str(exc) or time.monotonic() > end:
                raise
            time.sleep(0.2)
        else:
            return


class Consumer(ConsumerMixin):
    """Takes messages, writes them down, acknowledges them."""

    def __init__(self, options: Consuming) -> None:
        self.options = options
        self.book = Book(Path(options.book))
        self.connection = _connect(options.urls, options.settings)
        self.count = 0
        on_dropped(lambda dropped: self.book.write(DROPPED, dropped.id, queue=dropped.queue))

    def get_consumers(self, consumer: Any, channel: Any) -> list[Any]:
        """Consume from all queues, whatever declared them."""
        del channel

        def take(queue: str) -> Any:
            return lambda body, message: self.take(queue, body, message)

        return [
            consumer([Queue(queue, no_declare=True)], callbacks=[take(queue)], prefetch_count=50)
            for queue in self.options.queues
        ]

    def take(self, queue: str, body: Any, message: Any) -> None:
        """Write a message down before and after."""
        name = message.headers.get("id")
        if name is None:
            message.ack()  # it only filled the queue
            return
        info = message.delivery_info
        self.book.write(
            DELIVERED,
            name,
            queue=queue,
            exchange=info["exchange"],
            routing_key=info["routing_key"],
            redelivered=info.get("redelivered"),
            body=body,
        )
        self.count += 1
        if self.count == self.options.steps_at:
            _step_clock(self.options.clock_step)
        dies = self.options.dies if self.count == self.options.dies_at else ""
        if dies == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        self.book.write(DONE, name, queue=queue)
        message.ack()
        if dies == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    def on_connection_error(self, exc: Exception, interval: float) -> None:
        """Log the error; kombu retries."""
        print(f"{time.time():.3f} {exc!r}, again in {interval} s", flush=True)  # noqa: T201


def main(argv: list[str]) -> None:
    """Be the program that the arguments say."""
    role, options = argv[0], json.loads(argv[1])
    if role == "publish":
        publish(Publishing(**options))
    elif role == "cancel":
        cancel(Cancelling(**options))
    else:
        Consumer(Consuming(**options)).run()


def to_argv(options: Publishing | Cancelling | Consuming) -> list[str]:
    """Write the command that starts a program with these options."""
    roles = {Publishing: "publish", Cancelling: "cancel", Consuming: "consume"}
    role = roles[type(options)]
    return [sys.executable, "-m", "dev.faults.programs", role, json.dumps(asdict(options))]


def _connect(urls: list[str], settings: dict[str, Any]) -> Connection:
    return Connection(
        urls,
        transport=TRANSPORT,
        transport_options={"confirm_publish": True, "binary_delay": settings},
        heartbeat=10,
        connect_timeout=30,  # a busy broker takes longer than the 5 s that are the default
    )


def _microsecond(seconds: float) -> float:
    return round(seconds * 1e6) / 1e6


def _step_clock(step: float) -> None:
    """Move the clock of this process, as the package and everything else in it reads it."""
    read, read_ns = time.time, time.time_ns
    time.time = lambda: read() + step
    time.time_ns = lambda: read_ns() + round(step * 1e9)


class _Dying:
    """Ends this process when the confirm of a message comes in, before the publish returns."""

    def __init__(self, book: Book, number: int) -> None:
        self.name: str | None = None
        on_ack = amqp.Channel._on_basic_ack  # noqa: SLF001 - where a confirm comes in

        def take(channel: Any, *arguments: Any) -> None:
            if self.name is not None:
                # What follows it, such as the record of a key, is not done.
                book.write(CONFIRMED, self.name, recorded=False)
                os.kill(os.getpid(), number)
                time.sleep(1)  # SIGTERM takes a moment
            on_ack(channel, *arguments)

        amqp.Channel._on_basic_ack = take  # noqa: SLF001 - see above


if __name__ == "__main__":
    main(sys.argv[1:])
