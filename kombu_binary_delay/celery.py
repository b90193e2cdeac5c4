"""What Celery needs beyond a transport: that its own native delayed delivery stands aside.

Since 5.5, with any quorum queue in an app whose transport has ``driver_type == "amqp"``, Celery
routes delayed tasks to a ladder of its own before a transport sees them, or warns at each publish
that it cannot. It has no switch for that. Our transports carry a ``driver_type`` that *is* the
string ``"amqp"``, with a mark on it, and the two places in Celery that decide are taught to look
for the mark. The detection that chooses the worker's QoS is left alone, and so is every app with
another transport. This module must not import Celery: a Kombu program may not have it.
"""

from __future__ import annotations

import sys
from typing import Any

_DECIDERS = ("celery.app.base", "celery.worker.consumer.delayed_delivery")
_NAME = "detect_quorum_queues"


class MarkedDriverType(str):
    """A driver type whose transport delays messages by itself."""

    __slots__ = ()


def stand_aside() -> None:
    """Teach the Celery that is loaded, if one is, not to delay what our transports delay.

    Each transport calls it as it is made, which is before Celery asks for its driver type.
    """
    for name in _DECIDERS:
        module = sys.modules.get(name)
        detect = getattr(module, _NAME, None)
        if detect is not None and not isinstance(detect, _Detect):
            setattr(module, _NAME, _Detect(detect))


class _Detect:
    def __init__(self, detect: Any) -> None:
        self._detect = detect

    def __call__(self, app: Any, driver_type: str) -> Any:
        if isinstance(driver_type, MarkedDriverType):
            return False, ""
        return self._detect(app, driver_type)
