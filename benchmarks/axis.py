"""Purpose: from values to pixels, and counts in few characters, for the charts of results."""

from __future__ import annotations

import math


class Axis:
    """From values to pixels, with round ticks; logarithmic where values differ by much."""

    def __init__(
        self, low: float, high: float, start: float, end: float, *, log: bool = False
    ) -> None:
        self.log = log
        if log:
            low = 10 ** math.floor(math.log10(max(low, 1e-6)))
            high = 10 ** math.ceil(math.log10(max(high, low * 10)))
        elif high <= low:
            high = low + 1
        self.low, self.high, self.start, self.end = low, high, start, end

    def at(self, value: float) -> float:
        """Return the pixel of a value; what is beyond an end is drawn at it."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log10(value / self.low) / math.log10(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Choose round values."""
        if self.log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            step = -(-(last - first) // count) or 1
            return [10.0**power for power in range(first, last + 1, step)]
        raw = (self.high - self.low) / count
        power = 10 ** math.floor(math.log10(raw))
        step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= raw)
        first = math.ceil(self.low / step)
        return [step * n for n in range(first, math.floor(self.high / step) + 1)]


def number(value: float) -> str:
    """Write a count: 12, 3.4k, 5.6M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            divided = value / (1e3 if unit == "k" else size)
            return f"{divided:.1f}".removesuffix(".0") + unit
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"
