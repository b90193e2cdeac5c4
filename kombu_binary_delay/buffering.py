"""Frames for other channels wait while a declaration waits for its answer.

The ladder is declared on a channel of its own, on the user's connection, in the middle of a
publish. py-amqp reads whatever the broker sends next: a delivery read then would run the user's
callback inside the declaration, and what that publishes could take, or wait for, the very answer
that the declaration waits for. So frames for other channels are kept until the declaration ends,
and are dispatched in their order before anything else is read. Channels of ours that run no code of
the user's have ``runs_no_user_code``: what comes for them is never kept.

Why not a second connection, which would need none of this: a queue that is exclusive can be bound
only by the connection that declared it; every program would hold two connections, where brokers
count and limit them; and a second one can reach another node, or fail alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

#: The class that a mixin is mixed in before; it has all that they call.
_Above: Any = object


class FrameBuffer:
    """The frames of one connection that wait for a declaration to end."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._declaring = False
        self._dispatching = False
        self._frames: deque[Callable[[], object]] = deque()

    @property
    def declaring(self) -> bool:
        """Whether a declaration waits for an answer."""
        return self._declaring

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Keep frames for other channels until the outermost of these blocks ends."""
        outermost, self._declaring = not self._declaring, True
        try:
            yield
        finally:
            if outermost:
                self._declaring = False
                # What is raised here is the user's own.
                self._dispatch_all()

    def take(self, channel_id: int, dispatch: Callable[[], object]) -> None:
        """Dispatch a frame that was read, now or when the declaration ends."""
        if self._declaring and self._is_for_the_user(channel_id):
            # Only while frames wait: each publish reads, and nearly always none do.
            self._connection.blocking_read = self._connection.read_waiting_first
            self._frames.append(dispatch)
        elif self._declaring or self._dispatching:
            dispatch()
        else:
            self._frames.append(dispatch)
            self._dispatch_all()

    def _is_for_the_user(self, channel_id: int) -> bool:
        # Channel 0 is the connection itself.
        channel = (self._connection.channels or {}).get(channel_id)
        return channel_id != 0 and not getattr(channel, "runs_no_user_code", False)

    def dispatch_next(self) -> bool:
        """Dispatch the first frame that waits; return whether there was one."""
        if self._declaring or not self._frames:
            return False
        dispatch = self._frames.popleft()
        if not self._frames:
            vars(self._connection).pop("blocking_read", None)
        dispatch()
        return True

    def _dispatch_all(self) -> None:
        """Dispatch all frames, one after the other.

        Not one inside another: a consumer that publishes for each delivery would reach the end of
        the stack.
        """
        if self._dispatching:
            return
        self._dispatching = True
        try:
            while self.dispatch_next():
                pass
        finally:
            self._dispatching = False


class BufferingConnection(_Above):
    """The part of a connection that hands each frame to its :class:`FrameBuffer`."""

    frame_buffer: FrameBuffer | None = None

    def on_inbound_method(self, channel_id: int, *args: Any) -> None:
        """Dispatch a frame, unless a declaration is to end first."""
        dispatch = partial(super().on_inbound_method, channel_id, *args)
        if self.frame_buffer is None:
            dispatch()
        else:
            self.frame_buffer.take(channel_id, dispatch)

    def read_waiting_first(self, timeout: float | None = None) -> Any:
        """Read from the broker, after the frames that wait.

        It takes the place of ``blocking_read`` while there are any.
        """
        waited = self.frame_buffer is not None and self.frame_buffer.dispatch_next()
        return waited or super().blocking_read(timeout)
