"""A thread that reads for all pages: each value once, and only if the last one is too old.

Ten open pages cost the broker as much as one. Without open pages, nothing is read. While the broker
is down, pages show the last values, with the reason why there are no newer ones.

Values of which there are any number, such as the stories of tasks, wait in a line where each who
asks has one place. So whoever asks for a thousand of them keeps nobody else waiting.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import amqp
from kombu.exceptions import OperationalError
from kombu.log import get_logger

from kombu_binary_delay.errors import BinaryDelayError
from kombu_binary_delay.operate import OperationError, UnreachableError

logger = get_logger(__name__)

#: Seconds to wait after a failure before the next attempt.
_RETRY = 3.0
#: Seconds after which a reading is slow, if the last one was not.
_SLOW = 20.0
#: Seconds to wait at the end for the current reading.
_LAST = 5.0
#: How many results are kept; the least recently requested one is dropped.
_REMEMBERED = 64
#: How many places the line has.
_PLACES = 64
#: The errors that reading from a broker may raise. Their messages have no passwords.
FAILURES = (BinaryDelayError, amqp.AMQPError, OperationalError, OSError)


@dataclass(frozen=True)
class Latest:
    """The last result of a reading.

    :param value: the result; None if nothing was read yet.
    :param at: when it was read, in seconds since the epoch.
    :param error: why there is no newer result; None without an error.
    :param took: seconds that the reading took.
    :param away: whether the broker did not answer, or refused.
    :param busy: whether too many others ask, so that no reading was begun.
    """

    value: Any = None
    at: float = 0.0
    error: str | None = None
    took: float = 0.0
    away: bool = False
    busy: bool = False


class Reader:
    """Reads for pages, one value at a time, on a thread that starts with the first request.

    :param at_end: that thread calls this when it ends.
    """

    def __init__(self, name: str, at_end: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._at_end = at_end
        self._changed = threading.Condition()
        self._results: OrderedDict[Hashable, Latest] = OrderedDict()
        #: When to read again, on the monotonic clock.
        self._next: dict[Hashable, float] = {}
        #: The line: by place, the key to read, how, and for how long it is new enough.
        self._wanted: OrderedDict[Hashable, tuple[Hashable, Callable[[], Any], float]] = (
            OrderedDict()
        )
        #: When the reading of the current result began, on the monotonic clock.
        self._began: dict[Hashable, float] = {}
        #: When the value was changed, on the monotonic clock: a reading must begin after that.
        self._changed_at: dict[Hashable, float] = {}
        #: The current reading, and when it began on the monotonic clock.
        self._reading: tuple[Hashable, float] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def get(  # noqa: PLR0913 - what to read, how old it may be, and who asks
        self,
        key: Hashable,
        read: Callable[[], Any],
        age: float,
        wait: float = 0.0,
        since: float | None = None,
        *,
        by: Hashable = None,
    ) -> Latest:
        """Return the last result, and start a new reading if it is too old.

        :param read: reads the value; may raise one of ``FAILURES``.
        :param age: seconds for which a result is new enough; at least ten times the reading's time.
        :param wait: seconds to wait for a first result.
        :param since: the value was changed then, on the monotonic clock: start a reading after it,
            even if nothing waits for it any more, and wait for that.
        :param by: who asks. The last value that they ask for takes the place of one that still
            waits. By default, each value has a place of its own.
        """
        place = key if by is None else by
        end = time.monotonic() + wait
        with self._changed:
            if since is not None and self._began.get(key, 0.0) < since:
                self._changed_at[key] = since
                self._next[key] = 0.0
            is_busy, is_first = False, True
            while True:
                latest = self._results.get(key)
                is_old = time.monotonic() >= self._next.get(key, 0.0)
                # A reading that began before the change may have ended meanwhile.
                if is_old and not self._closed and (is_first or since is not None):
                    if not self._want(place, key, read, age):
                        # It will not be read within the wait.
                        end = 0.0
                    is_busy = place not in self._wanted
                is_first = False
                done = latest is not None and (since is None or self._began[key] >= since)
                left = end - time.monotonic()
                if done or left <= 0:
                    break
                self._changed.wait(left)
            if latest is not None:
                self._results.move_to_end(key)
            return replace(self._doubted(key, latest or Latest()), busy=is_busy)

    def last(self, key: Hashable) -> Latest:
        """Return the last result, and start no reading."""
        with self._changed:
            return self._results.get(key) or Latest()

    def close(self) -> None:
        """End the thread after its current reading; wait for that, but not for long."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_LAST)

    def _want(self, place: Hashable, key: Hashable, read: Callable[[], Any], age: float) -> bool:
        """Put a value into the line, and return whether its place was free or had it already."""
        known = self._wanted.get(place)
        if known is not None and known[0] == key:
            return True
        if known is None and len(self._wanted) >= _PLACES:
            return False
        self._wanted[place] = key, read, age
        self._start()
        self._changed.notify_all()
        return known is None

    def _doubted(self, key: Hashable, latest: Latest) -> Latest:
        """Return a result, with an error if it waits far longer for a reading than the last took.

        It may be the reading of another value, which comes first.
        """
        if self._reading is None or latest.error is not None:
            return latest
        waits = key == self._reading[0] or any(
            key == wanted for wanted, *_ in self._wanted.values()
        )
        if not waits:
            return latest
        seconds = time.monotonic() - self._reading[1]
        if seconds < max(_SLOW, 3 * latest.took) or latest.value is None:
            return latest
        return replace(
            latest, error=f"the broker has not answered for {round(seconds)} s", away=True
        )

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self._read_on()
        finally:
            self._at_end()

    def _read_on(self) -> None:
        while True:
            with self._changed:
                while not self._wanted and not self._closed:
                    self._changed.wait()
                if self._closed:
                    break
                _, (key, read, age) = self._wanted.popitem(last=False)
                began = time.monotonic()
                if began < self._next.get(key, 0.0):
                    # It was read meanwhile, for another place.
                    continue
                self._reading = key, began
            before = self._results.get(key) or Latest()
            try:
                value = read()
            except FAILURES as exc:
                error = str(exc) or type(exc).__name__
                away = not isinstance(exc, OperationError) or isinstance(exc, UnreachableError)
                latest = Latest(before.value, before.at, error, before.took, away)
                pause = _RETRY
            except Exception:
                # The page must continue to work; the log has the error.
                logger.exception("reading %s failed", key)
                error = "reading failed; the log of this program says why"
                latest = Latest(before.value, before.at, error, before.took)
                pause = _RETRY
            else:
                took = time.monotonic() - began
                latest = Latest(value, time.time(), None, took)
                pause = max(age, 10 * took)
            with self._changed:
                self._reading = None
                self._results[key] = latest
                self._results.move_to_end(key)
                self._began[key] = began
                # A change during this reading may not be in it.
                stale = began < self._changed_at.pop(key, 0.0)
                self._next[key] = 0.0 if stale else time.monotonic() + pause
                while len(self._results) > _REMEMBERED:
                    old, _ = self._results.popitem(last=False)
                    self._next.pop(old, None)
                    self._began.pop(old, None)
                self._changed.notify_all()
