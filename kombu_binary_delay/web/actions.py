"""Actions that wait for a confirmation: each changes only what was counted, and once."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from kombu_binary_delay import operate
from kombu_binary_delay.operate.text import plural

#: How many actions can wait for a confirmation, and for how many seconds.
_KEPT, _AGE = 32, 900


@dataclass
class Action:
    """One action.

    :param kind: ``cancel``, ``reschedule`` or ``redrive``.
    :param user: the user that planned it; no other user may do it.
    :param said: the selection, in words.
    :param chosen: the tasks; None for a redrive.
    :param examples: some of the tasks that are known to wait, the first due first.
    :param queues: how many of the tasks each queue has, as far as known, the most first; or how
        many messages each parking queue has.
    :param due: the new due time of a reschedule, in milliseconds since the epoch.
    :param left: why chosen tasks cannot be amended, by id.
    :param unmoved: how many tasks run when they are first due, since that is after ``due``.
    :param reasons: why parked messages are not counted.
    :param began: when it was begun, in seconds since the epoch; None before.
    :param result: the result in a sentence, after it was done.
    :param error: why it failed, if it did.
    """

    kind: str
    user: str
    said: str
    chosen: operate.Chosen | None = None
    examples: tuple[operate.WaitingTask, ...] = ()
    queues: tuple[tuple[str, int], ...] = ()
    due: int | None = None
    unmoved: int = 0
    left: Mapping[str, str] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    began: float | None = None
    result: str | None = None
    error: str | None = None
    key: str = field(default_factory=lambda: secrets.token_urlsafe(18))
    made: float = field(default_factory=time.monotonic)

    @property
    def count(self) -> int:
        """The number of tasks or messages."""
        if self.chosen is not None:
            return len(self.chosen.dues)
        return sum(count for _, count in self.queues)

    @property
    def what(self) -> str:
        """What is changed, in words: ``1 task``, ``1,204 tasks``, ``3 messages``."""
        return plural(self.count, "message" if self.chosen is None else "task")

    @property
    def kept(self) -> str:
        """Which tasks run when they are first due, in words; an empty text if none does."""
        if not self.unmoved:
            return ""
        one = self.unmoved == 1
        are, run = ("task is", "runs") if one else ("tasks are", "run")
        return f"{self.unmoved:,} {are} first due later than that, and {run} then"


class Actions:
    """The actions that wait for a confirmation, are running, or were done just now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actions: OrderedDict[str, Action] = OrderedDict()

    def add(self, action: Action) -> None:
        """Keep a action; if there are too many, drop the oldest."""
        with self._lock:
            self._actions[action.key] = action
            while len(self._actions) > _KEPT:
                self._actions.popitem(last=False)

    def get(self, key: str, user: str) -> Action | None:
        """Return an action; None if it is another user's, too old to begin, or unknown."""
        with self._lock:
            action = self._actions.get(key)
        if action is None or action.user != user:
            return None
        too_old = action.began is None and time.monotonic() - action.made > _AGE
        return None if too_old else action

    def take(self, action: Action) -> bool:
        """Return whether a action may be done now: true only for the first call."""
        with self._lock:
            if action.began is not None:
                return False
            action.began = time.time()
            return True
