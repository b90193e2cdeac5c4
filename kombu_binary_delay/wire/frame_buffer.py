"""Buffer frames for other channels while a declaration waits for its answer.

The ladder is declared on a separate channel of the user's connection, in the middle of a publish.
While it waits for the answer, py-amqp reads whatever the broker sends. A delivery would run the
user's callback inside the declaration, and a publish in that callback could take, or wait for, the
answer that the declaration waits for. So frames for other channels are buffered until the
declaration ends, and dispatched in order before anything else is read. Channels of ours that run no
code of the user's have ``runs_no_user_code``: their frames are never buffered.

An error of a callback is then raised when the program consumes, gets, publishes or reads next.
What declares would take it for an answer of the broker, and Kombu might publish again what was
published.

A second connection would not need this. But only the connection that declared an exclusive queue
can bind it, every program would hold two connections, which brokers count and limit, and the second
one can reach another node, or fail alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

#: The base of the mixins; the class that they are combined with has the methods they call.
_Above: Any = object


class FrameBuffer:
    """The frames of one connection that are buffered until a declaration ends."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        #: Whether a declaration waits for an answer, and what the broker was asked for.
        self.declaring = False
        self.asked_for = ""
        self._dispatching = False
        self._frames: deque[Callable[[], object]] = deque()
        #: How many frames were buffered and then dispatched.
        self.dispatched = 0

    @contextmanager
    def closed(self, asked_for: str) -> Iterator[None]:
        """Buffer frames for other channels until the outermost of these blocks ends.

        :param asked_for: what the broker is asked for in this block, for the text of an error.
        """
        outermost, self.declaring = not self.declaring, True
        before, self.asked_for = self.asked_for, asked_for
        is_interrupted = False
        try:
            yield
        except BaseException as exc:
            is_interrupted = not isinstance(exc, Exception)
            raise
        finally:
            self.asked_for = before
            if outermost:
                self.declaring = False
            if outermost and not is_interrupted:
                # Otherwise the program ends: what it reads next comes first.
                try:
                    self._dispatch_all()
                except Exception as exc:  # noqa: BLE001 - it comes from the user's callback
                    self._frames.appendleft(partial(_raise, exc))
                    self._read_these_first()

    @property
    def waiting(self) -> int:
        """The number of frames that are buffered."""
        return len(self._frames)

    def call(self, function: Callable[[], object]) -> None:
        """Call a program's function now or, during a declaration, when the declaration ends."""
        if self.declaring:
            self._frames.append(function)
            self._read_these_first()
        else:
            function()

    def take(self, dispatch: Callable[..., object], channel_id: int, *args: Any) -> None:
        """Dispatch a frame now or, during a declaration, when the declaration ends."""
        if self.declaring and self._is_for_the_user(channel_id):
            self._frames.append(partial(dispatch, channel_id, *args))
            self._read_these_first()
        elif self.declaring or self._dispatching:
            dispatch(channel_id, *args)
        elif self._frames:
            # An exception has left them.
            self._frames.append(partial(dispatch, channel_id, *args))
            self._dispatch_all()
        else:
            # The usual case, of each delivery, takes no detour.
            self._dispatching = True
            try:
                dispatch(channel_id, *args)
            finally:
                self._dispatching = False
            if self._frames:
                self._dispatch_all()

    def dispatch_waiting(self) -> bool:
        """Dispatch the buffered frames, unless a declaration or a callback waits for the broker.

        :returns: whether there were any.
        """
        if not self._frames or self.declaring or self._dispatching:
            return False
        try:
            self._dispatch_all()
        finally:
            if self._frames:
                self._read_these_first()
        return True

    def _read_these_first(self) -> None:
        # Only while frames are buffered, which is rare: every publish reads.
        self._connection.blocking_read = self._connection.read_waiting_first
        # An event loop reads only when the broker has sent something.
        self._connection.is_held_up = True

    def _is_for_the_user(self, channel_id: int) -> bool:
        # Channel 0 is the connection itself.
        channel = (self._connection.channels or {}).get(channel_id)
        return channel_id != 0 and not getattr(channel, "runs_no_user_code", False)

    def dispatch_next(self) -> bool:
        """Dispatch the first buffered frame; return whether there was one."""
        if self.declaring or not self._frames:
            return False
        dispatch = self._frames.popleft()
        self.dispatched += 1
        if not self._frames:
            vars(self._connection).pop("blocking_read", None)
        dispatch()
        return True

    def _dispatch_all(self) -> None:
        """Dispatch all frames in a loop.

        With recursion, a consumer that publishes for each delivery would overflow the stack.
        """
        if self._dispatching:
            return
        self._dispatching = True
        try:
            while self.dispatch_next():
                pass
        finally:
            self._dispatching = False


def _raise(error: Exception) -> None:
    raise error


class BufferingConnection(_Above):
    """The part of a connection that passes each frame to its :class:`FrameBuffer`."""

    frame_buffer: FrameBuffer | None = None

    def on_inbound_method(self, *args: Any) -> None:
        """Dispatch a frame, or buffer it during a declaration."""
        dispatch = super().on_inbound_method
        if self.frame_buffer is None:
            dispatch(*args)
        else:
            self.frame_buffer.take(dispatch, *args)

    def read_waiting_first(self, timeout: float | None = None) -> Any:
        """Dispatch the buffered frames, then read from the broker.

        This replaces ``blocking_read`` while frames are buffered.
        """
        waited = self.frame_buffer is not None and self.frame_buffer.dispatch_next()
        return waited or super().blocking_read(timeout)
