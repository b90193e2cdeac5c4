"""Acts that wait for a confirmation: what was counted is what is done, and once."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from kombu_binary_delay import admin

#: So many acts wait for a confirmation at a time, and for so many seconds.
_KEPT, _AGE = 32, 900


@dataclass
class Plan:
    """One act.

    :param action: ``cancel``, ``reschedule`` or ``redrive``.
    :param user: who planned it, and alone may do it.
    :param said: what was chosen, in words.
    :param chosen: the tasks; None of a redrive.
    :param due: of a reschedule, in milliseconds since the epoch.
    :param parked: of a redrive, what would be sent on.
    :param result: in a sentence, after it was done.
    """

    action: str
    user: str
    said: str
    chosen: admin.Chosen | None = None
    due: int | None = None
    parked: tuple[admin.Parked, ...] = ()
    result: str | None = None
    error: str | None = None
    key: str = field(default_factory=lambda: secrets.token_urlsafe(18))
    made: float = field(default_factory=time.monotonic)

    @property
    def count(self) -> int:
        """How many tasks or messages."""
        if self.chosen is not None:
            return len(self.chosen.dues)
        return sum(each.stays + each.sent for each in self.parked)


class Plans:
    """The acts that wait for a confirmation, or were done just now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: OrderedDict[str, Plan] = OrderedDict()
        self._taken: set[str] = set()

    def add(self, plan: Plan) -> None:
        """Keep one; the oldest goes."""
        with self._lock:
            self._plans[plan.key] = plan
            while len(self._plans) > _KEPT:
                old, _ = self._plans.popitem(last=False)
                self._taken.discard(old)

    def get(self, key: str, user: str) -> Plan | None:
        """Return the plan of a user; None where it is another's, too old, or none."""
        with self._lock:
            plan = self._plans.get(key)
        if plan is None or plan.user != user or time.monotonic() - plan.made > _AGE:
            return None
        return plan

    def take(self, plan: Plan) -> bool:
        """Return whether it may be done now: the first who takes it does it, and nobody else."""
        with self._lock:
            if plan.key in self._taken:
                return False
            self._taken.add(plan.key)
            return True


def to_log(value: Any) -> str:
    """Write what somebody else has named so that a line of the log stays one line."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "replace").decode()
        for each in str(value)
    )
