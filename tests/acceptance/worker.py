"""A real `celery worker`, and a real `celery beat`, on a deployment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import dev.worker
from tests.acceptance.journal import wait_until
from tests.waits import PATIENCE

if TYPE_CHECKING:
    from dev.processes import Processes
    from tests.acceptance.app import Deployment

ROOT = Path(__file__).parents[2]
APP = "tests.acceptance.worker_app"


def complaints(log: str) -> list[str]:
    """Find what no log of a worker that is well holds."""
    signs = ("Traceback", ": ERROR/", ": CRITICAL/")
    return [line for line in log.splitlines() if any(sign in line for sign in signs)]


class Worker(dev.worker.Worker):
    """`celery worker`; by default with the prefork pool and one process in it."""

    def __init__(self, processes: Processes, deployment: Deployment, *options: str) -> None:
        self.alive = True
        self._options = options
        self._asked = False
        super().__init__(processes, APP, environment_of(deployment), "--concurrency=1", *options)

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            super().kill()

    def begin_to_stop(self) -> None:
        """Ask it to stop, and do not wait."""
        if self.alive and not self._asked:
            self._asked = True
            self._process.terminate()

    def stop(self) -> None:
        """Stop it as an administrator would: it finishes the tasks it is at."""
        self.begin_to_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE)
        self.kill()

    def end_if_it_may_not_stop(self) -> None:
        """Kill it if Celery may fail to stop it: with gevent and confirms, its heartbeats block."""
        if "--pool=gevent" in self._options:
            assert not self.complaints(), self.log()
            self.kill()

    def complaints(self) -> list[str]:
        return complaints(self.log())


class Beat:
    """`celery beat`."""

    def __init__(self, processes: Processes, deployment: Deployment) -> None:
        self._processes = processes
        log = processes.folder / f"beat-{uuid.uuid4().hex}.log"
        argv = [sys.executable, "-m", "celery", "-A", APP, "beat", "--loglevel=INFO", "--pidfile="]
        schedule = f"--schedule={log.with_suffix('.schedule')}"
        environment = {**os.environ, **environment_of(deployment)}
        self._process = processes.spawn([*argv, schedule], environment, log)
        wait_until(lambda: "beat: Starting..." in log.read_text(), "the start of beat")

    def stop(self) -> None:
        self._processes.stop(self._process)


def environment_of(deployment: Deployment) -> dict[str, str]:
    return {**deployment.environment(), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
