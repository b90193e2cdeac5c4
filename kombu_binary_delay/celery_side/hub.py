"""What the event loop of a worker misses: callbacks that are ready, and messages that are held.

Kombu's loop runs the callbacks of ``call_soon``, then its timers, and then waits for its sockets.
A timer may run a task, with Celery's pool ``solo``, and add its acknowledgement to the callbacks.
Kombu then waits up to two seconds before it acknowledges the task, and a worker at its prefetch
limit gets no other task until then.

The callbacks are not run before the poll: one of them may receive a message or set a timer, which
would then wait instead.

The loop reads from a connection when the broker has sent something. A message that is held in an
alarm can be due before. A look whether the ladder still exists is due each half a minute. And a
connection that this transport has ended sends nothing more.
"""

from __future__ import annotations

import time
from typing import Any

from .patch import replace


def poll_at_once_if_ready(loop: Any) -> None:
    """Make the loop's poller return at once if callbacks are ready.

    Call it before the loop starts, and again after a reset, when the loop has a new poller.
    """

    def at_once_if_ready(poll: Any) -> Any:
        def poll_in_time(timeout: float | None) -> Any:
            return poll(0 if getattr(loop, "_ready", None) else timeout)

        return poll_in_time

    replace(getattr(loop, "poller", None), "poll", at_once_if_ready)


def release_in_time(loop: Any, connection: Any) -> None:
    """Deliver what a connection holds when it is due, and look in time, until it ends."""

    def look() -> None:
        # Not every Celery removes the timers of a lost connection.
        if not connection.connected:
            timer.cancel()
            if connection.ended is not None and _reads(loop, connection):
                # Celery hides the errors of its first read, and would wait for messages forever.
                loop.call_soon(_raise, connection.ended)
            return
        # The loop only logs the errors of a timer.
        if connection.is_held_up:
            loop.call_soon(connection.release_held)
        if time.monotonic() > connection.look_at:
            loop.call_soon(connection.look)

    timer = loop.call_repeatedly(1, look)


def _reads(loop: Any, connection: Any) -> bool:
    """Whether a loop still takes a connection for one that it reads from."""
    return any(connection in arguments for _, arguments in loop.readers.values())


def _raise(error: BaseException) -> None:
    raise error
