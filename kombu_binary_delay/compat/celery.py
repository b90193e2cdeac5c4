"""What Celery needs beyond a transport: its native delayed delivery is off where ours delays.

And its check whether a queue has been declared costs no copy of the queue.

Since 5.5, with any quorum queue in an app whose transport has ``driver_type == "amqp"``, Celery
routes delayed tasks to a ladder of its own before a transport sees them, or warns at each publish
that it cannot; and a worker that starts declares that ladder. It has no switch for either. Our
transports carry a ``driver_type`` that *is* the string ``"amqp"``, with a mark on it, and these two
places in Celery are taught to look for the mark. The detection that chooses the worker's QoS is
left alone, and so is every app with another transport. This module must not import Celery: a Kombu
program may not have it.

At each publish that is not left to its native delivery, Celery has Kombu declare the queue if this
connection has not yet. To find out, Kombu makes a copy of the queue and of its exchange, an eighth
of all that the publish costs. On our connections, it checks first.
"""

from __future__ import annotations

import sys
from typing import Any

from kombu.messaging import Producer

from kombu_binary_delay.buffering import BufferingConnection

from .patch import replace


class MarkedDriverType(str):
    """A driver type whose transport delays messages by itself."""

    __slots__ = ()


def disable_native_delivery() -> None:
    """Teach the Celery that is loaded, if one is, not to delay what our transports delay.

    Each transport calls it as it is made. For a publish, that is before Celery decides. For a
    worker it may be in the middle of the decision to include the step that declares Celery's
    ladder: so it is not that decision which is changed, but the start of the step, later on.
    """
    replace(sys.modules.get("celery.app.base"), "detect_quorum_queues", _detect_unless_marked)
    native = sys.modules.get("celery.worker.consumer.delayed_delivery")
    replace(getattr(native, "DelayedDelivery", None), "start", _start_unless_marked)


def check_declared_first() -> None:
    """Teach Kombu's producers to check whether a queue has been declared before they copy it."""
    replace(Producer, "maybe_declare", _declare_unless_known)


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
        connection = getattr(channel, "connection", None)
        if (
            isinstance(connection, BufferingConnection)
            # What Kombu asks of its copy.
            and entity.can_cache_declaration
            and hash(entity) in connection.client.declared_entities
        ):
            return False
        return maybe_declare(producer, entity, *args, **kwargs)

    return declare_unless_known
