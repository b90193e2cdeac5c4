"""``tasks``: the delayed tasks, one by one."""

from __future__ import annotations

import dataclasses
import json
import time
from contextlib import ExitStack, suppress
from typing import Any

import click

from kombu_binary_delay import operate
from kombu_binary_delay.operate.waiting import COUNTED

from .command import FOUND, OK, Printer, subcommand
from .connect import Target
from .sources import TaskSource, choose, words_of
from .values import Moment, Seconds


@click.command(
    short_help="List the tasks that wait.",
    help="""List the tasks that wait, those due first before the others.

    It reads the journal, which has what was published with the setting journal, or the node, which
    has everything, and needs rabbitmqctl on the broker's host. The output says which it was, and
    what is not in it. It takes no message from a queue, and changes none.

    WHEN is a time from now, such as 10m or 2d, or a time such as 2030-01-31T12:00+00:00. A PATTERN
    is as in a shell: * and ? and [abc]. A destination that is no queue is written exchange:key.
    Ends with 1 if a part of what waits could not be read.

    \b
      kombu-binary-delay tasks
      kombu-binary-delay tasks --name 'shop.*' --due-before 1h
      kombu-binary-delay tasks --count-by name
      kombu-binary-delay tasks --node-command 'docker exec rabbit' --json
      kombu-binary-delay tasks --id 2f1c3a52-5b0d-4a37-b2a5-3f6c44a7f0a1
    """,
)
@click.option("--name", metavar="PATTERN", help="Only tasks with such a name.")
@click.option("--queue", metavar="PATTERN", help="Only those for such a queue.")
@click.option(
    "--id", "ids", metavar="ID", multiple=True, help="Only the task with this id; may be repeated."
)
@click.option("--due-after", type=Moment(), metavar="WHEN", help="Only those due then or later.")
@click.option("--due-before", type=Moment(), metavar="WHEN", help="Only those due before.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    help="How many to show, those due first; 0 shows all.",
)
@click.option(
    "--count-by", type=click.Choice(COUNTED), help="Count them by name or queue, and list none."
)
@click.option("--watch", is_flag=True, help="Look again and again, until Ctrl-C.")
@click.option(
    "--every",
    type=Seconds(min=0.5),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to pause between two looks.",
)
@choose
@subcommand
def tasks(
    broker: Target,
    printer: Printer,
    name: str | None,
    queue: str | None,
    ids: tuple[str, ...],
    due_after: int | None,
    due_before: int | None,
    limit: int,
    count_by: str | None,
    watch: bool,
    every: float,
    source: str | None,
    node_command: str | None,
) -> int:
    """List the tasks that wait."""
    select = operate.Selection(name, queue, frozenset(ids), due_after, due_before)
    if watch and not limit and count_by is None:
        raise click.UsageError("--watch needs a --limit above 0, or --count-by")
    with ExitStack() as stack:
        waiting = TaskSource.of(broker, stack, source, node_command)

        def view() -> _View:
            return _View(waiting.tasks(), select, limit, count_by)

        if watch:
            # The user ends it with Ctrl-C.
            with suppress(KeyboardInterrupt):
                _watch(printer, view, every)
            return OK
        shown = view()
    if printer.as_json:
        shown.print_json()
    else:
        shown.print()
    return OK if shown.table.complete else FOUND


@dataclasses.dataclass(frozen=True)
class _View:
    """What was asked for, of the tasks that were read."""

    table: operate.TaskTable
    select: operate.Selection
    limit: int
    count_by: str | None

    def print_json(self) -> None:
        """Print one JSON object, task by task, so that only one of them is in memory."""
        head = json.dumps({"source": self.table.source})[:-1]
        foot = json.dumps(
            {
                "matched": self.table.count(self.select),
                "complete": self.table.complete,
                "unseen": self.table.unseen(self.select),
            }
        )[1:]
        if self.count_by is not None:
            counts = self.table.count_by(self.count_by, self.select)
            listed = json.dumps([dataclasses.asdict(count) for count in counts])
            click.echo(f'{head}, "count_by": "{self.count_by}", "counts": {listed}, {foot}')
            return
        click.echo(f'{head}, "tasks": [', nl=False)
        for place, task in enumerate(self.table.tasks(self.select, self.limit or -1)):
            click.echo(f"{', ' * (place > 0)}{json.dumps(words_of(task))}", nl=False)
        click.echo(f"], {foot}")

    def print(self) -> None:
        """Print it for a terminal; all tasks one by one."""
        from . import output  # noqa: PLC0415 - Rich comes with the extra `cli`

        console = output.console()
        if self.limit or self.count_by is not None:
            console.print(self.drawn(self.limit))
            return
        for task in self.table.tasks(self.select):
            console.print(*output.task_lines([task], console.width), sep="\n")
        count = self.table.count(self.select)
        console.print(output.task_foot(self.table, self.select, count))

    def drawn(self, limit: int) -> Any:
        """Return what to draw; no more than ``limit`` tasks."""
        from . import output  # noqa: PLC0415 - Rich comes with the extra `cli`

        if self.count_by is not None:
            counts = self.table.count_by(self.count_by, self.select)
            foot = output.task_foot(self.table, self.select, self.table.count(self.select))
            return output.counts(counts, self.count_by, foot)
        listed = list(self.table.tasks(self.select, limit))
        return output.tasks(listed, output.task_foot(self.table, self.select, len(listed)))


def _watch(printer: Printer, view: Any, every: float) -> None:
    if printer.as_json:
        while True:
            view().print_json()
            time.sleep(every)
    from . import output  # noqa: PLC0415 - Rich comes with the extra `cli`

    on = output.console()

    def draw() -> Any:
        shown = view()
        # The note on what is not included comes last, and must be visible.
        fits = max(output.tasks_that_fit(on), 1) if on.is_interactive else shown.limit
        return output.cropped([], [shown.drawn(min(shown.limit, fits))], on)

    output.watch(draw, every)
