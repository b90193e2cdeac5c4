"""What Celery needs beyond a transport: that its own native delayed delivery stands aside.

And that its look at each queue costs no more than a look.

Since 5.5, with any quorum queue in an app whose transport has ``driver_type == "amqp"``, Celery
routes delayed tasks to a ladder of its own before a transport sees them, or warns at each publish
that it cannot; and a worker that starts declares that ladder. It has no switch for either. Our
transports carry a ``driver_type`` that *is* the string ``"amqp"``, with a mark on it, and these two
places in Celery are taught to look for the mark. The detection that chooses the worker's QoS is
left alone, and so is every app with another transport. This module must not import Celery: a Kombu
program may not have it.

At each publish, unless it goes to its native delivery, Celery has Kombu declare the queue if this
connection has not yet. To find out, Kombu makes a copy of the queue and of its exchange, an eighth
of all that the publish costs. On our connections, it looks first.
"""

from __future__ import annotations

import sys
from typing import Any

from kombu.messaging import Producer


class MarkedDriverType(str):
    """A driver type whose transport delays messages by itself."""

    __slots__ = ()


def stand_aside() -> None:
    """Teach the Celery that is loaded, if one is, not to delay what our transports delay.

    Each transport calls it as it is made. For a publish, that is before Celery decides. For a
    worker it may be in the middle of the decision to include the step that declares Celery's
    ladder: so it is not that decision which is changed, but the start of the step, later on.
    """
    _replace(sys.modules.get("celery.app.base"), "detect_quorum_queues", _detect_unless_marked)
    native = sys.modules.get("celery.worker.consumer.delayed_delivery")
    _replace(getattr(native, "DelayedDelivery", None), "start", _start_unless_marked)


def look_before_copying() -> None:
    """Teach Kombu's producers to look whether a queue has been declared before they copy it."""
    _replace(Producer, "maybe_declare", _declare_unless_known)


def _replace(owner: Any, name: str, wrap: Any) -> None:
    original = getattr(owner, name, None)
    if original is not None and not hasattr(original, "of_binary_delay"):
        replacement = wrap(original)
        replacement.of_binary_delay = True
        setattr(owner, name, replacement)


def _detect_unless_marked(detect: Any) -> Any:
    def detect_unless_marked(app: Any, driver_type: str) -> Any:
        if isinstance(driver_type, MarkedDriverType):
            return False, ""
        return detect(app, driver_type)

    return detect_unless_marked


def _start_unless_marked(start: Any) -> Any:
    def start_unless_marked(step: Any, consumer: Any) -> Any:
        transport = consumer.app.connection_for_write().transport
        if not isinstance(transport.driver_type, MarkedDriverType):
            return start(step, consumer)
        return None

    return start_unless_marked


def _declare_unless_known(maybe_declare: Any) -> Any:
    def declare_unless_known(producer: Any, entity: Any, *args: Any, **kwargs: Any) -> Any:
        # A producer may have no channel, and an entity one of its own.
        channel = producer.channel if entity else None
        connection: Any = getattr(channel, "connection", None)
        if (
            getattr(connection, "delay_router", None) is not None
            # What Kombu asks of its copy.
            and entity.can_cache_declaration
            and hash(entity) in connection.client.declared_entities
        ):
            return False
        return maybe_declare(producer, entity, *args, **kwargs)

    return declare_unless_known
