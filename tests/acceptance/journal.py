"""What happened to each task, written by the workers and read by the tests.

One JSON line per event. Each is one `write` to a file opened for appending, which the kernel keeps
whole, so that any number of processes share one journal.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.waits import PATIENCE

RECEIVED = "received"  # a worker took the message from the broker
RAN = "ran"
REVOKED = "revoked"  # a worker said so by Celery's signal

#: Lateness is the machine's as much as ours: it is only bounded.
LATE = PATIENCE


@dataclass(frozen=True)
class Entry:
    """One event of one task."""

    event: str
    task: str
    id: str
    at: float
    worker: str
    args: list[object]
    #: When it was due, as its message says; None where it was due at once.
    eta: str | None
    retries: int
    exchange: str
    routing_key: str
    priority: int | None
    #: Of the message as Celery sees it: names of the headers, and the bytes that they would take.
    header_names: list[str]
    header_bytes: int
    expiration: str | None

    @property
    def due(self) -> float | None:
        if self.eta is None:
            return None
        due = datetime.fromisoformat(self.eta)
        # A Celery worker reads a naive eta as UTC.
        return (due if due.tzinfo else due.replace(tzinfo=UTC)).timestamp()


@dataclass(frozen=True)
class Journal:
    path: Path

    def write(self, entry: Entry) -> None:
        line = json.dumps(asdict(entry)).encode() + b"\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)

    def entries(self) -> list[Entry]:
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")
        return [Entry(**json.loads(line)) for line in lines[:-1]]

    def received(self, task_id: str | None = None) -> list[Entry]:
        return self._of(RECEIVED, task_id)

    def ran(self, task_id: str | None = None) -> list[Entry]:
        return self._of(RAN, task_id)

    def revoked(self, task_id: str | None = None) -> list[Entry]:
        return self._of(REVOKED, task_id)

    def wait_for(self, *task_ids: str, times: int = 1, timeout: float = PATIENCE) -> list[Entry]:
        """Wait until each of these tasks ran so many times; return their runs in order of time."""

        def runs() -> list[Entry]:
            return [entry for entry in self.ran() if entry.id in task_ids]

        def missing() -> dict[str, int]:
            ids = [entry.id for entry in runs()]
            return {
                task_id: ids.count(task_id) for task_id in task_ids if ids.count(task_id) < times
            }

        wait_until(lambda: not missing(), lambda: f"runs of {missing()}", timeout)
        return sorted(runs(), key=lambda entry: entry.at)

    def assert_on_time(self, task_ids: Iterable[str] | None = None, late: float = LATE) -> None:
        """No worker took a message from the broker before it was due, nor much after."""
        received = [
            entry for entry in self.received() if task_ids is None or entry.id in set(task_ids)
        ]
        assert received
        for entry in received:
            if entry.due is not None:
                lateness = entry.at - entry.due
                assert lateness >= 0, f"{-lateness:.6f} s early: {entry}"
                assert lateness < late, f"{lateness:.3f} s late: {entry}"

    def _of(self, event: str, task_id: str | None) -> list[Entry]:
        return [
            entry
            for entry in self.entries()
            if entry.event == event and task_id in (None, entry.id)
        ]


def wait_until(
    holds: Callable[[], object], missing: str | Callable[[], str], timeout: float = PATIENCE
) -> None:
    """Wait until it holds; complain about what is still missing."""
    deadline = time.monotonic() + timeout
    while not holds():
        if time.monotonic() > deadline:
            complaint = missing if isinstance(missing, str) else missing()
            raise AssertionError(f"after {timeout:g} s still missing: {complaint}")
        time.sleep(0.05)
