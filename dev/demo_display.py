"""Purpose: what the demo shows: a live picture in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dev.demo_count import Spread

COLUMNS = 3  # of levels beside each other: a whole ladder fits into 24 lines
BAR = 12  # characters
NEAR = 16_000  # ms: levels above share one number where there is only a line


@dataclass(frozen=True)
class Picture:
    """One moment of the demo."""

    ladder: dict[int, int] | None  # weight in ms -> messages; None while the broker is away
    arrived: int
    expected: int
    lateness: Spread


class Display:
    """Lines that stay, and below them, in a terminal, a picture that changes."""

    def __init__(self) -> None:
        console = Console(highlight=False)
        self._is_live = console.is_terminal and not console.is_dumb_terminal
        # A file has no width: enough for the table, and lines are not wrapped.
        self._console = console if self._is_live else Console(highlight=False, width=100)
        self._live = Live(console=self._console, auto_refresh=False)
        self._start = time.monotonic()
        self._last_line = 0.0

    def say(self, text: str) -> None:
        """Print a line that stays."""
        line = f"{self._elapsed:5.1f} s  {text}"
        self._console.print(line, soft_wrap=not self._is_live)

    def show(self, picture: Picture) -> None:
        """Show a moment; where it takes a line each, not more often than every two seconds."""
        if self._is_live:
            self._live.start()
            self._live.update(self._draw(picture), refresh=True)
        elif self._elapsed - self._last_line >= 2:
            self._last_line = self._elapsed
            self.say(_line(picture))

    def close(self) -> None:
        """Leave the terminal as it was, the last picture in it."""
        self._live.stop()

    def report(self, title: str, rows: Sequence[tuple[str, object]], verdict: str) -> None:
        """Print the last table."""
        table = Table("", title, show_header=True, header_style="bold")
        for name, value in rows:
            table.add_row(name, str(value))
        self._console.print(table)
        self._console.print(Text(verdict, style="bold"))

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    def _draw(self, picture: Picture) -> Group:
        head = Text(f"{self._elapsed:5.1f} s  {_counts(picture)}", style="bold")
        if picture.ladder is None:
            return Group(head, Text("the broker is away", style="reverse"))
        grid = Table.grid(padding=(0, 1))
        for _ in range(COLUMNS):
            grid.add_column(justify="right", width=8)
            grid.add_column(justify="right", width=3)
            grid.add_column(width=BAR, style="green")
        levels = sorted(picture.ladder.items())
        height = -(-len(levels) // COLUMNS)
        most = max(picture.ladder.values(), default=0) or 1
        for row in range(height):
            cells = []
            for weight, count in levels[row::height]:
                bar = "#" * -(-count * BAR // most)
                cells += [human(weight), str(count or "."), bar]
            grid.add_row(*cells)
        return Group(head, Text("messages waiting, by the level's weight:", style="dim"), grid)


def human(milliseconds: int) -> str:
    """Write a time with the unit that suits it: "125 ms", "64 s", "12 d"."""
    value, unit = float(milliseconds), "ms"
    for size, larger, limit in ((1000, "s", 1), (60, "min", 2), (60, "h", 2), (24, "d", 2)):
        if value / size < limit:
            break
        value, unit = value / size, larger
    return f"{value:.1f} {unit}" if value < 10 and value % 1 else f"{value:.0f} {unit}"


def _counts(picture: Picture) -> str:
    arrived = f"arrived {picture.arrived} of {picture.expected}"
    return f"{arrived}, late {picture.lateness} (p50 / p99 / max)" if picture.arrived else arrived


def _line(picture: Picture) -> str:
    if picture.ladder is None:
        return f"{_counts(picture)}; the broker is away"
    levels = [(weight, count) for weight, count in sorted(picture.ladder.items()) if count]
    near = "".join(f" {human(weight)}: {count}," for weight, count in levels if weight <= NEAR)
    far = sum(count for weight, count in levels if weight > NEAR)
    return f"{_counts(picture)}; waiting at{near} longer: {far}"
