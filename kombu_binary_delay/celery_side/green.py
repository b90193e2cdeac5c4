"""Keep Celery's loop for green pools from waiting after each message.

With the pools gevent and eventlet, Celery runs the loop ``synloop``: it handles one event of the
connection that it consumes from, and then reads what the broker has sent to the connection of its
monitoring events. Since 5.7 it waits 0.1 s for that, and as a rule only heartbeats come there. So
while heartbeats are on, and heartbeat events, gossip or task events, a worker takes nine messages
a second. Celery itself does not show that of delayed tasks: it takes them long before they are due.

On our connections, this reads what has come and does not wait for more. The loop comes back within
two seconds, so heartbeats are read as before. Celery's other loop calls the same function once, to
read what has come before it begins to poll.

This can go with the first release of Celery whose ``synloop`` does not wait; 5.7.0 does. This
module must not import Celery: a Kombu program may not have it.
"""

from __future__ import annotations

import sys
from typing import Any

from kombu_binary_delay.wire.mechanism import delays

from .patch import replace

#: Seconds. Not 0: py-amqp would then wait for the rest of a frame without a limit, and busily.
_AT_ONCE = 0.001


def read_at_once() -> None:
    """Make the loops of Celery's worker, if it is loaded, not wait where they read what has come.

    Each transport calls it when it is created: the worker is loaded by then.
    """
    replace(sys.modules.get("celery.worker.loops"), "_quick_drain", _drain_at_once)


def _drain_at_once(drain: Any) -> Any:
    def drain_at_once(connection: Any, *args: Any, **kwargs: Any) -> Any:
        if delays(connection.transport):
            return drain(connection, timeout=_AT_ONCE)
        return drain(connection, *args, **kwargs)

    return drain_at_once
