"""Purpose: the demo's output: a live picture in a terminal, otherwise plain lines."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dev.demo_count import Spread

BAR = 11  # characters, of which a terminal of 80 columns has room for three beside their numbers
RUN_BAR = 62  # as wide as those three with their numbers
NEAR = 60_000  # ms: the levels above have one line together


@dataclass(frozen=True)
class Picture:
    """One moment of the demo."""

    levels: Sequence[Mapping[int, int]]  # lowest first; how long each queue waits in ms -> messages
    is_away: bool  # the broker; then the levels are those that were seen last
    arrived: int
    expected: int
    lateness: Spread


class Display:
    """Permanent lines and, in a terminal, a changing picture below them."""

    def __init__(self) -> None:
        console = Console(highlight=False)
        self._is_live = console.is_terminal and not console.is_dumb_terminal
        # A file has no width: enough for the table, and lines are not wrapped.
        self._console = console if self._is_live else Console(highlight=False, width=100)
        self._picture: Picture | None = None
        # The report takes the place of the picture: a screen of 24 lines has all that was said.
        self._live = Live(
            console=self._console, get_renderable=self._draw, auto_refresh=False, transient=True
        )
        self._block = "\N{FULL BLOCK}" if console.encoding.startswith("utf") else "#"
        self._most = 1  # messages that a queue has had, so that bars of two pictures compare
        self._start = time.monotonic()
        self._last_line = 0.0

    def say(self, text: str) -> None:
        """Print a permanent line."""
        line = f"{self._elapsed:5.1f} s  {text}"
        self._console.print(line, soft_wrap=not self._is_live)

    def show(self, picture: Picture) -> None:
        """Show a moment; outside a terminal, at most one line every two seconds."""
        if self._is_live:
            self._picture = picture
            self._live.start()
            self._live.refresh()
        elif self._elapsed - self._last_line >= 2:
            self._last_line = self._elapsed
            self.say(_line(picture))

    def close(self) -> None:
        """Restore the terminal."""
        self._live.stop()

    def report(self, rows: Sequence[tuple[str, object]], *, good: bool) -> None:
        """Print the last table, and whether all is well."""
        self.close()
        table = Table.grid(padding=(0, 4, 0, 0))
        for name, value in rows:
            table.add_row(name, str(value))
        verdict = "Nothing lost, nothing early." if good else "FAILED: lost, overdue or early."
        style = "bold green" if good else "bold red"
        self._console.print("", table, "", Text(verdict, style=style), sep="\n")
        self._console.print("To see in a browser what waits on your broker: kombu-binary-delay web")

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    def _draw(self) -> Group:
        picture = self._picture
        if picture is None:
            return Group()
        head = Text(f"{self._elapsed:5.1f} s  {_counts(picture)}", style="bold")
        note = "\nwaiting in RabbitMQ, a line for each level of the ladder:"
        if picture.is_away:
            note = "\nRabbitMQ is away; what was last seen waiting in it:"
        near = [level for level in picture.levels if min(level) <= NEAR]
        far = picture.levels[len(near) :]
        others = sum(sum(level.values()) for level in far)
        counts = (count for level in near for count in level.values())
        self._most = max(self._most, others, *counts)

        ladder = Table.grid(padding=(0, 1))
        for _ in range(max(map(len, near))):
            ladder.add_column(justify="right", width=8)
            ladder.add_column(justify="right", width=3)
            ladder.add_column(width=BAR, style="dim" if picture.is_away else "green")
        if far:
            ladder.add_row("longer", _count(others), self._bar(others, self._most, BAR))
        for level in reversed(near):
            cells = []
            for wait, count in sorted(level.items()):
                cells += [human(wait), _count(count), self._bar(count, self._most, BAR)]
            ladder.add_row(*cells)
        arrived = Table.grid(padding=(0, 1))
        arrived.add_column(justify="right", width=8)
        arrived.add_column(justify="right", width=3)
        arrived.add_column(width=RUN_BAR, style="cyan")
        bar = self._bar(picture.arrived, picture.expected, RUN_BAR)
        arrived.add_row("have run", _count(picture.arrived), bar)
        return Group(head, Text(note, style="dim"), ladder, arrived)

    def _bar(self, count: int, most: int, width: int) -> str:
        return self._block * -(-count * width // max(most, 1))


def human(milliseconds: int) -> str:
    """Return a duration in a suitable unit: "125 ms", "64 s", "12 d"."""
    value, unit = float(milliseconds), "ms"
    for size, larger, limit in ((1000, "s", 1), (60, "min", 2), (60, "h", 2), (24, "d", 2)):
        if value / size < limit:
            break
        value, unit = value / size, larger
    return f"{value:.1f} {unit}" if value < 10 and value % 1 else f"{value:.0f} {unit}"


def _counts(picture: Picture) -> str:
    arrived = f"{picture.arrived} of {picture.expected} have run"
    return f"{arrived}, late {picture.lateness} (p50/p99/max)" if picture.arrived else arrived


def _count(count: int) -> str:
    return str(count or ".")


def _line(picture: Picture) -> str:
    if picture.is_away:
        return f"{_counts(picture)}; RabbitMQ is away"
    queues = sorted(queue for level in picture.levels for queue in level.items() if queue[1])
    near = "".join(f" {human(wait)}: {count}," for wait, count in queues if wait <= NEAR)
    far = sum(count for wait, count in queues if wait > NEAR)
    return f"{_counts(picture)}; waiting in queues of{near} longer: {far}"
