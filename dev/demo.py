"""Purpose: show the main feature: `make demo`.

    python -m dev.demo [--picture FILE]

Some hundred tasks with a countdown wait in a real broker for a real worker. Half-way, the worker
is killed and the broker restarted. Then the demo counts. The exit status is 0 only if no task was
lost and none arrived early. `--picture docs/demo.svg` also writes what it has said, and a moment
before the outage, as the picture of README.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from contextlib import AbstractContextManager, ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import amqp
from celery.signals import before_task_publish

from dev.broker import Broker, BrokerError, VHost
from dev.demo_app import app, arrive
from dev.demo_count import Accounts
from dev.demo_display import Display, Picture
from dev.processes import Processes
from dev.worker import Worker, WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kombu_binary_delay import Topology

NEAR = [random.uniform(0.3, 20) for _ in range(400)]  # noqa: S311, seconds
AFTER = [random.uniform(0.3, 5) for _ in range(100)]  # noqa: S311, published after the outage
HOUR, DAY = 3600, 86400
FAR = [1 * HOUR, 5 * HOUR, 12 * HOUR, 1 * DAY, 3 * DAY, 10 * DAY, 30 * DAY] * 4
HALF_WAY = 10  # seconds after the first publish
PATIENCE = 60  # seconds after the last task was due and a worker ran
# Seconds: a task due this shortly before the SIGKILL may be under way, and waits like the others.
UNDER_WAY = 0.25


class Demo:
    """The demo, with its broker, worker and display."""

    def __init__(self, processes: Processes, broker: Broker, display: Display) -> None:
        self.display = display
        self.broker = broker
        self.processes = processes
        self.accounts = Accounts()
        self.arrivals: Path = processes.folder / "arrivals"
        self.arrivals.touch()
        self.vhost: VHost = broker.vhost()
        app.conf.broker_url = self.vhost.url
        before_task_publish.connect(self._note)

    def run(self) -> bool:
        """Run the demo; return whether no task was lost or early."""
        say = self.display.say
        self.accounts.far = self._publish(FAR)
        topology = self._topology()
        kind = topology.queue_type
        say(f"{len(FAR)} tasks sent, due in hours and days; they wait in {kind} queues")
        worker = self._worker()
        memory = worker.memory()
        say(f"a Celery worker runs, process {worker.pid}")

        with Watch(self.display, self.vhost, topology, self.look):
            begin = time.time()
            near = self._publish(NEAR)
            say(f"{len(NEAR)} tasks sent, with a countdown of 0.3 to 20 s")
            held = self._held_by(worker)
            memory = worker.memory() - memory
            time.sleep(max(0, begin + HALF_WAY - time.time()))

            self.display.keep_moment()
            killed = time.time()
            worker.kill()
            say("half-way: the worker is killed (SIGKILL), RabbitMQ restarts")
            self.broker.restart()
            say("RabbitMQ is back")
            worker = self._worker()
            outage = time.time() - killed
            say(f"a new worker runs, process {worker.pid}")

            after = self._publish(AFTER)
            say(f"{len(AFTER)} more tasks sent, with a countdown of 0.3 to 5 s")
            deadline = time.time() + max(AFTER) + PATIENCE
            while self.look().missing and time.time() < deadline:
                time.sleep(0.1)
            time.sleep(1)  # a duplicate, if there is one, arrives soon

        before = {task for task in near if self.accounts.due[task] < killed - UNDER_WAY}
        return self._report(
            topology,
            {
                f"{len(before)} due before the outage": before,
                f"{len(near - before)} that waited through its {outage:.0f} s": near - before,
                f"{len(after)} sent after it": after,
            },
            f"{held} tasks, {memory / 1e6:+.1f} MB",
        )

    def look(self) -> Accounts:
        """Return the accounts with the tasks that have arrived until now."""
        self.accounts.read(self.arrivals.read_text())
        return self.accounts

    def _publish(self, countdowns: Iterable[float]) -> set[str]:
        return {arrive.apply_async(countdown=countdown).id for countdown in countdowns}

    def _note(self, headers: dict[str, Any], **_: object) -> None:
        # Celery's due time of the task, to the microsecond.
        self.accounts.due[headers["id"]] = datetime.fromisoformat(headers["eta"]).timestamp()

    def _topology(self) -> Topology:
        with app.connection_for_write() as connection:
            topology: Topology = connection.connection.delay_mechanism.router.topology
            return topology

    def _worker(self) -> Worker:
        env = {"DEMO_BROKER": self.vhost.url, "DEMO_ARRIVALS": str(self.arrivals)}
        return Worker(self.processes, "dev.demo_app", env, "-P", "prefork", "-c", "2")

    def _held_by(self, worker: Worker) -> int:
        """Return how many tasks are in the worker and not yet due."""
        inspect = app.control.inspect(destination=[worker.name], timeout=60)
        now = time.time()
        scheduled = (entry["request"] for entry in inspect.scheduled()[worker.name])
        tasks = [task["id"] for task in (*scheduled, *inspect.reserved()[worker.name])]
        return sum(self.accounts.due[task] > now for task in tasks)

    def _overdue(self) -> int:
        """Return how many missing tasks are in the broker, perhaps between two queues."""
        time.sleep(6)  # quorum queues report their length every 5 s
        kept: int = sum(row.get("messages", 0) for row in self.vhost.queues())
        return min(self.accounts.missing, max(0, kept - len(self.accounts.far)))

    def _report(self, topology: Topology, groups: dict[str, set[str]], held: str) -> bool:
        accounts = self.look()
        waiting = sum(self.vhost.waiting(*level_queues(topology)).values())
        overdue = self._overdue() if accounts.missing else 0
        lost = accounts.missing - overdue + max(0, len(accounts.far) - waiting)
        rows = [
            ("tasks sent", f"{len(accounts.due)}, {len(FAR)} of them due in hours and days"),
            ("have run", len(accounts.arrivals)),
            ("lost", lost),
            ("early", accounts.early),
            *([("overdue, but in the broker", overdue)] if overdue else []),
            ("run more than once", accounts.duplicated),
            ("late (p50 / p99 / max)", accounts.lateness()),
            *((f"  {name}", accounts.lateness(tasks)) for name, tasks in groups.items()),
            ("waiting in the worker's memory", held),
            ("still waiting in the broker", waiting),
        ]
        good = not (lost or overdue or accounts.early)
        self.display.report(rows, good=good)
        return good


class Watch(AbstractContextManager["Watch"]):
    """Shows a picture twice a second, whatever else happens."""

    def __init__(
        self, display: Display, vhost: VHost, topology: Topology, look: Callable[[], Accounts]
    ) -> None:
        self._display, self._vhost, self._topology, self._look = display, vhost, topology, look
        self._seen: dict[str, int] = {}  # queue -> messages
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(0.5):
            accounts = self._look()
            is_away = self._is_away()
            levels = [
                {queue.wait or 0: self._seen.get(queue.name, 0) for queue in level.queues}
                for level in self._topology.levels
            ]
            self._display.show(
                Picture(
                    sorted(levels, key=min),
                    is_away,
                    len(accounts.arrivals),
                    len(accounts.due) - len(accounts.far),
                    accounts.lateness(),
                )
            )

    def _is_away(self) -> bool:
        """Return whether the broker is unreachable; if not, update the numbers."""
        try:
            self._seen = self._vhost.waiting(*level_queues(self._topology))
        except (OSError, amqp.AMQPError):
            return True
        return False


def level_queues(topology: Topology) -> list[str]:
    """Return the names of all queues of the levels."""
    return [queue.name for level in topology.levels for queue in level.queues]


def main() -> int:
    """Run the demo; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dev.demo")
    parser.add_argument("--picture", type=Path, help="an SVG file to write")
    picture = parser.parse_args().picture
    # So that the processes that we started end in order. Ctrl-C already raises an exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with ExitStack() as stack:
        display = Display()
        stack.callback(display.close)
        processes = stack.enter_context(Processes("demo"))
        display.say("a private RabbitMQ starts, on 127.0.0.1")
        broker = stack.enter_context(Broker(os.environ.get("RABBITMQ_ROOT")))
        display.say(
            f"RabbitMQ {broker.version} runs; it retries unconfirmed dead letters after 5 s"
        )
        good = Demo(processes, broker, display).run()
        if good and picture:
            display.save(picture, "make demo")
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (BrokerError, WorkerError) as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
