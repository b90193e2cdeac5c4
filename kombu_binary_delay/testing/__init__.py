"""Test delayed tasks without a broker and without waiting.

:class:`Delayed` is a broker in memory with a clock that the test moves. The real channel, router,
amendments and worker run on it. :class:`DelayedOnBroker` runs the same tests on a real broker, in
real time. In pytest, the fixture ``delayed`` is the first, and with ``--delayed-broker`` the other.
"""

from .errors import KitError, StandsStillError
from .memory import Delayed
from .real import DelayedOnBroker
from .values import Call, Cancelled, Ran, Waiting, call

__all__ = [
    "Call",
    "Cancelled",
    "Delayed",
    "DelayedOnBroker",
    "KitError",
    "Ran",
    "StandsStillError",
    "Waiting",
    "call",
]
