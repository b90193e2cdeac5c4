"""Durations as people write them. Pure."""

from __future__ import annotations

_UNITS = (("days", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000))


def in_words(milliseconds: float) -> str:
    """Write a duration in one unit, rounded to a tenth of it: ``"9,000 days"``, ``"1.5 h"``."""
    for unit, size in _UNITS:
        if milliseconds >= size:
            number = f"{milliseconds / size:,.1f}".removesuffix(".0")
            return f"{number} {'day' if (number, unit) == ('1', 'days') else unit}"
    return f"{milliseconds:g} ms"
