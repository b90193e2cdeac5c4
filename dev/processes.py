"""Purpose: end all processes that `dev` starts, and remove all files that it writes.

A `Processes` owns one temporary folder and the processes it spawned, each the leader of
its own process group. `close()` ends them all and removes the folder. If we never get
there (SIGKILL, SIGTERM, a crash), a small shell does it: it waits on a pipe which the
kernel closes when we die. Processes are known by group id only, never by name.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Each line replaces the list of groups to end. End of file: our parent is gone.
# The wait is bounded, because dead processes may stay if process 1 is not an init.
_LAST_WILL = """
while read -r line; do groups=$line; done
for group in $groups; do
    kill -KILL "-$group" || continue
    for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 "-$group" && sleep 0.1 || break; done
done 2>/dev/null
rm -rf -- "$1"
"""

Process = subprocess.Popen[bytes]


def resident(pid: int) -> int:
    """Return the resident memory of a process, in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Processes(AbstractContextManager["Processes"]):
    """Starts processes; ends them and removes its `folder` on close."""

    def __init__(self, name: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"kbd-{name}-"))
        self._processes: dict[int, Process] = {}
        ours, self._pipe = os.pipe()
        self._will = subprocess.Popen(
            ["/bin/sh", "-c", _LAST_WILL, "processes", str(self.folder)],
            stdin=ours,
            start_new_session=True,  # Ctrl-C in the terminal must not reach it
        )
        os.close(ours)

    def spawn(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> Process:
        """Start a process in a new group, and return it; its output is appended to `log`."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes[process.pid] = process
        self._write_will()
        return process

    def kill(self, process: Process) -> None:
        """Send SIGKILL to the whole group, as when a machine loses power."""
        _signal_group(process, signal.SIGKILL)
        process.wait()
        self._forget(process)

    def stop(self, process: Process, timeout: float = 60) -> None:
        """Send SIGTERM to the leader, which ends its children; then SIGKILL to the others."""
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
        self.kill(process)

    def close(self) -> None:
        """End every process and remove the folder. Safe to call twice."""
        for process in list(self._processes.values()):
            self.kill(process)
        if self._will.poll() is None:
            os.close(self._pipe)
            self._will.wait()  # it removes the folder

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget(self, process: Process) -> None:
        # The number may later belong to a foreign process, so it must leave the list.
        self._processes.pop(process.pid, None)
        self._write_will()

    def _write_will(self) -> None:
        os.write(self._pipe, " ".join(map(str, self._processes)).encode() + b"\n")


def _signal_group(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
