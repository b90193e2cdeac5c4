"""What a broker can, by the release that it says it is. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: Quorum queues have a message TTL, and dead-letter at least once, since RabbitMQ 3.10.
QUORUM_SINCE = (3, 10)
#: RabbitMQ has stream queues since 3.9.
STREAMS_SINCE = (3, 9)
#: The most bytes of a text with which a broker refuses.
MAX_REPLY = 255
#: The least priority that quorum queues take for a high one, since they know two of them.
URGENT = 5


def release(version: str) -> tuple[int, ...]:
    """Read the release, its major and minor number, out of a version such as ``"3.10.8"``."""
    return tuple(int(each) for each in re.findall(r"\d+", version)[:2])


def is_since(server: Mapping[str, Any], since: tuple[int, ...]) -> bool:
    """Whether a broker is a RabbitMQ of some release or a later one.

    :param server: the properties that it sends when a connection opens.
    """
    version = str(server.get("version", ""))
    return server.get("product") == "RabbitMQ" and release(version) >= since


def has_streams(server: Mapping[str, Any]) -> bool:
    """Whether a broker has stream queues, by the properties that it sends of itself."""
    return is_since(server, STREAMS_SINCE)


def can_be_denied(name: str, vhost: str) -> bool:
    """Whether a broker can say that an exchange or queue of this name does not exist.

    What it says takes 255 bytes at most. It cuts a longer text; where that has a character that is
    not ASCII, RabbitMQ 4.3 closes the connection instead, and earlier releases may cut within the
    character, so that no client can read the answer.
    """
    text = f"NOT_FOUND - no exchange '{name}' in vhost '{vhost}'"
    return text.isascii() or len(text.encode()) <= MAX_REPLY


def lets_urgent_hold_up(server: Mapping[str, Any]) -> bool:
    """Whether messages of a high priority keep the others in a quorum queue from expiring.

    From RabbitMQ 4.0 to 4.2, a quorum queue looks only at the message that it would deliver next,
    two of a high priority before one of the others; what has expired behind it has to wait.
    """
    return is_since(server, (4, 0)) and not is_since(server, (4, 3))
