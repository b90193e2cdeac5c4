"""What listeners get to know of delayed messages.

The transport asks whether anybody listens before it makes a value, so it costs next to nothing
while nobody does. A listener is called where the transport stands: it must be quick, and may not
use the connection. This module must not import Celery, nor what exports metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kombu.log import get_logger

logger = get_logger(__package__)

#: While anybody listens to deliveries, the header of a Celery task that has waited: a table with
#: ``asked``, ``due`` and ``lateness`` in seconds, which a task finds in its request.
DELIVERED = "x-delay-delivered"


@dataclass(frozen=True, slots=True)
class Published:
    """A message that the ladder has got.

    :param id: of the task or the message; empty if it has none.
    :param task: the task's name; empty for another message.
    :param exchange: that it was published to; empty for the default exchange.
    :param routing_key: with which it was published.
    :param asked: its delay, in seconds, in whole ticks.
    :param due: when it is due, in seconds since the epoch.
    """

    id: str
    task: str
    exchange: str
    routing_key: str
    asked: float
    due: float


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message that has waited on a ladder, and is given to the program.

    :param id: of the task or the message; empty if it has none.
    :param task: the task's name; empty for another message.
    :param queue: the queue that it was taken from.
    :param asked: its delay, in seconds, in whole ticks, from its last publish or postponement; None
        if its address does not say.
    :param due: when it was due, in seconds since the epoch.
    :param left: when it left its last level, in whole seconds since the epoch, as the broker says;
        None if it does not.
    :param arrived: when it came, in seconds since the epoch.
    :param redelivered: whether a consumer may have had it before, and has not acknowledged it.
    """

    id: str
    task: str
    queue: str
    asked: float | None
    due: float
    left: int | None
    arrived: float
    redelivered: bool = False

    @property
    def lateness(self) -> float:
        """How late it came, in seconds; negative if this clock is behind the publisher's."""
        return self.arrived - self.due

    @property
    def broker_lateness(self) -> float | None:
        """How much of that the ladder took, at least, to whole seconds; None if not known.

        The rest is the way from there, and the destination's backlog.
        """
        return None if self.left is None else max(self.left - self.due, 0.0)


@dataclass(frozen=True, slots=True)
class Discarded:
    """A message that came to its consumer after it was taken back, or too late.

    :param id: of the task or the message; empty if it has none.
    :param task: the task's name; empty for another message.
    :param queue: the queue that it was taken from.
    :param reason: ``cancelled``, ``superseded`` or, by the header ``x-delay-expires``, ``expired``.
    """

    id: str
    task: str
    queue: str
    reason: str


_Value = TypeVar("_Value")
_Listener = Callable[[_Value], object]

#: Who listens; empty while nobody does.
published: list[_Listener[Published]] = []
delivered: list[_Listener[Delivered]] = []
discarded: list[_Listener[Discarded]] = []


def on_published(listener: _Listener[Published]) -> _Listener[Published]:
    """Register a function to call with each delayed message that is sent; also a decorator."""
    published.append(listener)
    return listener


def on_delivered(listener: _Listener[Delivered]) -> _Listener[Delivered]:
    """Register a function to call with each message that comes from a ladder; also a decorator."""
    delivered.append(listener)
    return listener


def on_discarded(listener: _Listener[Discarded]) -> _Listener[Discarded]:
    """Register a function to call with each message that is discarded; also a decorator.

    Unlike :func:`kombu_binary_delay.on_dropped`, it is also called for a task that a Celery worker
    discards as revoked.
    """
    discarded.append(listener)
    return listener


def notify(listeners: list[_Listener[Any]], value: object) -> None:
    """Call the listeners. One that fails is logged: it may not stop a publish or a consumer."""
    for listener in tuple(listeners):
        try:
            listener(value)
        except Exception:
            logger.exception("%r failed for %r", listener, value)
