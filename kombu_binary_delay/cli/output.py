"""What a terminal shows of the values that operations return."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from functools import partial

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from kombu_binary_delay.admin import (
    Amended,
    Count,
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
    Story,
    Teardown,
    Verification,
    Waiters,
    WaitingTask,
)
from kombu_binary_delay.admin.amend import CANCEL
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
    if value.amendments is not None:
        active, lag = value.amendments.active, value.amendments.lag
        foot.append("   amendments ", style="dim")
        foot.append("not readable" if active is None else f"{active:,}")
        if lag is not None:
            foot.append(f" (lag {lag:.1f} ms)", style="dim")
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


# -- tasks ---------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """Write what somebody else has named so that a terminal shows it, and obeys nothing in it."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "replace").decode()
        for each in text
    )


def moment(milliseconds: int) -> str:
    """Write a time since the epoch in this machine's time zone."""
    try:
        at = datetime.fromtimestamp(milliseconds / 1000, tz=timezone.utc).astimezone()
    except (OverflowError, ValueError, OSError):
        return f"{milliseconds} ms"
    return at.strftime("%Y-%m-%d %H:%M:%S")


def ahead(milliseconds: int) -> str:
    """Write how far from now a time since the epoch is."""
    left = milliseconds - time.time() * 1000
    return f"in {short(round(left))}" if left >= 1 else "now"


def call(task: WaitingTask) -> str:
    """Write a task as it would be called."""
    if task.name is None:
        return "(no task)"
    kwargs = f" {task.kwargs}" if task.kwargs not in (None, "{}") else ""
    return plain(f"{task.name}{task.args or ''}{kwargs}")


_WIDE = 110  # columns, from which on a task has one line


def tasks(value: Sequence[WaitingTask], foot: RenderableType) -> RenderableType:
    """Draw waiting tasks, in a line each or, on a narrow terminal, in two."""
    width = console().width
    if not value or width < _WIDE:
        return Group(*task_lines(value, width), foot)
    table = Table(box=None, header_style="dim", pad_edge=False, expand=True)
    for name, ratio in (("due", None), ("", None), ("id", None), ("task", 3), ("for", 1)):
        table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=ratio)
    table.add_column("retries", justify="right", no_wrap=True)
    for each in value:
        table.add_row(
            moment(each.due),
            Text(ahead(each.due), style="cyan"),
            Text(plain(each.id or "-"), style="bold"),
            call(each),
            plain(each.queue),
            "" if each.retries is None else f"{each.retries}",
        )
    return Group(table, foot)


def task_lines(value: Sequence[WaitingTask], width: int) -> list[Text]:
    """Draw each task in two lines, cut to the width."""
    lines = []
    for each in value:
        retries = f"   retry {each.retries}" if each.retries else ""
        head = Text.assemble(
            moment(each.due),
            (f"  {ahead(each.due):8}", "cyan"),
            (f"  {plain(each.id or '-')}", "bold"),
        )
        rest = Text.assemble(f"  {call(each)}", (f"   for {plain(each.queue)}{retries}", "dim"))
        room = width - len(rest.plain) + len(call(each))
        if len(rest.plain) > width and room > 20:
            cut = Text(f"  {call(each)}")
            cut.truncate(room, overflow="ellipsis")
            rest = Text.assemble(cut, (f"   for {plain(each.queue)}{retries}", "dim"))
        for line in (head, rest):
            line.truncate(width, overflow="ellipsis")
            lines.append(line)
    return lines


def task_foot(found: Waiters, shown: int, matched: int) -> RenderableType:
    """Say how many there are, from where they were read, and what is not among them."""
    those = f"{matched:,} waiting" if shown == matched else f"{shown:,} of {matched:,} waiting"
    lines = [Text.assemble((those, "bold"), (f", from the {found.source}", "dim"))]
    lines += [
        Text(f"! {plain(each)}", style="dim" if found.complete else "yellow")
        for each in found.unseen()
    ]
    return Group(*lines)


def counts(value: Sequence[Count], what: str, foot: RenderableType) -> RenderableType:
    """Draw how many tasks share a name or a queue."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column(what, no_wrap=True, overflow="ellipsis")
    table.add_column("waiting", justify="right", no_wrap=True)
    table.add_column("first due", no_wrap=True)
    table.add_column("last due", no_wrap=True)
    for each in value:
        table.add_row(
            plain(each.value) or "(no task)",
            f"{each.tasks:,}",
            moment(each.first),
            moment(each.last),
        )
    return Group(table, foot) if value else foot


_STATES = {
    "waiting": "waits",
    "due": "is due, and nobody has told what became of it",
    "arrived": "has arrived at a consumer",
    "executed": "was executed",
    "cancelled": "is cancelled, and will not run",
    "superseded": "is superseded by a later one, and will not run",
    "postponed": "is postponed",
    "unknown": "is not known",
}


def story(value: Story) -> RenderableType:
    """Draw what is known of one task."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(no_wrap=True, overflow="ellipsis")
    facts.add_row("task", Text(plain(value.id), style="bold"))
    task = value.task
    if task is not None:
        facts.add_row("called", call(task))
        facts.add_row("for", plain(task.queue))
    for event in value.events:
        words = [moment(event.at)]
        if event.kind == "scheduled" and event.due is not None:
            words.append(f"due {moment(event.due)}")
        if event.retries:
            words.append(f"retry {event.retries}")
        if event.state:
            words.append(event.state)
        facts.add_row(plain(event.kind), plain(", ".join(words)))
    if task is not None and value.state in ("waiting", "postponed"):
        facts.add_row("waits in", plain(task.level) if task.level else "a level")
        facts.add_row("leaves", f"{moment(task.due)}, {ahead(task.due)}")
    state = Text(f"It {_STATES.get(value.state, value.state)}", style="bold")
    lines = [Text(f"! {plain(each)}", style="dim") for each in value.unseen]
    source = Text(f", by the {value.source}.", style="dim")
    return Group(facts, Text.assemble(state, source), *lines)


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


def amended(value: Amended) -> RenderableType:
    """Draw what was cancelled or rescheduled."""
    count = f"{len(value.ids):,} task" + ("s" if len(value.ids) != 1 else "")
    until = datetime.fromtimestamp(value.until / 1000).astimezone()
    if value.action == CANCEL:
        head = f"{count} cancelled: recorded, and remembered until {until:%Y-%m-%d %H:%M}"
    else:
        due = datetime.fromtimestamp((value.due or 0) / 1000).astimezone()
        head = f"{count} rescheduled to {due.isoformat(sep=' ', timespec='seconds')}: recorded"
    lines: list[RenderableType] = [
        Text(head if value.ids else "nothing to do", style="green" if value.ids else "yellow")
    ]
    if value.without_id:
        lines.append(Text(f"! {value.without_id:,} have no id, and wait on", style="yellow"))
    return Group(*lines, *_names(value.ids, "task"))


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
