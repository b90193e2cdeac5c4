"""Draw the values that operations return, for a terminal."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kombu_binary_delay.ladder.durations import human
from kombu_binary_delay.operate import (
    Amended,
    Count,
    Creation,
    Difference,
    Explanation,
    Late,
    Migration,
    Preview,
    Pruning,
    Redrive,
    Selection,
    Story,
    TaskTable,
    Teardown,
    Verification,
    WaitingTask,
)
from kombu_binary_delay.operate.amend import CANCEL
from kombu_binary_delay.operate.text import plain, plural
from kombu_binary_delay.schedules import Applied, Schedules
from kombu_binary_delay.schedules.listing import OVERDUE_NOW, WAITING
from kombu_binary_delay.wire.executor import OTHER_AGE

from .console import console, cropped, hanging, watch
from .status_screen import status
from .words import from_now, moment, place

__all__ = ["console", "cropped", "status", "watch"]

#: A remedy: words, and then perhaps a command, up to the end.
_COMMAND = re.compile(
    r"(.*?:(?= (?:rabbitmqctl|curl) )|(?=(?:rabbitmqctl|curl) )|.*) ?(.*)", re.DOTALL
)
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "dim"}


# -- schedules ----------------------------------------------------------------------------------


def schedules(value: Schedules) -> RenderableType:
    """Draw an app's schedules as they stand."""
    if not value.schedules:
        return Text("no schedules: 'schedule apply' takes those of beat_schedule", style="dim")
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("schedule", "when", "next due", "last run", ""):
        table.add_column(name, overflow="fold")
    for schedule in value.schedules:
        left_out = [
            f"{count} {word}"
            for count, word in ((schedule.missed, "missed"), (schedule.skipped, "skipped"))
            if count
        ]
        state = schedule.state if schedule.state != WAITING else ""
        table.add_row(
            plain(schedule.name),
            plain(schedule.when),
            moment(schedule.next_due, zone=False) if schedule.next_due else "",
            moment(schedule.last_due, zone=False) if schedule.last_due else "",
            Text(
                ", ".join(filter(None, [state, *left_out])),
                style=_COLOURS["error"] if schedule.state == OVERDUE_NOW else "dim",
            ),
        )
    foot = f"{plural(value.workers or 0, 'worker')} to send them; all times are in UTC"
    return Group(table, Text(foot, style="dim" if value.workers else "yellow"))


def applied(value: Applied, *, dry: bool = False) -> RenderableType:
    """Draw what an ``apply`` has changed."""
    changes = {"added": value.added, "changed": value.changed, "removed": value.removed}
    lines = [
        Text(f"{_done(dry, word)} {plain(name)}")
        for word, names in changes.items()
        for name in names
    ]
    return Group(*lines, Text(f"{len(value.unchanged)} unchanged", style="dim"))


# -- explain -------------------------------------------------------------------------------------


def explanation(value: Explanation) -> RenderableType:
    """Draw the route of one message."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row(
        "delay",
        human(value.delay)
        + ("" if value.asked == value.delay else f", rounded up from {value.asked:.15g} ms"),
    )
    facts.add_row("ladder", value.ladder)
    facts.add_row("in bits", _digits(value))
    facts.add_row("publish to", value.exchange)
    facts.add_row("with the key", value.key)
    facts.add_row("due", moment(value.due))
    way = Table(box=None, header_style="dim", pad_edge=False)
    way.add_column("waits", justify="right", no_wrap=True, style="bold cyan")
    way.add_column("in the queue", overflow="fold")
    for name in ("from, s", "until, s"):
        way.add_column(name, justify="right", no_wrap=True, style="dim")
    for wait in value.waits:
        begins, ends = (f"{at / 1000:.10g}" for at in (wait.begins, wait.ends))
        way.add_row(human(wait.ends - wait.begins), wait.queue, begins, ends)
    end = Text(f"arrives at {place(value.destination)}", style="bold green")
    waits: list[RenderableType] = ["", way] if value.waits else []
    return Group(facts, *waits, end, *_notes(value.notes))


def _digits(value: Explanation) -> Text:
    text = Text()
    for digit, weight in zip(value.digits, value.weights, strict=True):
        waits = "1" in digit
        text.append(digit, style="bold cyan" if waits else "dim")
        text.append(f"\N{MULTIPLICATION SIGN}{human(weight)} ", style="" if waits else "dim")
    return text


# -- tasks ---------------------------------------------------------------------------------------


_WIDE = 110  # columns, from which on a task has one line


def tasks_that_fit(on: Console) -> int:
    """Return how many tasks fit on a terminal, above the lines below them."""
    return (on.size.height - 7) // (1 if on.width >= _WIDE else 2)


def tasks(value: Sequence[WaitingTask], foot: RenderableType) -> RenderableType:
    """Draw delayed tasks, in a line each or, on a narrow terminal, in two."""
    width = console().width
    if not value or width < _WIDE:
        return Group(*task_lines(value, width), foot)
    table = Table(box=None, header_style="dim", pad_edge=False, expand=True)
    for name, ratio in (("due (UTC)", None), ("", None), ("id", None), ("task", 1)):
        table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=ratio)
    table.add_column("for", no_wrap=True, overflow="ellipsis", max_width=width // 4)
    table.add_column("retries", justify="right", no_wrap=True)
    for task in value:
        table.add_row(
            moment(task.due, zone=False),
            Text(from_now(task.due), style="cyan"),
            Text(plain(task.id or "-"), style="bold"),
            plain(task.call),
            plain(task.queue),
            "" if task.retries is None else f"{task.retries}",
        )
    return Group(table, foot)


def task_lines(value: Sequence[WaitingTask], width: int) -> list[Text]:
    """Draw each task in two lines, cut to the width."""
    lines = []
    for task in value:
        retries = f"   retry {task.retries}" if task.retries else ""
        tail = Text(f"   for {plain(task.queue)}{retries}", "dim")
        head = Text.assemble(
            moment(task.due),
            (f"  {from_now(task.due):10}", "cyan"),
            (f"  {plain(task.id or '-')}", "bold"),
        )
        rest = Text(f"  {plain(task.call)}")
        room = width - tail.cell_len
        if room > 20:
            rest.truncate(room, overflow="ellipsis")
        rest.append_text(tail)
        for line in (head, rest):
            line.truncate(width, overflow="ellipsis")
            lines.append(line)
    return lines


def task_foot(table: TaskTable, select: Selection, shown: int) -> RenderableType:
    """Draw how many tasks there are, where they were read, and what is not included."""
    matched, unseen = table.count(select), table.unseen(select)
    those = f"{matched:,} waiting" if shown == matched else f"{shown:,} of {matched:,} waiting"
    line = Text.assemble((those, "bold"), (f", from the {table.source}", "dim"))
    return Group(line, *(_notes(unseen) if table.complete else _reasons(unseen)))


def counts(value: Sequence[Count], what: str, foot: RenderableType) -> RenderableType:
    """Draw how many tasks share a name or a queue."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column(what, no_wrap=True, overflow="ellipsis")
    table.add_column("waiting", justify="right", no_wrap=True)
    table.add_column("first due (UTC)", no_wrap=True)
    table.add_column("last due (UTC)", no_wrap=True)
    for count in value:
        table.add_row(
            plain(count.value) or "(no task)",
            f"{count.tasks:,}",
            moment(count.first, zone=False),
            moment(count.last, zone=False),
        )
    return Group(table, foot) if value else foot


def story(value: Story) -> RenderableType:
    """Draw the story of one task."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(no_wrap=True, overflow="ellipsis")
    facts.add_row("task", Text(plain(value.id), style="bold"))
    task = value.task
    if task is not None:
        facts.add_row("called", plain(task.call))
        facts.add_row("for", plain(task.queue))
    if value.asked is not None:
        facts.add_row("asked", human(value.asked) if value.asked else "no delay")
    now = time.time() * 1000
    steps: list[tuple[float, str, str]] = [
        (until, "left", f"{moment(until)}, {queue}") for queue, until in value.levels if until < now
    ]
    for event in value.events:
        words = ["when is not recorded" if event.at is None else moment(event.at)]
        if event.kind == "scheduled" and event.due is not None:
            words.append(f"due {moment(event.due)}")
        if event.left is not None:
            words.append(f"left the ladder {moment(event.left)}")
        if event.retries:
            words.append(f"retry {event.retries}")
        if event.state:
            words.append(event.state)
        at = math.inf if event.at is None else event.at
        steps.append((at, event.kind, ", ".join(words)))
    for _, what, said in sorted(steps, key=itemgetter(0)):
        facts.add_row(plain(what), plain(said))
    if task is not None and value.state in ("waiting", "postponed"):
        facts.add_row("waits in", plain(task.level) if task.level else "a level")
        facts.add_row("leaves", f"{moment(task.due)}, {from_now(task.due)}")
    state = Text(f"It {value.words}", style="bold")
    source = Text(f", by the {value.source}.", style="dim")
    end = Text.assemble(state, source)
    return Group(facts, end, *_lateness(value.late), *_notes(value.unseen))


def _lateness(late: Late | None) -> Iterator[RenderableType]:
    """Draw where lateness arose."""
    if late is None:
        return
    parts = []
    if late.broker is not None:
        parts.append(f"{human(late.broker) if late.broker else 'nothing'} by the broker")
    parts.append(
        f"{human(late.backlog) if late.backlog else 'nothing'} in the backlog of its queue"
    )
    if late.broker is None:
        parts[-1] += ", or by the broker"
    if late.worker is not None:
        parts.append(f"{human(late.worker) if late.worker else 'nothing'} in the worker")
    total = f"It was late by {human(late.total) if late.total else 'less than 1 ms'}"
    yield Text(f"{total}: {'; '.join(parts)}.")


# -- the others ----------------------------------------------------------------------------------


def verification(value: Verification) -> RenderableType:
    """Draw the differences, each with its remedy."""
    head = Text.assemble(
        ("RabbitMQ ", "dim"),
        value.broker,
        ("  virtual host ", "dim"),
        plain(value.vhost),
        ("  ladder ", "dim"),
        value.ladder,
    )
    verdict = (
        Text("sound: nothing that would lose, misplace, hasten or delay a message", style="green")
        if value.sound
        else Text("not sound", style="bold red")
    )
    said: set[str] = set()
    return Group(
        head, *(_difference(difference, said) for difference in value.differences), verdict
    )


def _difference(value: Difference, said: set[str]) -> RenderableType:
    """Draw a difference.

    :param said: commands that were already shown.
    """
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, min_width=7)
    grid.add_column(overflow="fold")
    grid.add_row(
        Text(value.severity, style=_COLOURS[value.severity]),
        Text.assemble((plain(value.what), "bold"), f": {plain(value.found)}"),
    )
    grid.add_row("", Text(plain(value.causes), style="dim"))
    if not value.remedy or value.remedy in said:
        return grid
    words, command = _COMMAND.fullmatch(value.remedy).groups()  # type: ignore[union-attr] # any text
    if words:
        grid.add_row("", hanging("→", words, "cyan"))
    if "rabbitmqctl " in value.remedy:
        said.add(value.remedy)
    if not command:
        return grid
    # In one line, however long: a shell would take a part of it for the whole.
    mark = " " if words else "→"
    line = Text(f"{'':8}{mark} {plain(command)}", style="cyan", no_wrap=True, overflow="ignore")
    return Group(grid, line)


def fixed(value: Creation) -> RenderableType:
    """Draw what was repaired."""
    if value == Creation((), (), (), 0):
        return Text("nothing to mend here that is safe", style="yellow")
    return Group(Text("mended:", style="green"), creation(value))


def creation(value: Creation, *, dry: bool = False) -> RenderableType:
    """Draw what was declared, or would be."""
    stale = f", and {value.removed_bindings:,} removed" if value.removed_bindings else ""
    existing = f"; {len(value.existing):,} exist already" if value.existing else ""
    return Group(
        Text(
            f"{_count(value.exchanges, 'exchange')} and {_count(value.queues, 'queue')} "
            f"{_done(dry, 'made')}{existing}"
        ),
        Text(f"{_count(value.bindings, 'binding')} {_done(dry, 'declared')}{stale}"),
        *_names(value.exchanges, "exchange"),
        *_names(value.queues, "queue"),
        *(hanging("!", OTHER_AGE.format(name), "yellow") for name in value.other_age),
    )


def teardown(value: Teardown, *, dry: bool = False) -> RenderableType:
    """Draw what was removed, or would be."""
    lines: list[RenderableType] = [
        Text(
            f"{_count(value.exchanges, 'exchange')} and {_count(value.queues, 'queue')} "
            f"{_done(dry, 'removed')}"
        ),
    ]
    if not value.exchanges and not value.queues:
        lines.append(Text("nothing of this ladder exists", style="yellow"))
    if value.lost:
        lines.append(
            Text(f"{_count(value.lost, 'message')} {_done(dry, 'lost')}", style="bold red")
        )
    if value.keeps:
        kept = ", ".join(value.keeps)
        lines.append(Text(f"the delivery side stays, for {kept}", style="yellow"))
    if value.journal:
        text = f"the journal {value.journal} stays, and may have arguments of tasks: delete that "
        text += "queue if nobody needs it"
        lines.append(hanging("!", text, "yellow"))
    return Group(*lines, *_names(value.exchanges, "exchange"), *_names(value.queues, "queue"))


def amended(value: Amended, *, dry: bool = False, known: bool = True) -> RenderableType:
    """Draw what was recorded, or would be.

    :param known: whether the tasks are known to exist.
    """
    count = _count(value.ids, "task" if known else "id")
    if value.action == CANCEL:
        head = f"cancellation {_done(dry, 'recorded')} for {count}, kept until "
        head += moment(value.until)
    else:
        head = (
            f"{_done(dry, 'recorded')} for {count}: not before {moment(value.due or 0)}; "
            f"one that is due later keeps its time"
        )
    head += "" if known else " (not checked whether they wait)"
    lines: list[RenderableType] = [
        Text(head if value.ids else "nothing to do", style="green" if value.ids else "yellow")
    ]
    if value.without_id:
        lines.append(hanging("!", f"{value.without_id:,} have no id, and wait on", "yellow"))
    lines += _names(value.ids, "task")
    if value.left:
        lines.append(hanging("!", f"{len(value.left):,} cannot be amended, and wait on:", "yellow"))
    shown = list(value.left.items())[:6]
    lines += (hanging(" ", f"{_cut(name)}: {why}", "yellow") for name, why in shown)
    if len(value.left) > len(shown):
        lines.append(Text(f"  and {len(value.left) - len(shown):,} more, which --json lists"))
    return Group(*lines)


def _cut(name: str) -> str:
    """Return the beginning of an id that may be of any length."""
    return repr(name if len(name) <= 60 else f"{name[:60]}…")


amended_by_id = partial(amended, known=False)


def redriven(value: Redrive) -> RenderableType:
    """Draw the messages that were sent, by destination."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("destination", overflow="fold")
    table.add_column("sent on", justify="right", no_wrap=True)
    table.add_column("still parked", justify="right", no_wrap=True)
    for parked in value.parked:
        stays = Text(f"{parked.stays:,}", style=_left(parked.stays))
        table.add_row(place(parked.destination), f"{parked.sent:,}", stays)
    shown: list[RenderableType] = [table] if table.row_count else []
    shown += _reasons(value.reasons)
    return Group(*(shown or [Text("nothing is parked")]))


def plan(value: Preview, *, dry: bool = True) -> RenderableType:
    """Draw what would be moved."""
    del dry
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("queue", no_wrap=True, overflow="ellipsis")
    table.add_column("to move", justify="right", no_wrap=True)
    for name, count in value.queues:
        if count:
            table.add_row(plain(name), f"{count:,}")
    table.add_row(Text("together", style="bold"), Text(f"{value.messages:,}", style="bold"))
    return Group(table, *_reasons(value.reasons))


def migration(value: Migration) -> RenderableType:
    """Draw what was moved."""
    rate = f", {value.moved / value.seconds:,.0f} a second" if value.moved > 1000 else ""
    lines: list[RenderableType] = [
        Text(
            f"{plural(value.moved, 'message')} moved in {value.seconds:.1f} s{rate}", style="green"
        )
    ]
    if value.kept:
        lines.append(Text(f"{value.kept:,} stay: they do not wait for a time that is to come"))
    if value.poison:
        lines.append(
            Text(f"{value.poison:,} could not be read: see the queue {value.poison_queue}", "red")
        )
    if value.left:
        lines.append(Text(f"{value.left:,} could not be moved, and wait where they were", "red"))
    return Group(*lines, *_reasons(value.reasons))


def _reasons(reasons: Iterable[str]) -> list[RenderableType]:
    return [hanging("!", reason, "yellow") for reason in reasons]


def _left(count: int) -> str:
    return "red" if count else "dim"


def pruning(value: Pruning, *, dry: bool = False) -> RenderableType:
    """Draw what was pruned, or would be."""
    kept = f"; in use, and kept: {_count(value.kept, 'queue')}" if value.kept else ""
    return Group(
        Text(
            f"{_count(value.removed, 'queue')} and {_count(value.exchanges, 'exchange')} "
            f"{_done(dry, 'removed')}{kept}"
        ),
        *_names(value.removed, "queue"),
        *_names(value.exchanges, "exchange"),
    )


def dry(drawn: RenderableType) -> RenderableType:
    """Return what was drawn, below a line that says that nothing was changed."""
    return Group(Text("dry run: nothing was changed", style="yellow"), drawn)


def _notes(sentences: Iterable[str]) -> list[RenderableType]:
    """Draw notes in one line, when nothing is wrong."""
    text = "; ".join(map(plain, sentences))
    return [hanging("note:", text, "dim")] if text else []


def _count(of: int | Sequence[str], what: str) -> str:
    return plural(of if isinstance(of, int) else len(of), what)


def _done(dry: bool, what: str) -> str:
    return f"would be {what}" if dry else what


def _names(names: Sequence[str], kind: str) -> Iterable[Text]:
    for name in names[:6]:
        yield Text(f"  {kind} {plain(name)}", style="dim")
    if len(names) > 6:
        yield Text(f"  and {len(names) - 6:,} more, which --json lists", style="dim")
