"""Format times, names and places for a terminal."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.durations import ahead
from kombu_binary_delay.operate.reading import UNREADABLE
from kombu_binary_delay.operate.text import plain


def place(destination: Destination) -> str:
    """Return a destination as text for people."""
    if destination == UNREADABLE:
        return "without an address"
    if not destination.exchange:
        return plain(f"the queue {destination.routing_key}")
    return plain(f"the exchange {destination.exchange} with the key {destination.routing_key!r}")


def moment(milliseconds: float, *, zone: bool = True) -> str:
    """Return a time since the epoch in UTC: "2030-01-31 12:00:00 UTC".

    :param zone: whether to end with the zone; if not, the column's header names it.
    """
    try:
        at = datetime.fromtimestamp(milliseconds / 1000, tz=UTC)
    except (OverflowError, ValueError, OSError):
        return f"{milliseconds} ms"
    return at.strftime("%Y-%m-%d %H:%M:%S") + (" UTC" if zone else "")


def from_now(milliseconds: int) -> str:
    """Return how far from now a time since the epoch is, as text."""
    return ahead(milliseconds - time.time() * 1000)
