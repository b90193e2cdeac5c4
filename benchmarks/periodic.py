"""Purpose: periodic tasks by celery beat, by RedBeat, and by the schedules in the broker.

A task each second, while what sends it is killed, is there twice, or loses its broker; and 1,000
that are due in the same second. RedBeat is measured if redis-server is in PATH and celery-redbeat
is installed. One beat is started again after five seconds, as by a supervisor; of the others there
are two, and the first is killed for good. What arrives is counted at the queue.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import kombu

from benchmarks.periodic_app import BROKER, COUNT, OURS, REDIS
from benchmarks.rig import Row, Scale, brief, percentiles, say, summary
from dev.processes import Process, Processes
from dev.service import free_ports, wait_until

if TYPE_CHECKING:
    from dev.broker import Broker

ROOT = Path(__file__).parents[1]
APP = "benchmarks.periodic_app"
TITLES = {"beat": "celery beat", "redbeat": "RedBeat, two", "ours": "schedules, two workers"}
SUPERVISOR = 5.0
_QUEUE = "celery"


class Arrivals:
    """What arrives in the tasks' queue, in seconds since the epoch."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stopped = threading.Event()
        self.at: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        lost = OSError, kombu.exceptions.KombuError, *kombu.Connection().connection_errors
        while not self._stopped.is_set():
            with suppress(*lost), kombu.Connection(self._url) as connection:
                queue = connection.SimpleQueue(_QUEUE)
                while not self._stopped.is_set():
                    with suppress(queue.Empty, TimeoutError):
                        message = queue.get(timeout=0.5)
                        self.at.append(time.time())
                        message.ack()
            time.sleep(0.2)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


class Sender:
    """What sends the tasks, in processes of its own."""

    def __init__(self, stack: ExitStack, name: str, url: str, count: int = 0) -> None:
        self.name = name
        self._processes = stack.enter_context(Processes("periodic"))
        self._environment = {**os.environ, BROKER: url, COUNT: str(count), "PYTHONPATH": _path()}
        if name == "redbeat":
            self._environment[REDIS] = _redis(self._processes)
        if name == "ours":
            self._environment[OURS] = "1"
            self._run("binary-delay", "schedule", "apply", "--json").wait()
        self.running = [self._begin() for _ in range(1 if name == "beat" else 2)]

    def _begin(self) -> Process:
        folder = self._processes.folder
        if self.name == "ours":
            number = f"w{time.time_ns()}"
            process = self._run("worker", "-c1", "-Q", "none", "-n", number, "-l", "INFO")
            wait_until(lambda: f"{number} ready" in _text(folder), 60, "no worker")
            return process
        of_redbeat = ["-S", "redbeat.RedBeatScheduler"] if self.name == "redbeat" else []
        schedule = f"--schedule={folder / str(time.time_ns())}"
        process = self._run("beat", "--pidfile=", *(of_redbeat or [schedule]), "-l", "INFO")
        time.sleep(3)
        return process

    def _run(self, *arguments: str) -> Process:
        argv = [sys.executable, "-m", "celery", "-A", APP, *arguments]
        return self._processes.spawn(argv, self._environment, self._processes.folder / "log")

    def begin_another(self) -> None:
        self.running.append(self._begin())

    def kill_the_first(self) -> None:
        """Kill the first; a supervisor starts a single beat again."""
        self._processes.kill(self.running.pop(0))
        if not self.running:
            time.sleep(SUPERVISOR)
            self.begin_another()


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _text(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")


def _redis(processes: Processes) -> str:
    (port,) = free_ports(1)
    argv = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    processes.spawn(argv, dict(os.environ), processes.folder / "redis")
    time.sleep(1)
    return f"redis://127.0.0.1:{port}/0"


def _counted(at: list[float]) -> tuple[int, int]:
    """Return how many of the tasks of each second are missing, and how many more came."""
    more = len(at) - (round(at[-1] - at[0]) + 1)
    return max(-more, 0), max(more, 0)


def _story(broker: Broker, name: str, what: str, seconds: float) -> tuple[int, int]:
    vhost = broker.vhost()
    with ExitStack() as stack:
        sender = Sender(stack, name, vhost.url)
        arrivals = Arrivals(vhost.url)
        stack.callback(arrivals.stop)
        wait_until(lambda: len(arrivals.at) > 3, 60, "nothing arrives")
        # Not what was due while the workers began.
        time.sleep(3)
        del arrivals.at[:-1]
        if what == "killed":
            sender.kill_the_first()
        elif what == "two" and name == "beat":
            sender.begin_another()
        elif what == "restart":
            broker.restart()
        time.sleep(seconds)
        return _counted(arrivals.at)


def _lateness(broker: Broker, name: str, count: int) -> Row:
    """Return how late those are that are due at the next full minute, in milliseconds."""
    vhost = broker.vhost()
    with ExitStack() as stack:
        Sender(stack, name, vhost.url, count)
        arrivals = Arrivals(vhost.url)
        stack.callback(arrivals.stop)
        due = (time.time() + 15) // 60 * 60 + 60
        time.sleep(due + 15 - time.time())
        late = [moment - due for moment in arrivals.at if moment >= due]
        return {**percentiles([1000 * seconds for seconds in late]), "sent": len(late)}


def periodic(broker: Broker, scale: Scale) -> dict[str, Row]:
    """Compare the ways to send periodic tasks."""
    names = list(TITLES)
    if scale.quick or not (shutil.which("redis-server") and find_spec("redbeat")):
        say("RedBeat is left out: redis-server or celery-redbeat is missing")
        names.remove("redbeat")
    seconds, count = scale.pick(40.0, 4.0), scale.pick(1000, 0)

    def measure(name: str) -> Row:
        row: Row = {"processes": 1 if name == "beat" else 2}
        for what in scale.pick(("killed", "two", "restart"), ("killed",)):
            row[f"{what}_missed"], row[f"{what}_more"] = _story(broker, name, what, seconds)
        return {**row, **_lateness(broker, name, count)} if count else row

    runs: dict[str, list[Row]] = {name: [] for name in names}
    for name in names * scale.rounds:
        runs[name].append(measure(name))
        say(f"periodic {name}: {brief(runs[name][-1])}")
    return summary(runs, "beat")
