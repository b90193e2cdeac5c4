"""Purpose: the recording of `make demo` as a self-contained animated picture.

`python -m dev.record_demo` records a real run in docs/demo.cast. Here a terminal emulator replays
it. Each piece of text is drawn once, and CSS shows it while the terminal did. If motion is
disabled or not supported, the picture shows the last screen.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from html import escape
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import pyte

CAST = Path(__file__).parents[1] / "demo.cast"

SPEED = 2  # of the picture, relative to the recording
IDLE = 1.2  # recorded seconds: a longer time without changes is shortened to this
FLICKER = 0.15  # recorded seconds: a screen that was shown for less is skipped
HOLD = 5  # seconds, of the last screen
_CELL, _LINE = 8.4, 18  # px
_LEFT, _TOP, _BOTTOM = 14, 50, 12  # px around the text; on top is the window's title
_BLOCK = "\N{FULL BLOCK}"

#: How Rich writes faint text. pyte knows none, so it becomes grey.
_FAINT = re.compile(r"\x1b\[2(?:;\d+)*m")

_LIGHT = """
text,rect{fill:#1f2328}.window{fill:#fff;stroke:#d0d7de}.head{fill:#f6f8fa}
.brightblack{fill:#59636e}.green{fill:#1a7f37}.cyan{fill:#0969da}.red{fill:#cf222e}
"""
_DARK = """
text,rect{fill:#e6edf3}.window{fill:#0d1117;stroke:#30363d}.head{fill:#161b22}
.brightblack{fill:#9198a1}.green{fill:#3fb950}.cyan{fill:#58a6ff}.red{fill:#f85149}
"""


class Run(NamedTuple):
    """Text of one style, with its position on the screen."""

    row: int
    column: int
    text: str
    style: str


class Screen(NamedTuple):
    """The content of the terminal from a time on, in seconds."""

    begin: float
    runs: frozenset[Run]


def recording(cast: Path = CAST) -> str:
    """Return a recording in the format asciicast v2 as SVG."""
    head, *events = map(json.loads, cast.read_text().splitlines())
    screens = list(_screens(head, events))
    begins, whole = _times(screens)
    height = 1 + max(run.row for screen in screens for run in screen.runs)
    seen: dict[tuple[int, int], list[Run]] = defaultdict(list)
    for run in sorted({run for screen in screens for run in screen.runs}):
        for span in _spans(run, screens):
            seen[span].append(run)

    groups, frames = [], []
    for number, ((first, end), runs) in enumerate(sorted(seen.items())):
        is_last = end == len(screens)
        groups += [f'<g class="{"e" if is_last else "f"} k{number}">', *map(_draw, runs), "</g>"]
        frames.append(_keyframes(number, begins[first], None if is_last else begins[end], whole))
    wide, high = round(head["width"] * _CELL + 2 * _LEFT), _TOP + height * _LINE + _BOTTOM
    corner = "a7.5 7.5 0 0 1 7.5"
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}">
<title>{escape(head["title"])}</title>
<style>{_style(frames, whole)}</style>
<rect class="window" x=".5" y=".5" width="{wide - 1}" height="{high - 1}" rx="8"/>
<path class="head" d="M1 32V8.5{corner}-7.5H{wide - 8.5}{corner} 7.5V32z"/>
<text class="b" x="{_LEFT}" y="21">$ {escape(head["title"])}</text>
<text class="brightblack end" x="{wide - _LEFT}" y="21">{_pace(events[-1][0], whole - HOLD)}</text>
{chr(10).join(groups)}
</svg>
"""


def _screens(head: dict[str, int], events: list[list[Any]]) -> Iterator[Screen]:
    """Replay a recording; yield each screen that was shown long enough, and the last."""
    terminal = pyte.Screen(head["width"], head["height"])
    stream = pyte.Stream(terminal)
    for (when, _, text), (then, *_) in zip(events, [*events[1:], [float("inf")]], strict=True):
        stream.feed(_FAINT.sub("\x1b[90m", text))
        if then - when >= FLICKER:
            yield Screen(when, frozenset(_runs(terminal)))


def _runs(terminal: pyte.Screen) -> Iterator[Run]:
    """Yield the runs of a screen: words of one style, separated by single spaces."""
    for row, line in enumerate(terminal.display):
        for words in re.finditer(r"\S+(?: \S+)*", line):
            styled = ((_style_of(terminal.buffer[row][at]), at) for at in range(*words.span()))
            for style, cells in groupby(styled, key=itemgetter(0)):
                columns = [at for _, at in cells if line[at] != " "]
                if columns:
                    yield Run(row, columns[0], line[columns[0] : columns[-1] + 1], style)


def _style_of(cell: pyte.screens.Char) -> str:
    """Return the names of CSS classes."""
    colour = "" if cell.fg == "default" else cell.fg
    return " ".join(["b", colour] if cell.bold else [colour]).strip()


def _times(screens: list[Screen]) -> tuple[list[float], float]:
    """Return when each screen begins in the picture, and the picture's length, in seconds."""
    begins, now = [0.0], 0.0
    for one, other in pairwise(screens):
        now += min(other.begin - one.begin, IDLE) / SPEED
        begins.append(now)
    return begins, now + HOLD


def _pace(recorded: float, shown: float) -> str:
    return f"{recorded:.0f} s, shown in {shown:.0f}"


def _spans(run: Run, screens: list[Screen]) -> Iterator[tuple[int, int]]:
    """Yield pairs: the first screen with the text, and the next screen without it."""
    for is_there, numbers in groupby(range(len(screens)), lambda each: run in screens[each].runs):
        if is_there:
            span = list(numbers)
            yield span[0], span[-1] + 1


def _draw(run: Run) -> str:
    x, y = _LEFT + run.column * _CELL, _TOP + run.row * _LINE
    width = len(run.text) * _CELL
    kind = f' class="{run.style}"' if run.style else ""
    if set(run.text) == {_BLOCK}:
        # Without gaps in any font.
        return f'<rect{kind} x="{x:.1f}" y="{y - 12}" width="{width:.1f}" height="13"/>'
    # Fonts differ in width: this keeps the columns aligned.
    return f'<text{kind} x="{x:.1f}" y="{y}" textLength="{width:.1f}">{escape(run.text)}</text>'


def _keyframes(number: int, begin: float, end: float | None, whole: float) -> str:
    stops = [(0, begin == 0), (begin, True), *([] if end is None else [(end, False)])]
    css = "".join(
        f"{100 * at / whole:.2f}%{{visibility:{'visible' if shown else 'hidden'}}}"
        for at, shown in stops
    )
    return f".k{number}{{animation-name:k{number}}}@keyframes k{number}{{{css}}}"


def _style(frames: list[str], whole: float) -> str:
    return f"""
text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}}
.b{{font-weight:600}}.end{{text-anchor:end}}.f{{visibility:hidden}}
{_LIGHT}@media (prefers-color-scheme:dark){{{_DARK}}}
@media (prefers-reduced-motion:no-preference){{
.f,.e{{animation:{whole:.2f}s step-end infinite}}
{"".join(frames)}}}
"""
