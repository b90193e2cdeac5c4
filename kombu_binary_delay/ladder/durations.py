"""Durations as people write them. Pure."""

from __future__ import annotations

#: A year is of 365 days, as in RabbitMQ's limits.
_UNITS = (("years", 31_536_000_000), ("d", 86_400_000), ("h", 3_600_000), ("min", 60_000))


def human(milliseconds: float) -> str:
    """Return a time in a suitable unit: "125 ms", "96 s", "1.5 h", "34.1 min", "4.26 years".

    Below two minutes, it is exact; above, it has three digits.
    """
    if 0 < milliseconds < 1000:
        return f"{milliseconds:g} ms"
    for unit, size in _UNITS:
        count = round(milliseconds / size, 3)
        # Half of the next unit is better than 90 of this one, and 36.4 than 1.52.
        if count >= 2 or (count >= 1 and (count * 4 % 1 == 0 or unit == "years")):
            digits = f"{count:.3g}" if count < 1000 else f"{count:.0f}"
            return f"{digits} {'year' if digits == '1' and unit == 'years' else unit}"
    return f"{milliseconds / 1000:.10g} s"


def ahead(milliseconds: float) -> str:
    """Return how far from now a time is, to the second: "in 8 s", "now", "1.5 h ago"."""
    rounded = round(milliseconds / 1000) * 1000
    if not rounded:
        return "now"
    return f"in {human(rounded)}" if rounded > 0 else f"{human(-rounded)} ago"
