"""Test delayed tasks without a broker and without waiting.

:class:`Delayed` is a broker in memory with a clock that the test moves. The real channel, router,
amendments and worker run on it. In pytest, the fixture ``delayed`` is one.
"""

from .errors import KitError, StandsStillError
from .kit import Delayed
from .values import Call, Cancelled, Ran, Waiting, call

__all__ = [
    "Call",
    "Cancelled",
    "Delayed",
    "KitError",
    "Ran",
    "StandsStillError",
    "Waiting",
    "call",
]
