"""Hold messages that cannot be delayed again, since the broker blocks publishers."""

from __future__ import annotations

import time
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

from kombu_binary_delay.wire import alarms


class Held:
    """What one connection does again when the broker takes messages, or when its message is due.

    :param connection: of py-amqp.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        #: A heap of the due time, a number, and the action.
        self._held: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = count()
        self._is_releasing = False

    @property
    def is_holding(self) -> bool:
        """Whether :meth:`release` has something to do."""
        return bool(self._held)

    @property
    def rest(self) -> float:
        """For how long :meth:`release` has nothing to do, in seconds."""
        first = self._held[0][0] / 1000 - time.time() if self._held else 0.0
        return max(min(first, alarms.rest(self._connection)), 0.0)

    def hold(self, due: int, again: Callable[[], object]) -> None:
        """Call ``again`` when its message, which cannot be delayed again now, can be, or is due.

        :param due: in milliseconds since the epoch.
        """
        heappush(self._held, (due, next(self._numbers), again))
        self._connection.is_held_up = True

    def release(self) -> bool:
        """Try again with what is due and, unless the broker may block publishers, all that is held.

        :returns: whether anything was tried.
        """
        if self._is_releasing:
            # A callback waits for the broker.
            return False
        tried, self._is_releasing = False, True
        try:
            while self._held and not self.rest:
                tried = True
                _, _, again = heappop(self._held)
                again()
        finally:
            self._is_releasing = False
        return tried
