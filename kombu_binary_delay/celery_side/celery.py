"""Turn off Celery's native delayed delivery on our transports, and save a copy at each publish.

Since 5.5, if an app has a quorum queue and its transport has ``driver_type == "amqp"``, Celery
routes delayed tasks to its own ladder before a transport sees them, or warns at each publish that
it cannot. A worker that starts declares that ladder. There is no setting to turn either off. The
``driver_type`` of our transports equals ``"amqp"`` but is a subclass of ``str``, and these two
functions of Celery are replaced by ones that check for it. The detection that chooses the worker's
QoS is not changed, nor is any app with another transport. This module must not import Celery: a
Kombu program may not have it.

At each other publish, Celery makes Kombu declare the queue if the connection has not yet done so.
For this check, Kombu copies the queue and its exchange, which takes an eighth of the publish's
time. On our connections, the check comes before the copy.
"""

from __future__ import annotations

import sys
from typing import Any

from kombu.messaging import Producer

from kombu_binary_delay.wire.frame_buffer import BufferingConnection
from kombu_binary_delay.wire.mechanism import MarkedDriverType, delays

from .patch import replace


def disable_native_delivery() -> None:
    """Turn off native delayed delivery for our transports, if Celery is loaded.

    Each transport calls this when it is created. For a publish, that is before Celery decides. For
    a worker, Celery may just be deciding whether to include the step that declares its ladder. So
    this does not change that decision but the start of the step, which comes later.
    """
    replace(sys.modules.get("celery.app.base"), "detect_quorum_queues", _detect_unless_marked)
    native = sys.modules.get("celery.worker.consumer.delayed_delivery")
    replace(getattr(native, "DelayedDelivery", None), "start", _start_unless_marked)


def check_declared_first() -> None:
    """Make Kombu's producers check whether a queue has been declared before they copy it."""
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
        if not delays(transport):
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
            # The check that Kombu makes on its copy.
            and entity.can_cache_declaration
            and hash(entity) in connection.client.declared_entities
        ):
            return False
        return maybe_declare(producer, entity, *args, **kwargs)

    return declare_unless_known
