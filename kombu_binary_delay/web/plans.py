"""Actions that wait for a confirmation: each changes only what was counted, and once."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from kombu_binary_delay import operate

#: How many actions can wait for a confirmation, and for how many seconds.
_KEPT, _AGE = 32, 900


@dataclass
class Plan:
    """One action.

    :param action: ``cancel``, ``reschedule`` or ``redrive``.
    :param user: the user that planned it; no other user may do it.
    :param said: the selection, in words.
    :param chosen: the tasks; None for a redrive.
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

    action: str
    user: str
    said: str
    chosen: operate.Chosen | None = None
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
    def kept(self) -> str:
        """Which tasks run when they are first due, in words; an empty text if none does."""
        if not self.unmoved:
            return ""
        one = self.unmoved == 1
        are, run = ("task is", "runs") if one else ("tasks are", "run")
        return f"{self.unmoved:,} {are} first due later than that, and {run} then"


class Plans:
    """The actions that wait for a confirmation, are running, or were done just now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: OrderedDict[str, Plan] = OrderedDict()

    def add(self, plan: Plan) -> None:
        """Keep a plan; if there are too many, drop the oldest."""
        with self._lock:
            self._plans[plan.key] = plan
            while len(self._plans) > _KEPT:
                self._plans.popitem(last=False)

    def get(self, key: str, user: str) -> Plan | None:
        """Return the plan of a user; None if it is another user's, too old to begin, or unknown."""
        with self._lock:
            plan = self._plans.get(key)
        if plan is None or plan.user != user:
            return None
        too_old = plan.began is None and time.monotonic() - plan.made > _AGE
        return None if too_old else plan

    def take(self, plan: Plan) -> bool:
        """Return whether a plan may be done now: true only for the first call."""
        with self._lock:
            if plan.began is not None:
                return False
            plan.began = time.time()
            return True
