"""What a consumer does while the broker blocks publishers, as it has too little memory or disk.

RabbitMQ does not even read acks from a connection that publishes then. So where this transport
publishes for a consumer, the consumer would stop until the alarm ends, which may need the consumer.
Its connection ends instead, and for some minutes the next one publishes nothing. If the alarm goes
on then, that takes twice as long the next time: each end gives back what the program has not
acknowledged, and a quorum queue drops what comes back too often.
"""

from __future__ import annotations

import time
from typing import Any, NoReturn

from amqp.exceptions import RecoverableConnectionError

#: For how long, at first and at most, to publish nothing for consumers of a broker that has blocked
#: publishers, in seconds: it does not tell when it stops. RabbitMQ closes a channel that does not
#: acknowledge a message for 30 minutes.
PAUSE, LONGEST_PAUSE = 300.0, 1200.0

#: When a broker last blocked a connection of this process, and the pause since, by its address.
_blocked: dict[str, tuple[float, float]] = {}
_NEVER = float("-inf"), 0.0


def is_recent(connection: Any) -> bool:
    """Return whether the broker of a py-amqp connection has lately blocked publishers."""
    return rest(connection) > 0


def rest(connection: Any) -> float:
    """Return for how long to publish nothing for consumers, in seconds; 0 if they may publish."""
    at, pause = _blocked.get(connection.host, _NEVER)
    return max(at + pause - time.monotonic(), 0.0)


def end(connection: Any) -> NoReturn:
    """End a connection that the broker has blocked.

    :raises RecoverableConnectionError: always; see :meth:`.ConnectionMixin.end`.
    """
    now = time.monotonic()
    at, pause = _blocked.get(connection.host, _NEVER)
    # Else it is another connection of this process, in the same pause.
    if now >= at + pause:
        again = now < at + 2 * pause
        _blocked[connection.host] = now, min(2 * pause, LONGEST_PAUSE) if again else PAUSE
    error = RecoverableConnectionError(
        "the broker has a memory or disk alarm and blocks connections that publish; connect again "
        "to consume without a publish"
    )
    connection.end(error)
    raise error
