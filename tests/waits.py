"""Purpose: wait until something is true, for as long as a slow machine may need, and no longer.

A test waits so instead of a time that ought to be enough: it is as fast as the machine, and fails
where it is never true.
"""

from __future__ import annotations

import fcntl
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from termios import FIONREAD
from typing import Any, TypeVar

T = TypeVar("T")

#: In seconds. What a level with a stuck dead-letter worker holds up comes after 180.
PATIENCE = 150.0


def wait_until(ready: Callable[[], T], complaint: str = "not in time") -> T:
    """Wait until something is true, and return it.

    :raises AssertionError: where it is not true in time.
    """
    end = time.monotonic() + PATIENCE
    while not (answer := ready()):
        assert time.monotonic() < end, complaint
        time.sleep(0.05)
    return answer


def consume_until(
    connection: Any,
    queue: Any,
    take: Callable[[Any, Any], object],
    ready: Callable[[], object],
    **options: Any,
) -> None:
    """Consume until something is true; connect again if the broker ends the connection.

    :raises AssertionError: where it is not true in time.
    """
    end = time.monotonic() + PATIENCE
    while not ready():
        assert time.monotonic() < end, "not in time"
        with (
            suppress(*connection.recoverable_connection_errors),
            connection.Consumer(queue, callbacks=[take], **options),
        ):
            drain_until(connection, ready)


def drain_until(connection: Any, ready: Callable[[], T], complaint: str = "not in time") -> T:
    """Handle what comes in on a connection until something is true, and return it.

    :raises AssertionError: where it is not true in time.
    """
    end = time.monotonic() + PATIENCE
    while not (answer := ready()):
        assert time.monotonic() < end, complaint
        with suppress(TimeoutError):
            connection.drain_events(timeout=0.1)
    return answer


def unread(connection: Any) -> int:
    """Return the number of bytes that have come in on a connection, and were not read."""
    (count,) = struct.unpack("i", fcntl.ioctl(connection.connection.sock, FIONREAD, bytes(4)))
    return int(count)


@dataclass
class Attempt:
    """An attempt at what must be done while messages wait.

    delay: for how long they wait, or longer, in milliseconds.
    began: when they are published, or earlier, in seconds since the epoch.
    """

    delay: int
    began: float = field(default_factory=time.time)
    was_in_time: bool = False

    @property
    def due(self) -> float:
        """When the first of them may be due, in seconds since the epoch."""
        return self.began + self.delay / 1000

    @property
    def is_over(self) -> bool:
        """Whether that time has come."""
        return time.time() >= self.due

    @property
    def limit(self) -> float:
        """For how many seconds to wait for the messages."""
        return self.delay / 1000 + PATIENCE

    def end(self) -> None:
        """Say that it is done, be it in time or not."""
        self.was_in_time = not self.is_over


def attempts(*delays: int) -> Iterator[Attempt]:
    """Try what must be done while messages wait, and again with a longer delay if it was too late.

    Each attempt has to say by its `end` when that is done. The last one counts in any case.
    """
    for delay in delays:
        attempt = Attempt(delay)
        yield attempt
        if attempt.was_in_time:
            return


def despite_a_slow_start(run: Callable[[], T], attempts: int = 5) -> T:
    """Call a function that runs a Spark query with a source in Python, and return its result.

    Spark gives the source's process ten seconds to start. A busy machine needs longer, so the query
    is run again.
    """
    try:
        return run()
    except Exception as exc:
        if attempts == 1 or "Python worker failed to connect back" not in str(exc):
            raise
    return despite_a_slow_start(run, attempts - 1)
