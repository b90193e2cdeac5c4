"""``explain``: the way of one message."""

from __future__ import annotations

import time

import click

from kombu_binary_delay import admin
from kombu_binary_delay.model.address import Destination

from .command import Printer, ladder, subcommand
from .connect import Target
from .values import Delay, Place


@click.command(
    help="""Show the way of one message: bits, routing key, each queue and wait, the due time.

    DELAY is 500ms, 10s, 1h30m, 2d, or a time such as 2030-01-31T12:00+00:00. Needs no broker.

    \b
      kombu-binary-delay explain 10s --to orders
      kombu-binary-delay explain 1h30m --to events:order.paid
      kombu-binary-delay --radix 2 explain 10s
    """
)
@click.argument("delay", type=Delay())
@click.option(
    "--to",
    "destination",
    type=Place(),
    default="mail",
    show_default=True,
    help="A queue, or exchange:key.",
)
@ladder
@subcommand
def explain(
    broker: Target, printer: Printer, delay: float, destination: Destination, ladder: str | None
) -> None:
    """Show the way of one message: bits, routing key, each queue with its wait, the due time."""
    topology = broker.topology(ladder=ladder)
    now = time.time_ns() // 1_000_000
    settings = broker.settings if ladder is None else None
    explanation = admin.explain(topology, delay, destination, now, settings=settings)
    printer.show(explanation, "explanation")
