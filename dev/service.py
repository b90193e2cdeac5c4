"""Purpose: start a server on free ports, wait for it, and end it.

All servers listen on 127.0.0.1.
"""

from __future__ import annotations

import atexit
import random
import socket
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

    from dev.processes import Process

HOST = "127.0.0.1"
#: The seconds that a program may take to start on a busy machine. One that dies is noticed at once.
START = 400.0
#: How many ports are reserved at once, by a socket that is bound to the first of them.
_BLOCK = 16
#: The first and the last port that a client can get.
CLIENT_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Service(ABC):
    """A server that a `with` block starts and ends, even if the start fails."""

    @abstractmethod
    def start(self) -> None:
        """Start it, and wait until it answers."""

    @abstractmethod
    def close(self) -> None:
        """End it, and remove its folder."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_ports(count: int) -> list[int]:
    """Return free ports, outside of the range from which the kernel takes clients' ports.

    In that range, a client which reconnects to a broker that is down can be given the
    broker's own port, and then is connected to itself while the broker cannot start.

    A server takes seconds until it listens. So no other process is given the same ports before this
    one ends.

    :param count: at most 15.
    :raises OSError: if there are not enough.
    """
    lowest, highest = map(int, CLIENT_PORTS.read_text().split())
    blocks = _blocks(lowest, highest)
    for first in random.sample(blocks, len(blocks)):
        reserving = socket.socket()
        try:
            reserving.bind((HOST, first))
        except OSError:
            reserving.close()
            continue
        ports = [port for port in range(first + 1, first + _BLOCK) if _is_free(port)]
        if len(ports) >= count:
            atexit.register(reserving.close)  # which keeps it until then
            return ports[:count]
        reserving.close()
    raise OSError(
        f"not {count} free ports in any of {len(blocks)} blocks of {_BLOCK}: end what listens, or "
        f"narrow the range in {CLIENT_PORTS}, {lowest} to {highest}"
    )


def _blocks(lowest: int, highest: int) -> list[int]:
    """Return the first port of each block outside of a range; of each block, if there is none."""
    every = range(10000, 65536 - _BLOCK, _BLOCK)
    return [block for block in every if not lowest - _BLOCK < block <= highest] or list(every)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def listens(port: int) -> bool:
    """Return whether a program listens on a port."""
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def wait_until(
    ready: Callable[[], bool], timeout: float, complaint: str, process: Process | None = None
) -> None:
    """Wait until a condition is true, for at most ``timeout`` seconds.

    :param complaint: the message of the errors.
    :param process: a process that must not end meanwhile.
    :raises TimeoutError: if the condition does not become true in time.
    :raises ChildProcessError: if the process ends.
    """
    deadline = time.monotonic() + timeout
    while not ready():
        if process and process.poll() is not None:
            raise ChildProcessError(f"ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{complaint} within {timeout:g} s")
        time.sleep(0.1)
