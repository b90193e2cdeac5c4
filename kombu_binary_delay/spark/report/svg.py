"""Charts as SVG text, out of a few hundred numbers. It must not import Spark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

WIDTH, HEIGHT = 960, 260
LEFT, RIGHT, TOP, BOTTOM = 76, 44, 14, 34
#: Colours that differ in print and for colour-blind eyes too (Okabe and Ito's).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#999999")
#: The same on a dark ground.
DARK_COLOURS = ("#5aa9e6", "#e6a532", "#2fbf91", "#f0804a", "#9ad4f5", "#e39cc2", "#9aa2ab")

Point = tuple[float, float]
Label = Callable[[float], str]


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


def seconds(value: float) -> str:
    """Write a time with the unit that suits it."""
    sign, value = ("-" if value < 0 else ""), abs(value)
    if value < 1:
        return f"{sign}{value * 1000:.3g} ms"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= 2 * size:
            return f"{sign}{value / size:.3g} {unit}"
    return f"{sign}{value:.3g} s"


def lines(
    series: Sequence[tuple[str, Sequence[Point]]],
    x: Axis,
    y_label: Label,
    x_label: Label,
    *,
    log: bool = False,
    steps: bool = False,
) -> str:
    """Draw lines over a common time, each with its name and colour."""
    values = [value for _, points in series for _, value in points]
    y = Axis(
        min(values, default=1) if log else min([*values, 0.0]),
        max(values, default=1),
        HEIGHT - BOTTOM,
        TOP,
        log=log,
    )
    drawn = []
    for index, (name, points) in enumerate(series):
        style = f'class="s{index % len(COLOURS)}"'
        if index % 2:
            style += ' stroke-dasharray="6 3"'
        pixels = [(x.at(at), y.at(value)) for at, value in points]
        path = _steps(pixels) if steps else _path(pixels)
        drawn.append(
            f'<path d="{path}" fill="none" stroke-width="1.8" {style}>'
            f"<title>{escape(name)}</title></path>"
        )
    return _frame(x, y, x_label, y_label, "".join(drawn)) + legend([name for name, _ in series])


def bars(
    counts: Sequence[tuple[float, float, float]], x: Axis, x_label: Label, colour: int, name: str
) -> str:
    """Draw counts as bars: from, to, how many; in a colour of ``COLOURS``, by its place."""
    y = Axis(0, max((count for *_, count in counts), default=1), HEIGHT - BOTTOM, TOP)
    drawn = "".join(
        f'<rect x="{x.at(low):.1f}" y="{y.at(count):.1f}" '
        f'width="{max(x.at(high) - x.at(low) - 0.6, 0.6):.1f}" '
        f'height="{y.at(0) - y.at(count):.1f}" class="f{colour}">'
        f"<title>{x_label(low)} to {x_label(high)}: {number(count)}</title></rect>"
        for low, high, count in counts
    )
    return _frame(x, y, x_label, number, drawn) + legend([name], colour)


def heat(rows: Sequence[tuple[str, Sequence[float]]], x: Axis, x_label: Label, title: str) -> str:
    """Draw a row of cells for each name, the stronger the more, on a scale of square roots."""
    height = 15
    bottom = TOP + height * len(rows)
    most = max((value for _, values in rows for value in values), default=0) or 1
    cells = []
    for index, (name, values) in enumerate(rows):
        top = TOP + index * height
        cells.append(
            f'<text x="{LEFT - 6}" y="{top + 11}" class="tick" text-anchor="end">'
            f"{escape(name)}</text>"
        )
        width = (WIDTH - LEFT - RIGHT) / max(len(values), 1)
        # Equal neighbours are one cell: less to write, and no seams.
        start = 0
        for end in range(1, len(values) + 1):
            if end < len(values) and values[end] == values[start]:
                continue
            if values[start]:
                share = math.sqrt(values[start] / most)
                cells.append(
                    f'<rect x="{LEFT + start * width:.1f}" y="{top}" '
                    f'width="{(end - start) * width:.1f}" height="{height - 1}" '
                    f'class="f0" fill-opacity="{0.08 + 0.92 * share:.2f}">'
                    f"<title>{escape(name)}: {number(values[start])}</title></rect>"
                )
            start = end
    axis = "".join(
        f'<text x="{x.at(tick):.0f}" y="{bottom + 16}" class="tick" text-anchor="middle">'
        f"{x_label(tick)}</text>"
        for tick in x.ticks(6)
    )
    return (
        f'<div class="scroll"><svg viewBox="0 0 {WIDTH} {bottom + 24}" role="img" '
        f'aria-label="{escape(title)}">{"".join(cells)}{axis}</svg></div>'
        f'<p class="legend">strongest: {number(most)} messages</p>'
    )


def legend(names: Sequence[str], first: int = 0) -> str:
    """Name the colours, from the one in this place on."""
    marks = (
        f'<span><i class="b{(first + index) % len(COLOURS)}"></i>{escape(name)}</span>'
        for index, name in enumerate(names)
    )
    return f'<p class="legend">{"".join(marks)}</p>'


def rules(colours: Sequence[str]) -> str:
    """Write colours as rules of a style sheet: for strokes, for what is filled, and for marks."""
    return "".join(
        f".s{index}{{stroke:{colour}}}.f{index}{{fill:{colour}}}.b{index}{{background:{colour}}}"
        for index, colour in enumerate(colours)
    )


def _frame(x: Axis, y: Axis, x_label: Label, y_label: Label, inside: str) -> str:
    grid = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y.at(tick):.1f}" y2="{y.at(tick):.1f}" '
        f'class="grid"/><text x="{LEFT - 6}" y="{y.at(tick) + 4:.1f}" class="tick" '
        f'text-anchor="end">{y_label(tick)}</text>'
        for tick in y.ticks()
    )
    times = "".join(
        f'<text x="{x.at(tick):.1f}" y="{HEIGHT - 12}" class="tick" text-anchor="middle">'
        f"{x_label(tick)}</text>"
        for tick in x.ticks(6)
    )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{grid}{times}{inside}</svg>'


def _path(pixels: Sequence[Point]) -> str:
    return "".join(f"{'L' if index else 'M'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(pixels))


def _steps(pixels: Sequence[Point]) -> str:
    path = ""
    for index, (x, y) in enumerate(pixels):
        path += f"H{x:.1f}V{y:.1f}" if index else f"M{x:.1f} {y:.1f}"
    return path
