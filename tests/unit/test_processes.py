"""Nothing that the demo or a test has started outlives it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dev.broker import Broker, BrokerError
from dev.processes import Processes
from tests.waits import wait_until


def test_a_missing_broker_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match=r"no /usr/lib/rabbitmq/bin/rabbitmq-server"):
        Broker(str(tmp_path))


def test_what_was_spawned_ends_even_when_we_are_killed() -> None:
    program = """
import sys, time
from dev.processes import Processes
processes = Processes("test")
child = processes.spawn(["sleep", "600"], {"PATH": "/usr/bin:/bin"}, processes.folder / "log")
print(child.pid, processes.folder, flush=True)
time.sleep(600)
"""
    victim = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    with victim:
        assert victim.stdout
        pid, folder = victim.stdout.readline().split()
        victim.send_signal(signal.SIGKILL)
    wait_until(lambda: not Path(folder).exists())
    wait_until(lambda: is_gone(int(pid)))


def test_the_whole_process_group_ends(tmp_path: Path) -> None:
    with Processes("test") as processes:
        log = processes.folder / "log"
        parent = processes.spawn(["sh", "-c", "sleep 600 & echo $!; wait"], {"PATH": "/bin"}, log)
        wait_until(lambda: log.read_text().endswith("\n"))
        pids = [parent.pid, int(log.read_text())]
    wait_until(lambda: all(map(is_gone, pids)))


def is_gone(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has asked for its exit status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
