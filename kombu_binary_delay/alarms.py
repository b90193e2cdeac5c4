"""What a consumer does while the broker blocks publishers, as it has too little memory or disk.

RabbitMQ does not even read acks from a connection that publishes then. So where this transport
publishes for a consumer, the consumer would stop until the alarm ends, which may need the consumer.
Its connection ends instead, and for some minutes the next one publishes nothing.
"""

from __future__ import annotations

import time
from typing import Any, NoReturn

from amqp.exceptions import RecoverableConnectionError

#: For how long to publish nothing for consumers of a broker that has blocked publishers, in
#: seconds: it does not tell when it stops.
PAUSE = 300.0

#: When a broker last blocked a connection of this process, by its address.
_blocked: dict[str, float] = {}


def is_recent(connection: Any) -> bool:
    """Return whether the broker of a py-amqp connection has lately blocked publishers."""
    return rest(connection) > 0


def rest(connection: Any) -> float:
    """Return for how long to publish nothing for consumers, in seconds; 0 if they may publish."""
    since = time.monotonic() - _blocked.get(connection.host, float("-inf"))
    return max(PAUSE - since, 0.0)


def end(connection: Any) -> NoReturn:
    """End a connection that the broker has blocked.

    :raises RecoverableConnectionError: always; Kombu then connects again.
    """
    _blocked[connection.host] = time.monotonic()
    connection.collect()
    raise RecoverableConnectionError(
        "the broker has a memory or disk alarm and blocks connections that publish; connect again "
        "to consume without a publish"
    )
