"""``explain``: the route of one message, or the story of one task."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import click

from kombu_binary_delay import operate
from kombu_binary_delay.ladder.address import Destination

from . import sources
from .command import FOUND, OK, Printer, ladder, subcommand
from .connect import Target
from .sources import choose
from .values import DelayOrId, Place


@click.command(
    short_help="Show a message's way, or the story of a task.",
    help="""Show which way a delayed message takes, or what became of one task.

    For a DELAY such as 500ms, 10s, 1h30m or 2d, or a time such as 2030-01-31T12:00+00:00: its bits,
    the routing key, each queue in which the message waits and for how long, and when it is due.
    That needs no broker.

    For the id of a task: when it was scheduled, where it waits, when it leaves, and what has
    become of it, as far as the journal or the node knows. Ends with 1 if they know nothing. Give
    an id that is no UUID with --task.

    \b
      kombu-binary-delay explain 10s --to orders
      kombu-binary-delay explain 1h30m --to events:order.paid
      kombu-binary-delay --radix 2 explain 10s
      kombu-binary-delay explain 2f1c3a52-5b0d-4a37-b2a5-3f6c44a7f0a1
    """,
)
@click.argument("delay", type=DelayOrId(), required=False)
@click.option(
    "--to",
    "destination",
    type=Place(),
    default="mail",
    show_default=True,
    help="Where the message goes: a queue, or exchange:key.",
)
@click.option("--task", metavar="ID", help="The id of a task, whatever it looks like.")
@ladder
@choose
@subcommand
def explain(
    broker: Target,
    printer: Printer,
    delay: float | str | None,
    destination: Destination,
    task: str | None,
    ladder: str | None,
    source: str | None,
    node_command: str | None,
) -> int:
    """Show which way a delayed message takes, or what became of one task."""
    if (delay is None) == (task is None):
        raise click.UsageError("give a delay, or the id of a task")
    if task is None and not isinstance(delay, str) and delay is not None:
        topology = broker.topology(ladder)
        now = time.time_ns() // 1_000_000
        settings = broker.settings if ladder is None else None
        explanation = operate.explain(topology, delay, destination, now, settings=settings)
        printer.show(explanation, "explanation")
        return OK
    with ExitStack() as stack:
        tasks = sources.TaskSource.of(broker, stack, source, node_command)
        story = tasks.story(task or str(delay))
    more: dict[str, Any] = {}
    if story.task is not None:
        more["task"] = sources.words_of(story.task)
    printer.show(story, "story", **more)
    return FOUND if story.state == "unknown" else OK
