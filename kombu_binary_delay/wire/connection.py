"""A connection whose channels delay messages: how it waits, and what it does between events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from amqp.exceptions import RecoverableConnectionError

from kombu_binary_delay.errors import SMALLER
from kombu_binary_delay.routing.router import LOOK_AGAIN

from .draining import raise_if_aborted, within
from .following import is_consuming
from .frame_buffer import BufferingConnection, FrameBuffer
from .mechanism import Mechanism

#: How long to wait for each answer of the broker that a delayed message needs, in seconds, where
#: neither the publish nor the connection has a limit.
ANSWER_LIMIT = 30.0
#: How often a connection with consumers looks whether what they rely on still exists, in seconds.
LOOK_EVERY = LOOK_AGAIN / 1_000_000


class ConnectionMixin(BufferingConnection):
    """A connection whose channels delay messages."""

    delay_mechanism: Mechanism | None = None
    #: Whether the broker blocks its publishes, because of a memory or disk alarm.
    is_blocked = False
    #: Whether something waits until the broker does not block publishers.
    is_held_up = False
    #: The limit that a publish sets for each answer that it needs, in seconds.
    answer_limit: float | None = None
    #: When to look next whether what its consumers rely on still exists, by the monotonic clock.
    look_at = math.inf
    #: Why this transport has ended the connection, if it has.
    ended: RecoverableConnectionError | None = None
    #: Whether it consumed when it ended.
    was_consuming = False

    def collect(self) -> None:
        """End the connection without the broker."""
        # py-amqp then forgets its channels.
        self.was_consuming = is_consuming(self)
        if self.delay_mechanism is not None and not self.is_closing:
            self.delay_mechanism.router.cut_off()
        super().collect()

    def drain_events(self, timeout: float | None = None) -> Any:
        """Handle the next event of the broker, or what an alarm has held up before.

        :param timeout: in seconds. Unlike in py-amqp, a heartbeat does not begin it anew.
        :raises TimeoutError: if none comes in time.
        :raises RecoverableConnectionError: if this transport has ended the connection meanwhile.
        """
        mechanism = self.delay_mechanism
        if timeout != 0 and time.monotonic() > self.look_at and self.look():
            return None
        # Most events come where nothing is held up.
        if not self.is_held_up or mechanism is None:
            result = self._drain(timeout)
        else:
            result = self._release_or_drain(mechanism, timeout)
        if self.ended is not None:
            # The program, or Kombu's retry of a publish, has caught it in a callback. Without an
            # error here, Kombu would connect again, but not consume.
            raise self.ended
        return result

    def end(self, error: RecoverableConnectionError) -> None:
        """End the connection, since its program is to connect and consume again.

        :param error: is to be raised by the caller. :meth:`drain_events` raises it as well, as a
            callback may catch it.
        """
        self.ended = self.ended or error
        self.collect()

    def look(self) -> bool:
        """Check that what the connection's consumers rely on still exists.

        :returns: whether events were handled meanwhile.
        """
        mechanism, buffer = self.delay_mechanism, self.frame_buffer
        if mechanism is None or buffer is None or buffer.declaring:
            return False
        self.look_at = time.monotonic() + LOOK_EVERY
        if self.is_blocked or not is_consuming(self):
            return False
        before = buffer.dispatched
        try:
            mechanism.executor.run(mechanism.router.look(time.time_ns() // 1000))
        except RecoverableConnectionError:
            # Whether a broker that does not answer is too slow is not for a consumer to say.
            if not self.connected:
                raise
        return buffer.dispatched != before

    def release_held(self) -> bool:
        """Deliver or write what an alarm has held up, if its time has come.

        For an event loop, which only reads what has come.

        :returns: whether there was any.
        :raises RecoverableConnectionError: if this transport ends the connection, or has ended it.
        """
        mechanism = self.delay_mechanism
        if mechanism is None:
            return False
        if mechanism.journal is not None:
            mechanism.journal.end_if_blocked()
        # Not in the middle of a declaration: this can run the program's own code.
        if mechanism.executor.is_busy:
            return False
        parts = mechanism.holding
        self.is_held_up = any(part.is_holding for part in parts)
        released = [part.release() for part in parts]
        if self.frame_buffer is not None:
            released.append(self.frame_buffer.dispatch_waiting())
        if self.ended is not None:
            raise self.ended
        return any(released)

    def _release_or_drain(self, mechanism: Mechanism, timeout: float | None) -> Any:
        if timeout == 0:
            # Perhaps it is a publish that looks what has come: Kombu's retry would hide an end.
            return self._drain(timeout)
        rests = [part.rest for part in mechanism.holding if part.is_holding]
        # A caller that waits for an answer asks again: it may have come meanwhile.
        if self.release_held():
            return None
        if mechanism.executor.is_busy:
            return self._drain(timeout)
        # What could be released now, and was not, waits for an event.
        rest = min((rest for rest in rests if rest > 0), default=None)
        if rest is None or (timeout is not None and timeout <= rest):
            return self._drain(timeout)
        end = time.monotonic() + rest
        try:
            return self._drain(rest)
        except TimeoutError as exc:
            raise_if_aborted(self, exc)
            if time.monotonic() < end:
                # From a callback.
                raise
            return None

    def _drain(self, timeout: float | None) -> Any:
        if timeout is None and self.frame_buffer is not None and self.frame_buffer.declaring:
            return self._drain_answer(self.frame_buffer)
        if not timeout:
            return super().drain_events(timeout)
        end = time.monotonic() + timeout
        while not self.blocking_read(timeout):
            # Never 0: py-amqp would wait for the rest of a frame without a limit, and busily.
            timeout = max(end - time.monotonic(), 0.001)
        return None

    @contextmanager
    def answered_within(self, timeout: float | None) -> Iterator[None]:
        """Limit the wait for each answer of the broker that a delayed message needs.

        :param timeout: in seconds; by default, ``read_timeout``, or :data:`ANSWER_LIMIT`.
        :raises RecoverableConnectionError: if an answer or a write takes longer.
        """
        before, self.answer_limit = self.answer_limit, timeout
        limit = timeout or self.write_timeout or ANSWER_LIMIT
        try:
            with within(self, limit):
                yield
        except TimeoutError as exc:
            # Reading has a limit of its own.
            raise RecoverableConnectionError(
                f"the broker did not take within {limit:g} s what a delayed message needs"
            ) from exc
        finally:
            self.answer_limit = before

    def _drain_answer(self, buffer: FrameBuffer) -> Any:
        """Handle the next event, while an answer is waited for that a delayed message needs.

        An event that is only buffered does not count: a consumer may get one after the other.

        :raises RecoverableConnectionError: if none comes in time.
        """
        given = self.answer_limit or self.read_timeout
        limit = given or ANSWER_LIMIT
        end, asked_for = time.monotonic() + limit, buffer.asked_for
        try:
            while True:
                before = buffer.waiting
                result = self._drain(max(end - time.monotonic(), 0.001))
                if buffer.waiting == before:
                    return result
        except TimeoutError as exc:
            raise_if_aborted(self, exc)
            if self.is_blocked and not given:
                # The broker has said why it does not answer: publishers wait until it goes on.
                return None
            # As py-amqp says it of a publish, so that Kombu connects again.
            raise RecoverableConnectionError(
                f"the broker did not answer within {limit:g} s when it was asked for {asked_for}"
            ) from exc

    def _on_close(self, reply_code: int, reply_text: str, *args: Any) -> Any:
        # By the second, it is the frame of a message's headers.
        if "frame_too_large" in reply_text and "type 2," in reply_text:
            reply_text += f"; a message's headers do not fit into a frame: {SMALLER}"
        return super()._on_close(reply_code, reply_text, *args)

    def _on_blocked(self) -> None:
        # The journal may have to end the connection.
        self.is_blocked = self.is_held_up = True
        self._call(super()._on_blocked)

    def _on_unblocked(self) -> None:
        self.is_blocked = False
        self._call(super()._on_unblocked)

    def _call(self, function: Callable[[], object]) -> None:
        """Call what may be the program's own: it can wait for the broker, too."""
        if self.frame_buffer is None:
            function()
        else:
            self.frame_buffer.call(function)
