"""``tasks``: the delayed tasks, one by one."""

from __future__ import annotations

import dataclasses
import json
import time
from contextlib import ExitStack, suppress
from itertools import chain
from typing import Any

import click

from kombu_binary_delay import operate
from kombu_binary_delay.operate.waiting import COUNTED

from .command import FOUND, OK, Printer, subcommand
from .connect import Target
from .sources import Place, choose, words_of
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
    help="How many to show, those due first; 0 shows all, in no order.",
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
        place = Place.of(broker, stack, source, node_command)

        def look() -> operate.Waiters:
            return place.waiters(select)

        if watch:
            # The user ends it with Ctrl-C.
            with suppress(KeyboardInterrupt):
                _watch(printer, look, limit, count_by, every)
            return OK
        found = look()
        if printer.as_json:
            _print_json(found, limit, count_by)
        else:
            _print(found, limit, count_by)
        return OK if found.complete else FOUND


def _print_json(found: operate.Waiters, limit: int, count_by: str | None) -> None:
    """Print one JSON object, task by task, so that only one of them is in memory."""
    passed = operate.Tally(found)
    head = json.dumps({"source": found.source})[:-1]
    if count_by is not None:
        counts = [dataclasses.asdict(each) for each in operate.count_by(passed, count_by)]
        body = f'"count_by": "{count_by}", "counts": {json.dumps(counts)}'
        click.echo(f"{head}, {body}, {_foot(passed, found)}}}")
        return
    listed = iter(operate.earliest(passed, limit) if limit else passed)
    # Before anything is printed: an error is an object of its own.
    first = next(listed, None)
    click.echo(f'{head}, "tasks": [', nl=False)
    try:
        for task in chain([first] if first else [], listed):
            comma = ", " * (task is not first)
            click.echo(f"{comma}{json.dumps(words_of(task))}", nl=False)
    except BaseException:
        click.echo('], "complete": false}')
        raise
    click.echo(f"], {_foot(passed, found)}}}")


def _foot(passed: operate.Tally, found: operate.Waiters) -> str:
    return json.dumps(
        {"matched": passed.count, "complete": found.complete, "unseen": found.unseen()}
    )[1:-1]


def _print(found: operate.Waiters, limit: int, count_by: str | None) -> None:
    from . import output  # noqa: PLC0415 - Rich comes with the extra `cli`

    console = output.console()
    if count_by is None and not limit:
        passed = operate.Tally(found)
        for task in passed:
            console.print(*output.task_lines([task], console.width), sep="\n")
        console.print(output.task_foot(found, passed.count, passed.count))
        return
    console.print(_drawn(found, limit, count_by))


def _drawn(found: operate.Waiters, limit: int, count_by: str | None) -> Any:
    from . import output  # noqa: PLC0415 - Rich comes with the extra `cli`

    passed = operate.Tally(found)
    if count_by is not None:
        counts = operate.count_by(passed, count_by)
        return output.counts(counts, count_by, output.task_foot(found, passed.count, passed.count))
    listed = operate.earliest(passed, limit)
    return output.tasks(listed, output.task_foot(found, len(listed), passed.count))


def _watch(printer: Printer, look: Any, limit: int, count_by: str | None, every: float) -> None:
    if printer.as_json:
        while True:
            _print_json(look(), limit, count_by)
            time.sleep(every)
    from . import output  # noqa: PLC0415 - Rich comes with the extra `cli`

    on = output.console()

    def draw() -> Any:
        # The note on what is not included comes last, and must be visible.
        fits = max(output.tasks_that_fit(on), 1) if on.is_interactive else limit
        return output.cropped([], [_drawn(look(), min(limit, fits), count_by)], on)

    output.watch(draw, every)
