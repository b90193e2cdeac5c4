"""The terminal: its width, and text that stays within it."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from kombu_binary_delay.operate.text import plain


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error, so that the subcommand decides what happens if the output is closed."""
        raise BrokenPipeError


def console() -> Console:
    """Return a console; without colour if there is no terminal."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A locale that has no arrow or block shows a question mark.
        sys.stdout.reconfigure(errors="replace")
    # Show names literally: Rich must not read markup in them.
    as_it_is = partial(_Console, highlight=False, markup=False, emoji=False)
    made = as_it_is()
    return made if made.is_terminal else as_it_is(width=_width())


def _width() -> int:
    """Return the width of piped output: the terminal's, or else enough for tables."""
    # In `status | less`, only the output is not a terminal.
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 120


def watch(look: Callable[[], RenderableType], every: float) -> None:
    """Draw again and again, in place of what was drawn before; without a terminal, below it.

    :param look: returns what to draw.
    :param every: how long to pause between two looks, in seconds.
    """
    on = console()
    # Without a terminal, it draws nothing.
    live = Live(console=on, auto_refresh=False) if on.is_interactive else None
    with live or nullcontext():
        while True:
            drawn = look()
            if live is None:
                on.print(drawn, "")
            else:
                live.update(drawn, refresh=True)
            time.sleep(every)


def hanging(mark: str, text: str, style: str) -> RenderableType:
    """Return a paragraph whose lines all begin after a mark; it may name what others named."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, style=style)
    grid.add_column(overflow="fold", style=style)
    grid.add_row(mark, plain(text))
    return grid


def lines_of(drawn: Iterable[RenderableType], on: Console) -> list[list[Segment]]:
    """Return what is drawn as lines of a terminal."""
    return [line for part in drawn for line in on.render_lines(part, pad=False)]


def cropped(
    top: Iterable[RenderableType], body: Iterable[RenderableType], on: Console
) -> RenderableType:
    """Return what fits on a terminal: all of the top, and as much of the body as possible.

    If the top alone is too high, it is cut too, so that at least two lines of the body are shown.
    Nothing is cut where the output can scroll.
    """
    if not on.is_interactive:
        return Group(*top, *body)
    room = on.size.height - 1
    head, rest = lines_of(top, on), lines_of(body, on)
    head = _cut(head, max(room - 2, 1), on)
    shown = head + _cut(rest, room - len(head), on)
    return Segments([segment for line in shown for segment in (*line, Segment.line())][:-1])


def _cut(lines: list[list[Segment]], room: int, on: Console) -> list[list[Segment]]:
    if len(lines) <= room:
        return lines
    kept = lines[: max(room - 1, 0)]
    more = Text(f"… {len(lines) - len(kept)} more lines", style="dim")
    return [*kept, *on.render_lines(more, pad=False)][: max(room, 0)]
