"""A schedule of one second, while workers and the broker are killed; and its ledger.

python -m tests.broker.schedules_story SECONDS [cluster]
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import kombu

from dev.broker import Broker
from dev.cluster import Cluster
from dev.processes import Processes
from dev.worker import Worker
from kombu_binary_delay import schedules
from tests.broker.schedules_app import BROKER, LEDGER, QUORUM, app

ROOT = Path(__file__).parents[2]
APP = "tests.broker.schedules_app"


class Line(NamedTuple):
    """A run in the ledger; times in seconds since the epoch."""

    schedule: str
    due: float
    at: float
    id: str


class Ledger(NamedTuple):
    """What the ledger says of one schedule.

    :param missing: the due times without a run, in seconds since the first.
    :param twice: how many due times ran more than once.
    :param strange: how many runs with the same due time have another id.
    :param late: how late the runs were: the median, the 99th of a hundred, and the latest.
    """

    schedule: str
    due: int
    missing: tuple[float, ...]
    twice: int
    strange: int
    early: int
    late: tuple[float, float, float]


def ledger(lines: list[Line], every: float, name: str) -> Ledger:
    """Compare what ran with the due times from the first to the last run."""
    of_it = [line for line in lines if line.schedule == name]
    first, last = min(line.due for line in of_it), max(line.due for line in of_it)
    wanted = {round(first + every * n, 3) for n in range(round((last - first) / every) + 1)}
    runs = Counter(round(line.due, 3) for line in of_it)
    late = sorted(line.at - line.due for line in of_it)
    shares = tuple(round(late[int(len(late) * share)], 2) for share in (0.5, 0.99))
    return Ledger(
        name,
        len(wanted),
        tuple(sorted(due - first for due in wanted - runs.keys())),
        sum(count > 1 for count in runs.values()),
        len({(line.due, line.id) for line in of_it}) - len(runs),
        len(runs.keys() - wanted) + sum(lateness < 0 for lateness in late),
        (shares[0], shares[1], round(late[-1], 2)),
    )


class Story:
    """Two workers of an app with schedules, on a broker that may be killed."""

    def __init__(self, stack: ExitStack, urls: str, *, quorum: bool = False) -> None:
        self._processes = stack.enter_context(Processes("schedules"))
        self.path = self._processes.folder / "ledger"
        self._environment = {BROKER: urls, LEDGER: str(self.path), "PYTHONPATH": str(ROOT)}
        if quorum:
            self._environment[QUORUM] = "1"
        self.urls = urls
        with self.connection() as connection:
            self.applied = schedules.apply(app, connection=connection)
        self.workers = [self._worker(), self._worker()]

    def connection(self) -> kombu.Connection:
        return kombu.Connection(
            self.urls,
            transport="kombu_binary_delay:Transport",
            transport_options=app.conf.broker_transport_options,
        )

    def _worker(self) -> Worker:
        return Worker(self._processes, APP, self._environment, "--concurrency=1")

    def kill_a_worker(self) -> None:
        """Kill one of the two, and start another."""
        random.choice(self.workers).kill()
        self.workers = [worker if worker.is_running else self._worker() for worker in self.workers]

    def lines(self) -> list[Line]:
        text = self.path.read_text() if self.path.exists() else ""
        rows = (line.split() for line in text.splitlines())
        return [
            Line(name, datetime.fromisoformat(due).timestamp(), float(at), task_id)
            for name, due, at, task_id in rows
        ]

    def ledgers(self) -> list[Ledger]:
        lines = self.lines()
        return [ledger(lines, 1.0, "second"), ledger(lines, 2.0, "two")]

    def went_on(self) -> bool:
        """Whether all that was due two seconds ago has run."""
        lines = self.lines()
        return bool(lines) and max(line.due for line in lines) > time.time() - 2

    def log(self) -> str:
        return "\n".join(worker.log() for worker in self.workers)


def _faults(
    story: Story, broker: Broker | None, cluster: Cluster | None
) -> Iterator[tuple[str, Callable[[], object]]]:
    while True:
        for _ in range(4):
            yield "a worker is killed", story.kill_a_worker
        if broker is not None:
            yield "the broker is restarted", broker.restart

            def kill() -> None:
                broker.kill()
                broker.start()

            yield "the broker is killed", kill
        if cluster is not None:
            yield "a leader is killed", lambda: _kill_the_leader(cluster)


def _kill_the_leader(cluster: Cluster) -> None:
    nodes = list(cluster)
    listed = nodes[0].ctl("-q", "list_queues", "name", "leader", "--formatter", "csv")
    leaders = [row.split(",")[1].strip('"') for row in listed.splitlines() if ".schedules." in row]
    (name, _), *_ = Counter(leaders).most_common()
    node = next(node for node in nodes if node.node == name)
    node.kill()
    time.sleep(5)
    node.start()


def main(seconds: float, kind: str = "") -> None:
    with ExitStack() as stack:
        cluster = broker = None
        if kind == "cluster":
            cluster = stack.enter_context(Cluster())
            urls = ";".join(node.url for node in cluster)
        else:
            broker = stack.enter_context(Broker())
            urls = broker.url
        story = Story(stack, urls, quorum=cluster is not None)
        end, done = time.monotonic() + seconds, Counter[str]()
        for name, fault in _faults(story, broker, cluster):
            time.sleep(8)
            if time.monotonic() > end:
                break
            fault()
            done[name] += 1
        time.sleep(20)
        report = [f"{seconds:g} s on {kind or 'one node'}: {dict(done)}"]
        report += map(str, story.ledgers())
        with story.connection() as connection:
            report += map(str, schedules.listed(app, connection=connection).schedules)
        report += [line for line in story.log().splitlines() if "WARN" in line][-5:]
    sys.stdout.write("\n".join(report) + "\n")


if __name__ == "__main__":
    main(float(sys.argv[1]), *sys.argv[2:])
