"""Purpose: a real `celery worker` in a process of its own, to be watched and killed."""

from __future__ import annotations

import os
import sys
import time
import uuid
from typing import TYPE_CHECKING

from dev.processes import resident
from dev.service import START

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dev.processes import Processes


class WorkerError(RuntimeError):
    """The worker ended, or did not get ready in time."""


class Worker:
    """One worker, ready when this returns; `processes` ends it when it closes.

    app:     what Celery's -A takes.
    env:     more environment variables for it.
    options: more arguments for `celery worker`.
    name:    its name; a unique part is appended if it has no @.
    """

    def __init__(
        self,
        processes: Processes,
        app: str,
        env: Mapping[str, str],
        *options: str,
        timeout: float = START,
        name: str = "dev",
    ) -> None:
        # Two workers of one name would collide on their exclusive control queues.
        self.name = name if "@" in name else f"{name}@{uuid.uuid4().hex[:12]}"
        self._processes = processes
        self._log = processes.folder / f"{self.name}-{uuid.uuid4().hex[:8]}.log"
        argv = [sys.executable, "-m", "celery", "-A", app, "worker", "-n", self.name, "-l", "INFO"]
        # A killed pool leaves its temporary files: so they go into the folder of the processes.
        env = {**os.environ, "TMPDIR": str(processes.folder), **env}
        self._process = processes.spawn([*argv, *options], env, self._log)
        self._wait_until_ready(timeout)

    @property
    def pid(self) -> int:
        """The id of the main process, which receives the messages."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the main process runs."""
        return self._process.poll() is None

    def memory(self) -> int:
        """Return the resident memory of the main process, in bytes."""
        return resident(self.pid)

    def log(self) -> str:
        """Return all of its output."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """Send SIGKILL to the worker and its pool at once."""
        self._processes.kill(self._process)

    def stop(self) -> None:
        """Stop it as an administrator would: it finishes its current tasks."""
        self._processes.stop(self._process)

    def _wait_until_ready(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while f"{self.name} ready." not in self.log():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise WorkerError(f"the worker is not ready after {timeout:g} s\n{self.log()}")
            time.sleep(0.05)
