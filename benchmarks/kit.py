"""Purpose: what a test of delayed tasks costs in memory, and a retry in it.

Beside it is what Celery takes alone: its worker runs the same tasks from Kombu's transport
``memory``, which has no delays. The broker is not asked: everything is in this process.
"""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import Celery

from benchmarks.rig import Row, Scale, in_turns, summary
from kombu_binary_delay.testing import Delayed
from kombu_binary_delay.testing.kit import AT_ONCE
from kombu_binary_delay.testing.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from dev.broker import Broker

TITLES = {
    "test": "a test with one task, in a kit of its own",
    "test, Celery": "Celery alone: a worker's start, the task, its end",
    "retry": "each retry in a chain of hourly retries",
    "retry, Celery": "Celery alone: each retry, without a delay",
}
TESTS, RETRIES = 20, 1000
#: How many retries a year of hourly ones has.
YEAR = 365 * 24


class Shop:
    """An app, and how many of its tasks have run.

    :param countdown: of each task and retry, in seconds.
    :param retries: how often ``poll`` is tried again.
    """

    def __init__(self, broker: str, countdown: int, retries: int) -> None:
        self.app = Celery("shop", broker=broker, backend="cache+memory://", set_as_current=False)
        self.countdown, self.ran = countdown, 0

        @self.app.task(shared=False)
        def note() -> None:
            self.ran += 1

        @self.app.task(shared=False, bind=True, max_retries=None)
        def poll(task: Any) -> None:
            self.ran += 1
            if task.request.retries < retries:
                raise task.retry(countdown=countdown)

        self.note, self.poll = note, poll

    def test_on_kit(self, task: Any) -> None:
        """Run a task to its end in a kit of its own."""
        with Delayed() as delayed:
            task.apply_async(countdown=self.countdown)
            delayed.run_until_idle()

    def test_on_celery(self, task: Any) -> None:
        """Run a task to its end in a worker of its own."""
        worker = Worker(self.app)
        task.apply_async(countdown=self.countdown)
        worker.run(AT_ONCE)
        worker.stop()


def testing(_: Broker, scale: Scale) -> dict[str, Row]:
    """Measure the CPU time of a test, and of each of many retries in one test."""
    retries = scale.pick(RETRIES, 10)
    ours = Shop("amqp://", 3600, retries)
    ours.app.conf.broker_transport = "kombu_binary_delay:Transport"
    alone = Shop("memory://", 0, retries)

    def cpu(shop: Shop, test: Callable[[], None], runs: int, tests: int) -> Row:
        """Return the CPU time of each run, and how many of them did not come."""
        # What others have left is not its garbage.
        gc.collect()
        begin, shop.ran = time.process_time(), 0
        for _ in range(tests):
            test()
        seconds = (time.process_time() - begin) / (tests * runs)
        row = {"cpu_ms": seconds * 1000, "missing": tests * runs - shop.ran}
        return row if runs == 1 else {**row, "year_s": seconds * YEAR}

    tests = scale.pick(TESTS, 1)
    ways: dict[str, Callable[[], Row]] = {}
    for name, shop, test in (
        ("", ours, ours.test_on_kit),
        (", Celery", alone, alone.test_on_celery),
    ):
        # What the first one imports and declares is no test's.
        test(shop.note)
        ways[f"test{name}"] = partial(cpu, shop, partial(test, shop.note), 1, tests)
        ways[f"retry{name}"] = partial(cpu, shop, partial(test, shop.poll), retries + 1, 1)
    names = [name for name in TITLES if name in ways]
    return summary(in_turns(names, scale, lambda name: ways[name](), "testing", times=5))
