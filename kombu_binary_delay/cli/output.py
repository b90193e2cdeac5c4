"""What a terminal shows of the values that operations return."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from functools import partial

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from kombu_binary_delay.admin import (
    Creation,
    Difference,
    Explanation,
    LadderStatus,
    Migration,
    Plan,
    Pruning,
    Redrive,
    Refill,
    Status,
    Teardown,
    Verification,
)
from kombu_binary_delay.admin.reading import UNREADABLE
from kombu_binary_delay.model.address import Destination

_HEIGHT = 8  # lines of the picture of a ladder
_BLOCKS = " ▁▂▃▄▅▆▇█"
_HORIZONS = ("1s", 1_000), ("1m", 60_000), ("1h", 3_600_000), ("1d", 86_400_000)
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "dim"}


def console() -> Console:
    """Make a console; where there is no terminal, without colour and wide enough for tables."""
    # Names are shown as they are, whatever Rich could read in them.
    as_it_is = partial(Console, highlight=False, markup=False, emoji=False)
    made = as_it_is()
    return made if made.is_terminal else as_it_is(width=120)


def short(milliseconds: float) -> str:
    """Write a time in one unit, to be read at a glance: "125ms", "8s", "17m", "1.5d", "8.5y"."""
    units = (("y", 31_536_000_000), ("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000))
    for unit, size in units:
        if milliseconds >= size:
            value = milliseconds / size
            return (
                f"{value:.1f}".rstrip("0").rstrip(".") + unit
                if value < 10
                else f"{value:.0f}{unit}"
            )
    return f"{milliseconds:g}ms"


def exact(milliseconds: float) -> str:
    """Write a time so that nothing of it is lost: "1 d 0:16:40", "8.125 s"."""
    days, rest = divmod(milliseconds, 86_400_000)
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g} s"
    hours, rest = divmod(rest, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    seconds = f"{rest / 1000:06.3f}".rstrip("0").rstrip(".")
    return (f"{days:.0f} d " if days else "") + f"{hours:.0f}:{minutes:02.0f}:{seconds}"


def place(destination: Destination) -> str:
    """Name a destination as people do."""
    if destination == UNREADABLE:
        return "without an address"
    if not destination.exchange:
        return f"the queue {destination.routing_key}"
    return f"the exchange {destination.exchange} with the key {destination.routing_key!r}"


# -- status --------------------------------------------------------------------------------------


def status(value: Status) -> RenderableType:
    """Draw what waits."""
    shown: list[RenderableType] = [
        Text.assemble(
            ("RabbitMQ ", "dim"),
            value.broker,
            ("  virtual host ", "dim"),
            value.vhost,
            ("  at ", "dim"),
            datetime.fromtimestamp(value.at).astimezone().strftime("%H:%M:%S"),
        )
    ]
    if not value.ladders:
        shown.append(Text("No ladder exists here yet: the first delayed message makes one."))
    shown += [_ladder(ladder) for ladder in value.ladders]
    foot = Text.assemble(
        ("parked ", "dim"),
        (f"{value.parked:,}", "bold red" if value.parked else "green"),
        ("   in relays ", "dim"),
        f"{value.relays:,}",
    )
    shown.append(foot)
    shown += [Text(f"! {trouble}", style="bold red") for trouble in value.troubles]
    return Group(*shown)


def _ladder(ladder: LadderStatus) -> RenderableType:
    head = Text.assemble(
        (ladder.name, "bold cyan"),
        ("" if ladder.current else "  another ladder of this namespace", "yellow"),
        "\n",
        (f"{ladder.messages:,}", "bold"),
        (" waiting   in ", "dim"),
        (f"{ladder.rate_in:,.1f}/s", "green"),
        ("   out ", "dim"),
        (f"{ladder.rate_out:,.1f}/s", "blue"),
    )
    if not ladder.messages:
        state = "empty: it can be removed by 'teardown --ladder'" if not ladder.current else "empty"
        return Group(head, Text(f"  {state}\n", style="dim"))
    return Group(head, *_skyline(ladder), _forecast(ladder), "")


def _skyline(ladder: LadderStatus) -> Iterable[Text]:
    """Draw one column per queue, the shortest wait first; heights grow with the logarithm."""
    # As wide as there is room for: two characters and a space, one and a space, or one.
    room = (console().width - 12) // len(ladder.queues)
    bar, gap = (2, " ") if room >= 3 else (1, " " if room >= 2 else "")
    step = bar + len(gap)
    counts = [each.messages for each in ladder.queues]
    top = math.log1p(max(counts))
    eighths = [round(math.log1p(count) / top * _HEIGHT * 8) if count else 0 for count in counts]
    for line in range(_HEIGHT - 1, -1, -1):
        row = Text("  ")
        for queue, height in zip(ladder.queues, eighths, strict=True):
            block = _BLOCKS[min(max(height - line * 8, 0), 8)]
            row.append(block * bar + gap, style="red" if queue.trouble else "cyan")
        if line == _HEIGHT - 1:
            row.append(f" {max(counts):,}", style="dim")
        yield row
    yield Text("  " + "▔" * step * len(counts), style="dim")
    yield Text("  " + _axis(ladder, step), style="dim")


def _axis(ladder: LadderStatus, step: int) -> str:
    """Write the waits below their columns, as many as there is room for."""
    line = ""
    for column, queue in enumerate(ladder.queues):
        if len(line) <= column * step and (column % 3 == 0 or len(ladder.queues) < 10):
            line = line.ljust(column * step) + short(queue.wait) + " "
    return line


def _forecast(ladder: LadderStatus) -> Text:
    longest = max(each.latest for each in ladder.queues if each.messages)
    text = Text("  leave within", style="dim")
    for name, horizon in _HORIZONS:
        surely, probably = ladder.within(horizon)
        text.append(f"  {name} ", style="dim")
        text.append(f"{surely:,}" if surely == probably else f"{surely:,} to ~{probably:,}")
        if surely == ladder.messages:
            break
    else:
        text.append(f"  {short(longest)} ", style="dim")
        text.append("all")
    return text


def rates(history: Sequence[tuple[float, float]]) -> Text:
    """Draw what went in and out lately, a column per look."""
    top = max((max(pair) for pair in history), default=0) or 1
    lines = []
    for name, which, style in (("in ", 0, "green"), ("out", 1, "blue")):
        marks = "".join(_BLOCKS[round(pair[which] / top * 8)] for pair in history)
        lines.append(Text.assemble((f"  {name} ", "dim"), (marks, style)))
    lines.append(Text(f"  up to {top:,.1f}/s", style="dim"))
    return Text("\n").join(lines)


# -- explain -------------------------------------------------------------------------------------


def explanation(value: Explanation) -> RenderableType:
    """Draw the way of one message."""
    due = datetime.fromtimestamp(value.due / 1000, tz=timezone.utc).astimezone()
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    facts.add_row(
        "delay",
        exact(value.delay)
        + ("" if value.asked == value.delay else f", rounded up from {exact(value.asked)}"),
    )
    facts.add_row("ladder", value.ladder)
    facts.add_row("in bits", _digits(value))
    facts.add_row("publish to", value.exchange)
    facts.add_row("with the key", value.key)
    facts.add_row("due", due.isoformat(sep=" ", timespec="milliseconds"))
    tree = Tree(Text(f"publish to {value.exchange}", style="dim"), guide_style="cyan")
    branch = tree
    for stay in value.stays:
        wait = Text.assemble(
            (short(stay.ends - stay.begins).rjust(6), "bold cyan"),
            "  ",
            stay.queue,
            (f"   from {exact(stay.begins)} to {exact(stay.ends)}", "dim"),
        )
        branch = branch.add(wait)
    branch.add(Text(f"{place(value.destination)}, after {exact(value.delay)}", style="bold green"))
    return Group(facts, "", tree, *(Text(f"({note})", style="dim") for note in value.notes))


def _digits(value: Explanation) -> Text:
    text = Text()
    for digit, weight in zip(value.digits, value.weights, strict=True):
        waits = "1" in digit
        text.append(digit, style="bold cyan" if waits else "dim")
        text.append(f"\N{MULTIPLICATION SIGN}{short(weight)} ", style="" if waits else "dim")
    return text


# -- the others ----------------------------------------------------------------------------------


def verification(value: Verification) -> RenderableType:
    """Draw what is not as it should be."""
    head = Text.assemble(
        ("RabbitMQ ", "dim"),
        value.broker,
        ("  virtual host ", "dim"),
        value.vhost,
        ("  ladder ", "dim"),
        value.ladder,
    )
    verdict = (
        Text("sound: nothing that would lose, misplace, hasten or delay a message", style="green")
        if value.sound
        else Text("not sound", style="bold red")
    )
    rows = [row for each in value.differences for row in _difference(each)]
    return Group(head, *rows, verdict)


def _difference(value: Difference) -> tuple[Text, Text]:
    kind = (f"{value.severity:8}", _COLOURS[value.severity])
    return (
        Text.assemble(kind, (value.what, "bold"), f": {value.found}"),
        Text(f"        {value.causes}", style="dim"),
    )


def creation(value: Creation) -> RenderableType:
    """Draw what was made."""
    return Group(
        Text(
            f"{len(value.exchanges)} exchanges and {len(value.queues)} queues made, "
            f"{len(value.existing)} existed already; {value.bindings} bindings made"
            + (f", {value.removed_bindings} removed" if value.removed_bindings else "")
        ),
        *_names(value.exchanges, "exchange"),
        *_names(value.queues, "queue"),
    )


def teardown(value: Teardown) -> RenderableType:
    """Draw what was removed."""
    lines: list[RenderableType] = [
        Text(f"{len(value.exchanges)} exchanges and {len(value.queues)} queues removed"),
    ]
    if not value.exchanges and not value.queues:
        lines.append(Text("nothing of this ladder exists", style="yellow"))
    if value.lost:
        lines.append(Text(f"{value.lost} messages went with them", style="bold red"))
    if value.keeps:
        kept = ", ".join(value.keeps)
        lines.append(Text(f"the delivery side stays, for {kept}", style="yellow"))
    return Group(*lines, *_names(value.exchanges, "exchange"), *_names(value.queues, "queue"))


def redriven(value: Redrive) -> RenderableType:
    """Draw what was sent on, by destination."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("destination")
    table.add_column("sent on", justify="right")
    table.add_column("still parked", justify="right")
    for each in value.parked:
        table.add_row(
            place(each.destination),
            f"{each.sent:,}",
            Text(f"{each.stays:,}", style=_left(each.stays)),
        )
    shown: list[RenderableType] = [table] if table.row_count else [Text("nothing is parked")]
    shown += [Text(f"! {reason}", style="yellow") for reason in value.reasons]
    return Group(*shown)


def refill(value: Refill) -> RenderableType:
    """Draw what was sent from a file."""
    return Text(f"{value.sent:,} messages sent")


def plan(value: Plan) -> RenderableType:
    """Draw what would be moved."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("queue")
    table.add_column("messages", justify="right")
    for name, count in value.queues:
        if count:
            table.add_row(name, f"{count:,}")
    table.add_row(Text("together", style="bold"), Text(f"{value.messages:,}", style="bold"))
    return table


def migration(value: Migration) -> RenderableType:
    """Draw what was moved."""
    rate = f", {value.moved / value.seconds:,.0f} a second" if value.moved > 1000 else ""
    lines = [Text(f"{value.moved:,} messages moved in {value.seconds:.1f} s{rate}", style="green")]
    if value.kept:
        lines.append(Text(f"{value.kept:,} stay: they do not wait for a time that is to come"))
    if value.poison:
        lines.append(
            Text(f"{value.poison:,} could not be read: see the queue {value.poison_queue}", "red")
        )
    if value.left:
        lines.append(Text(f"{value.left:,} could not be moved, and wait where they were", "red"))
    lines += [Text(f"! {reason}", style="yellow") for reason in value.reasons]
    return Group(*lines)


def _left(count: int) -> str:
    return "red" if count else "dim"


def pruning(value: Pruning) -> RenderableType:
    """Draw what was pruned."""
    return Group(
        Text(
            f"{len(value.removed)} queues and {len(value.exchanges)} exchanges removed, "
            f"{len(value.kept)} queues are in use and stay"
        ),
        *_names(value.removed, "queue"),
        *_names(value.exchanges, "exchange"),
    )


def dry(drawn: RenderableType) -> RenderableType:
    """Say above what was drawn that nothing was done."""
    return Group(Text("dry run: nothing was changed; this would be:", style="yellow"), drawn)


def _names(names: Sequence[str], kind: str) -> Iterable[Text]:
    for name in names[:6]:
        yield Text(f"  {kind} {name}", style="dim")
    if len(names) > 6:
        yield Text(f"  and {len(names) - 6} more", style="dim")
