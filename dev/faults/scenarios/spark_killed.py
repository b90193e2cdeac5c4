"""Spark publishes tasks with receipts; its driver, executors or broker are killed meanwhile.

Each row must then have one receipt that says "published", and its task must arrive.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from dev.faults.environment import HERE, Case, Environment, ScenarioError
from dev.faults.ledger import CONFIRMED, SENT, Book
from dev.faults.spark_driver import JOB, due
from dev.faults.tasks import QUEUE
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.prepare import task_id

if TYPE_CHECKING:
    from dev.processes import Process

ROWS = 1500
#: Seconds until the first row is due: Java starts a few times before.
LEAD = 240.0
_LOCAL, _CLUSTER = "local[2]", "local-cluster[2,1,512]"
_EXECUTOR = b"CoarseGrainedExecutorBackend"


class Job:
    """A job that is published by one driver after the other, and the book of its rows."""

    def __init__(self, env: Environment, master: str) -> None:
        self._env, self._master = env, master
        self._receipts = env.processes.folder / "receipts"
        self._log = env.processes.folder / "driver.log"
        env.worker("--concurrency=2")
        env.declare_ladder(QUEUE, longest=2 * LEAD)
        self._first = float(int(time.time() + LEAD))
        self._book = Book(env.new_book())
        for number in range(ROWS):
            place = {"exchange": "", "routing_key": QUEUE, "queues": [QUEUE]}
            self._book.write(SENT, task_id(JOB, str(number)), due=due(self._first, number), **place)

    def start(self) -> Process:
        """Start a driver, which resumes what another has begun."""
        given = (self._env.vhost.url, self._receipts, ROWS, self._first)
        argv = [sys.executable, "-m", "dev.faults.spark_driver", self._master, *map(str, given)]
        environment = {**os.environ, "PYTHONPATH": str(HERE), "PYSPARK_PYTHON": sys.executable}
        return self._env.processes.spawn(argv, environment, self._log)

    def parts(self) -> int:
        """Return how many Spark tasks have written their receipts."""
        return sum(pq.read_metadata(file).num_rows > 0 for file in self._files())

    def _files(self) -> list[Path]:
        """Return the files of receipts, of which each append has a folder."""
        return list(self._receipts.glob("part=*/part-*.parquet"))

    def wait_for_more(self, driver: Process) -> None:
        """Wait until there are more receipts, and the next messages are on their way."""
        before = self.parts()

        def is_more() -> bool:
            if driver.poll() is not None:
                raise ScenarioError(f"the driver has ended: {self._log.read_text()[-2000:]}")
            return self.parts() > before

        self._env.wait_until(is_more, "further receipts", 300)
        time.sleep(0.7)

    def end(self, driver: Process, times: int) -> None:
        """Wait until all is published and has arrived; count receipts."""
        failed = driver.wait(600)
        if failed:
            raise ScenarioError(f"the driver has failed: {self._log.read_text()[-2000:]}")
        receipts: Counter[str] = Counter()
        for file in self._files():
            for row in pq.read_table(file, columns=["task_id", "status"]).to_pylist():
                if row["status"] == s.PUBLISHED:
                    receipts[row["task_id"]] += 1
                    self._book.write(CONFIRMED, row["task_id"])
        right = sum(receipts[task_id(JOB, str(number))] == 1 for number in range(ROWS))
        self._env.check("rows without exactly one receipt", ROWS - right, 0)
        self._env.wait_until_done(patience=240)
        self._env.notes["times"] = times


def drivers(env: Environment) -> None:
    """Kill the driver in the middle of a slice; the next one resumes."""
    job = Job(env, _LOCAL)
    for _ in range(2):
        driver = job.start()
        job.wait_for_more(driver)
        env.processes.kill(driver)
    job.end(job.start(), 2)


def executors(env: Environment) -> None:
    """Kill executors, each with its Java and in the middle of a slice; Spark starts others."""
    job = Job(env, _CLUSTER)
    driver = job.start()
    killed = 0
    for _ in range(2):
        job.wait_for_more(driver)
        pid = _executors(driver)[0]
        os.kill(pid, signal.SIGKILL)
        killed += 1
    job.end(driver, killed)


def broker(env: Environment) -> None:
    """Kill the broker while it is published to, and start it again."""
    job = Job(env, _LOCAL)
    driver = job.start()
    job.wait_for_more(driver)
    env.broker.kill()
    env.broker.start()
    job.end(driver, 1)


def _executors(driver: Process) -> list[int]:
    """Return the executors of a driver: what it starts is in its group."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pid = int(path.name)
            if os.getpgid(pid) == driver.pid and _EXECUTOR in (path / "cmdline").read_bytes():
                pids.append(pid)
    return pids


CASES = (
    Case("Spark publishes", "SIGKILL of the driver", drivers),
    Case("Spark publishes", "SIGKILL of executors", executors),
    Case("Spark publishes", "broker killed", broker),
)
