"""How often a message has come back to its queue, which a quorum queue limits. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The header in which a quorum queue says it.
RETURNS = "x-delivery-count"
#: How often a message may come back, so that there is room for as many more: since RabbitMQ 4.0, a
#: quorum queue drops it after 20 times where nothing else is set.
MOST_RETURNS = 10


def returns(headers: Mapping[str, Any] | None) -> int:
    """Return how often a message was delivered and came back, where its queue counts that."""
    # A classic queue keeps a header that another program has written.
    count = (headers or {}).get(RETURNS)
    return count if isinstance(count, int) else 0
