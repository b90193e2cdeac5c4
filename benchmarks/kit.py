"""Purpose: what a test of delayed tasks costs in memory, and a retry in it.

The broker is not asked: everything is in this process.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import Celery

from benchmarks.rig import Row, Scale, in_turns, summary
from kombu_binary_delay.testing import Delayed

if TYPE_CHECKING:
    from collections.abc import Callable

    from dev.broker import Broker

TITLES = {
    "test": "a test with one task, in a kit of its own",
    "retry": "each retry in a chain of hourly retries",
}
TESTS, RETRIES = 20, 1000


def testing(_: Broker, scale: Scale) -> dict[str, Row]:
    """Measure the CPU time of a test, and of each of many retries in one test."""
    app = Celery("shop", broker="amqp://", backend="cache+memory://", set_as_current=False)
    app.conf.broker_transport = "kombu_binary_delay:Transport"
    retries = scale.pick(RETRIES, 10)

    @app.task(shared=False)
    def note() -> None:
        pass

    @app.task(shared=False, bind=True, max_retries=None)
    def poll(self: Any) -> None:
        if self.request.retries < retries:
            raise self.retry(countdown=3600)

    def cpu(task: Any, runs: int, tests: int) -> Row:
        """Return the CPU time of each run, and how many of them did not come."""
        begin, ran = time.process_time(), 0
        for _ in range(tests):
            with Delayed() as delayed:
                task.apply_async(countdown=3600)
                delayed.run_until_idle()
                ran += len(delayed.ran())
        runs *= tests
        return {"cpu_ms": (time.process_time() - begin) * 1000 / runs, "missing": runs - ran}

    ways: dict[str, Callable[[], Row]] = {
        "test": partial(cpu, note, 1, scale.pick(TESTS, 1)),
        "retry": partial(cpu, poll, retries + 1, 1),
    }
    # What the first one imports and declares is no test's.
    cpu(note, 1, 1)
    return summary(in_turns(list(ways), scale, lambda name: ways[name](), "testing", times=5))
