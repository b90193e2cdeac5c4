"""What listeners get to know of delayed messages.

The transport asks whether anybody listens before it makes a value, so it costs next to nothing
while nobody does. A listener is called where the transport stands: it must be quick, and may not
use the connection. This module must not import Celery, nor what exports metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kombu.log import get_logger

from kombu_binary_delay.ladder.delay import TASK
from kombu_binary_delay.ladder.envelope import HEADERS

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


@dataclass(frozen=True)
class Dropped:
    """A message that was dropped instead of delivered.

    :param id: of the task or the message; empty if it has none.
    :param reason: ``cancelled``, ``superseded`` or, by the header ``x-delay-expires``, ``expired``.
    :param queue: the queue that it was taken from.
    :param properties: as it arrived.
    :param body: as it was published.
    :param by_worker: whether a Celery worker has discarded it, as it does revoked tasks.
    """

    id: str
    reason: str
    queue: str
    properties: Mapping[str, Any]
    body: Any
    by_worker: bool = False


_Value = TypeVar("_Value")
_Listener = Callable[[_Value], object]

#: Who listens; empty while nobody does.
published: list[_Listener[Published]] = []
delivered: list[_Listener[Delivered]] = []
dropped: list[_Listener[Dropped]] = []


def on_published(listener: Callable[[Published], object]) -> Callable[[Published], object]:
    """Register a function to call with each delayed message that is sent; also a decorator."""
    published.append(listener)
    return listener


def on_delivered(listener: Callable[[Delivered], object]) -> Callable[[Delivered], object]:
    """Register a function to call with each message that comes from a ladder; also a decorator."""
    delivered.append(listener)
    return listener


def on_dropped(listener: Callable[[Dropped], object]) -> Callable[[Dropped], object]:
    """Register a function to call with each message that this process drops; also a decorator.

    It is also called for a task that the transport has a Celery worker discard, and not for one
    that the worker discards by itself: for all of them, there is Celery's signal ``task_revoked``.
    """
    dropped.append(listener)
    return listener


def task_of(properties: Mapping[str, Any]) -> str:
    """Return the name of a task; empty for another message."""
    return str((properties.get(HEADERS) or {}).get(TASK) or "")


def notify(listeners: list[_Listener[Any]], value: object) -> None:
    """Call the listeners. One that fails is logged: it may not stop a publish or a consumer."""
    for listener in tuple(listeners):
        try:
            listener(value)
        except Exception:
            logger.exception("%r failed for %r", listener, value)
