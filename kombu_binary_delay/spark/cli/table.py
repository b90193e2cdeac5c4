"""The plan on a terminal: a row for each figure and a column for each ladder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

#: The figures that the table shows; those that can have a limit under the limit's name.
FIGURES = (
    "messages",
    "hops_per_message",
    "waiting",
    "queue_waiting",
    "queues",
    "hops_per_second",
    "published_per_second",
    "bytes",
    "at_once",
    "beyond",
    "undated",
)
_Row = Mapping[str, Any]


def show_plan(on: Console, summaries: Sequence[_Row], verdicts: Sequence[_Row]) -> None:
    """Print the summary of each ladder, and which limits it keeps.

    Names of ladders are never cut: a table that would be wider than the terminal becomes several,
    one below the other.

    :param summaries: rows of :func:`kombu_binary_delay.spark.plan.summarize`.
    :param verdicts: rows of :func:`kombu_binary_delay.spark.plan.check`.
    """
    exceeded = {(each["ladder"], each["limit"]) for each in verdicts if not each["passed"]}
    for ladders in _that_fit(summaries, on.width):
        on.print(_table(ladders, exceeded), "")
    for each in verdicts:
        if not each["passed"]:
            on.print(
                f"{each['ladder']} exceeds {each['limit']}={number(each['allowed'])}: "
                f"{number(each['planned'])}",
                style="red",
            )
    if not exceeded:
        limits = dict.fromkeys(f"{each['limit']}={number(each['allowed'])}" for each in verdicts)
        on.print(f"within the limits: {', '.join(limits)}", style="green")


def number(value: float) -> str:
    """Write a count or a rate: with a decimal where it is not whole."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _heading(ladder: str) -> str:
    """Return the name of a ladder in a line each for what it is, and in what it differs."""
    return ladder.replace(", ", ",\n")


def _width(summary: _Row) -> int:
    """Return the width of the column of a ladder, with its margin."""
    texts = [*_heading(summary["ladder"]).split("\n"), *(number(summary[each]) for each in FIGURES)]
    return max(map(len, texts)) + 3


def _that_fit(summaries: Sequence[_Row], width: int) -> Iterator[list[_Row]]:
    room = width - max(map(len, FIGURES)) - 3
    group: list[_Row] = []
    for each in summaries:
        if group and sum(map(_width, [*group, each])) > room:
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _table(summaries: Sequence[_Row], exceeded: set[tuple[str, str]]) -> RenderableType:
    from rich.table import Table  # noqa: PLC0415 - with Spark's
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, header_style="bold", padding=(0, 3, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for each in summaries:
        table.add_column(Text(_heading(each["ladder"])), justify="right", overflow="fold")
    for name in FIGURES:
        cells = [
            Text(number(each[name]), style="red" if (each["ladder"], name) in exceeded else "")
            for each in summaries
        ]
        table.add_row(Text(name, style="dim"), *cells)
    return table
