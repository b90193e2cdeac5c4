"""Purpose: the demo's output: a live picture in a terminal, otherwise plain lines."""

from __future__ import annotations

import io
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kombu_binary_delay.ladder.durations import human

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dev.demo_count import Spread

BAR = 56  # characters, for which a terminal of 80 columns has room beside the numbers
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
        # What a picture for the documentation shows: all lines, and one moment between them.
        self._kept = Console(highlight=False, width=80, record=True, file=io.StringIO())
        self._picture: Picture | None = None
        # The report takes the place of the picture: a screen of 24 lines has all that was said.
        self._live = Live(
            console=self._console, get_renderable=self._draw, auto_refresh=False, transient=True
        )
        self._block = "\N{FULL BLOCK}" if console.encoding.startswith("utf") else "#"
        self._most = 1  # messages that a level has had, so that bars of two pictures compare
        self._start = time.monotonic()
        self._last_line = 0.0

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self._kept.print(self._print(text))

    def show(self, picture: Picture) -> None:
        """Show a moment; outside a terminal, at most one line every two seconds."""
        self._picture = picture
        if self._is_live:
            self._live.start()
            self._live.refresh()
        elif self._elapsed - self._last_line >= 2:
            self._last_line = self._elapsed
            self._print(_line(picture))

    def keep_moment(self) -> None:
        """Keep the moment that was shown last for :meth:`save`."""
        self._kept.print("", self._draw(), "", sep="\n")

    def save(self, path: Path, title: str) -> None:
        """Write an SVG file of all lines that were said, the kept moment and the report."""
        # Without the address of a font: an image fetches nothing.
        window = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
        image = self._kept.export_svg(title=title, code_format=window, unique_id="demo")
        path.write_text("".join(f"{line.rstrip()}\n" for line in image.splitlines()))

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
        for console in (self._console, self._kept):
            console.print("", table, "", Text(verdict, style=style), sep="\n")
        self._console.print("To see in a browser what waits on your broker: kombu-binary-delay web")

    def _print(self, text: str) -> str:
        line = f"{self._elapsed:5.1f} s  {text}"
        self._console.print(line, soft_wrap=not self._is_live)
        return line

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
        counts = {_range(level): sum(level.values()) for level in reversed(near)}
        counts = {"longer": sum(sum(level.values()) for level in far), **counts}
        self._most = max(self._most, *counts.values())

        bars = Table.grid(padding=(0, 1))
        bars.add_column(justify="right", width=17)
        bars.add_column(justify="right", width=3)
        bars.add_column(width=BAR)
        for name, count in counts.items():
            style = "dim" if picture.is_away else "green"
            bars.add_row(name, _count(count), Text(self._bar(count, self._most), style))
        arrived = self._bar(picture.arrived, picture.expected)
        bars.add_row("have run", _count(picture.arrived), Text(arrived, "cyan"))
        return Group(head, Text(note, style="dim"), bars)

    def _bar(self, count: int, most: int) -> str:
        return self._block * -(-count * BAR // max(most, 1))


def _range(level: Mapping[int, int]) -> str:
    return " to ".join(dict.fromkeys((human(min(level)), human(max(level)))))


def _counts(picture: Picture) -> str:
    arrived = f"{picture.arrived} of {picture.expected} have run"
    return f"{arrived}, late {picture.lateness} (p50/p99/max)" if picture.arrived else arrived


def _count(count: int) -> str:
    return str(count or ".")


def _line(picture: Picture) -> str:
    if picture.is_away:
        return f"{_counts(picture)}; RabbitMQ is away"
    near = "".join(
        f" {_range(level)}: {sum(level.values())},"
        for level in picture.levels
        if min(level) <= NEAR and any(level.values())
    )
    far = sum(sum(level.values()) for level in picture.levels if min(level) > NEAR)
    return f"{_counts(picture)}; waiting in queues of{near} longer: {far}"
