"""Format times, durations, names and places for a terminal."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.operate.reading import UNREADABLE
from kombu_binary_delay.operate.text import plain


def short(milliseconds: float) -> str:
    """Return a duration in one unit, rounded: "125ms", "8s", "17m", "1.5d", "8.5y"."""
    units = (("y", 31_536_000_000), ("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000))
    for unit, size in units:
        if milliseconds >= size:
            value = milliseconds / size
            return (
                f"{value:.1f}".rstrip("0").rstrip(".") + unit
                if value < 10
                else f"{value:.0f}{unit}"
            )
    return f"{milliseconds:g}ms"


def exact(milliseconds: float) -> str:
    """Return a duration exactly: "1d16m40s", "8.125s", "500ms"."""
    if 0 < milliseconds < 1000:
        return f"{milliseconds:g}ms"
    parts, rest = [], milliseconds
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000)):
        count, rest = divmod(rest, size)
        parts += [f"{count:.0f}{unit}"] if count else []
    if rest or not parts:
        parts.append(f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s")
    return "".join(parts)


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


def ahead(milliseconds: int) -> str:
    """Return how far from now a time since the epoch is, as text."""
    left = milliseconds - time.time() * 1000
    return f"in {short(round(left))}" if left >= 1 else "now"
