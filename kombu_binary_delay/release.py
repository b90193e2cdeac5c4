"""What a broker can, by the release that it says it is. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: Quorum queues have a message TTL, and dead-letter at least once, since RabbitMQ 3.10.
QUORUM_SINCE = (3, 10)
#: RabbitMQ has stream queues since 3.9.
STREAMS_SINCE = (3, 9)


def release(version: str) -> tuple[int, ...]:
    """Read the release, its major and minor number, out of a version such as ``"3.10.8"``."""
    return tuple(int(each) for each in re.findall(r"\d+", version)[:2])


def is_since(server: Mapping[str, Any], since: tuple[int, ...]) -> bool:
    """Whether a broker is a RabbitMQ of some release or a later one.

    :param server: the properties that it sends when a connection opens.
    """
    version = str(server.get("version", ""))
    return server.get("product") == "RabbitMQ" and release(version) >= since
