"""Draw ``status``: trouble, and the number of delayed messages, one line per level."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kombu_binary_delay.ladder.durations import human
from kombu_binary_delay.operate import LadderStatus, Status, Waiting
from kombu_binary_delay.operate.text import plain

from .console import console, cropped, hanging
from .words import moment

_HORIZONS = 1_000, 60_000, 3_600_000, 86_400_000  # ms
_BLOCKS = " ▁▂▃▄▅▆▇█"
_PARTS = " ▏▎▍▌▋▊▉"
_DIRECT = 5  # lines for queues of one delay

History = Sequence[tuple[float, float]]


def status(value: Status, *more: RenderableType) -> RenderableType:
    """Draw delayed messages; trouble comes last, where the user looks when the command has ended.

    :param more: what to draw below the ladders.
    """
    foot = [_summary(value), *_lateness(value), *_troubles(value)]
    return Group(_head(value), *_body(value), *more, *foot)


def watched(value: Status, history: History, *more: RenderableType) -> RenderableType:
    """Draw what fits on the terminal, trouble first.

    :param history: messages per second in and out, one pair per look.
    :param more: what to draw below the ladders.
    """
    top = [_head(value), _summary(value), *_troubles(value)]
    body = [*_lateness(value), _rates(history), *_body(value, history), *more]
    return cropped(top, body, console())


def _head(value: Status) -> Text:
    return _one_line(
        ("RabbitMQ ", "dim"),
        value.broker,
        ("  virtual host ", "dim"),
        plain(value.vhost),
        ("  at ", "dim"),
        moment(value.at * 1000),
    )


def _summary(value: Status) -> Text:
    parts: list[str | tuple[str, str]] = []
    for figure in value.figures:
        parts.append((f"{'   ' if parts else ''}{figure.name} ", "dim"))
        if figure.count is None:
            parts.append(("not readable", "yellow"))
        else:
            parts.append((f"{figure.count:,}", "bold red" if figure.is_bad else ""))
    return _one_line(*parts)


def _lateness(value: Status) -> list[RenderableType]:
    arrivals = value.arrivals
    if arrivals is None:
        return []
    if arrivals.p50 is None or arrivals.p99 is None or arrivals.on_time is None:
        return [_one_line(("late  no message arrived in the last hour", "dim"))]
    of = f"{arrivals.messages:,} in the last hour"
    if not arrivals.complete:
        of = f"the first {of}"
    return [
        _one_line(
            ("late  p50 ", "dim"),
            human(round(arrivals.p50)),
            ("  p99 ", "dim"),
            human(round(arrivals.p99)),
            ("  within a tick ", "dim"),
            f"{arrivals.on_time:.1%}",
            (f"  of {of}", "dim"),
        )
    ]


def _troubles(value: Status) -> list[RenderableType]:
    return [hanging("!", trouble, "bold red") for trouble in value.troubles]


def _body(value: Status, history: History = ()) -> Iterator[RenderableType]:
    if not value.ladders:
        yield Text("No ladder exists here yet: the first delayed message makes one.")
    for ladder in value.ladders:
        yield from _ladder(ladder, rates=not history)
    if value.in_relays:
        table = _table()
        table.add_column("relay", no_wrap=True, overflow="ellipsis")
        table.add_column("waiting", justify="right")
        for name, count in value.in_relays:
            table.add_row(plain(name), f"{count:,}")
        yield table
        yield ""


def _ladder(ladder: LadderStatus, *, rates: bool) -> Iterator[RenderableType]:
    """Draw a ladder: a line for each level up to the highest in which messages wait."""
    state = "" if ladder.current else "  another ladder of this namespace"
    yield _one_line((ladder.name, "bold cyan"), (state, "yellow"))
    if not ladder.messages:
        said = "empty" if ladder.current else "empty: 'teardown --ladder' removes it"
        if any(queue.trouble for queue in ladder.queues):
            said = "no messages that are known of: see what is wrong"
        yield Text(f"{said}\n", style="dim")
        return
    parts: list[str | tuple[str, str]] = [(f"{ladder.messages:,}", "bold"), (" waiting", "dim")]
    if rates and ladder.rate_in is not None and ladder.rate_out is not None:
        parts += [
            ("   in ", "dim"),
            (f"{ladder.rate_in:,.1f}/s", "green"),
            ("   out ", "dim"),
            (f"{ladder.rate_out:,.1f}/s", "blue"),
        ]
    yield _one_line(*parts)
    yield _levels(ladder)
    yield _forecast(ladder)
    yield ""


def _levels(ladder: LadderStatus, *, by_queue: bool = True) -> Table:
    levels: dict[int, list[Waiting]] = {}
    for waiting in ladder.queues:
        if waiting.level is not None:
            levels.setdefault(waiting.level, []).append(waiting)
    highest = max((level for level, row in levels.items() if _sum(row)), default=-1)
    shown = {level: levels[level] for level in sorted(levels) if level <= highest}
    columns = max(map(len, shown.values()), default=0) if by_queue else 0
    direct = sorted(
        (queue for queue in ladder.queues if queue.level is None and queue.messages),
        key=lambda queue: -queue.messages,
    )
    most = max([_sum(row) for row in shown.values()] + [queue.messages for queue in direct])
    leaving = any(queue.leaving for queue in ladder.queues)
    table = _table()
    table.add_column("level", no_wrap=True)
    for name in ("wait", *_names(shown.values(), columns), "waiting", *["leaving"] * leaving):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("left after", justify="right", no_wrap=True)
    figures = sum(max(7, len(f"{most:,}")) + 2 for _ in table.columns[2:-1])
    room = max(min(console().width - figures - 36, 40), 0)
    if room:
        table.add_column("", no_wrap=True)
    for level, row in shown.items():
        table.add_row(*_level(f"{level:02}", row, columns, most, room, leaving=leaving))
    for waiting in direct[:_DIRECT]:
        table.add_row(*_level("direct", [waiting], columns, most, room, leaving=leaving))
    if len(direct) > _DIRECT:
        table.add_row(f"and {len(direct) - _DIRECT} more direct queues")
    width = console().width
    wide = console().options.update_width(2 * width)
    if by_queue and console().measure(table, options=wide).maximum > width:
        return _levels(ladder, by_queue=False)
    return table


def _names(rows: Iterable[Sequence[Waiting]], columns: int) -> list[str]:
    """Return a column name for each queue of a level, its name's end; none for a single queue."""
    if columns not in (2, 3):
        return []
    names = [""] * columns
    for row in rows:
        for column, queue in enumerate(row):
            names[column] = max(names[column], "." + queue.queue.rpartition(".")[2], key=len)
    return names


def _level(
    name: str, row: Sequence[Waiting], columns: int, most: int, room: int, *, leaving: bool
) -> Iterator[RenderableType]:
    style = "red" if any(queue.trouble for queue in row) else ""
    yield Text(name, style=style)
    yield Text(human(min(queue.wait for queue in row)), style="dim")
    if columns in (2, 3):
        for column in range(columns):
            count = row[column].messages if column < len(row) and name != "direct" else None
            yield Text("" if count is None else f"{count:,}", style="" if count else "dim")
    yield Text(f"{_sum(row):,}", style=style or ("bold" if _sum(row) else "dim"))
    if leaving:
        held = sum(queue.leaving for queue in row)
        yield Text(f"{held:,}", style=style if held else "dim")
    latest = max((queue.latest for queue in row if queue.messages), default=0)
    yield Text(human(latest) if latest else "", style="dim")
    if room:
        yield Text(_bar(_sum(row), most, room), style=style or "cyan")


def _sum(row: Iterable[Waiting]) -> int:
    return sum(queue.messages for queue in row)


def _bar(count: int, most: int, room: int) -> str:
    if not count:
        return ""
    eighths = max(round(count / most * room * 8), 1)
    return "█" * (eighths // 8) + _PARTS[eighths % 8].strip()


def _forecast(ladder: LadderStatus) -> Table:
    """Draw how many leave within a second, a minute and so on, up to when all have left."""
    longest = max(queue.latest for queue in ladder.queues if queue.messages)
    horizons = [horizon for horizon in _HORIZONS if horizon < longest] + [longest]
    table = _table()
    table.add_column("leave within", style="dim", no_wrap=True)
    for horizon in horizons:
        table.add_column(human(horizon), justify="right", no_wrap=True)
    figures = [ladder.within(horizon) for horizon in horizons]
    table.add_row("surely", *(f"{surely:,}" for surely, _ in figures))
    table.add_row("probably", *(f"{probably:,}" for _, probably in figures))
    return table


def _rates(history: History) -> Text:
    """Draw the recent rates in and out, one column per look."""
    top = max((max(pair) for pair in history), default=0) or 1
    room = max(console().width - 20, 1)
    lines = []
    for name, which, style in (("in ", 0, "green"), ("out", 1, "blue")):
        marks = "".join(_BLOCKS[round(pair[which] / top * 8)] for pair in history[-room:])
        now = f"{history[-1][which]:,.1f}/s"
        lines.append(Text.assemble((f"{name} ", "dim"), f"{now:>11}  ", (marks, style)))
    return Text("\n").join(lines)


def _table() -> Table:
    return Table(box=None, header_style="dim", pad_edge=False, show_edge=False)


def _one_line(*parts: str | tuple[str, str]) -> Text:
    line = Text.assemble(*parts, no_wrap=True)
    line.overflow = "ellipsis"
    return line
