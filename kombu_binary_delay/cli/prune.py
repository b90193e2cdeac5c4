"""``prune``: remove idle queues that each serve one delay, and what leads to nothing."""

from __future__ import annotations

from functools import partial

import click

from kombu_binary_delay import operate

from .command import Printer, dry_run, subcommand
from .connect import Target


@click.command(
    short_help="Remove idle queues, and what leads to nothing.",
    help="""Remove queues that each serve one delay, and what leads to nothing, where empty.

    Queues for one delay come with the setting queue_per_delay. Messages of a delay without such a
    queue take the levels. The rest are mirrors and relays of exchanges and queues that are gone,
    such as auto-delete ones. Whatever is needed again is made again.

    \b
      kombu-binary-delay prune --dry-run
      kombu-binary-delay -A shop prune
    """,
)
@dry_run
@partial(subcommand, management=True)
def prune(broker: Target, printer: Printer, dry_run: bool) -> None:
    """Remove queues that each serve one delay, and what leads to nothing, where they are empty."""
    with broker.plain() as connection:
        lanes = broker.lanes(connection)
        for lane in lanes:
            pruned = operate.prune(
                connection,
                broker.management(connection),
                lane,
                delivery_side=lane is lanes[0],
                dry_run=dry_run,
                notify=printer.log,
            )
            printer.show(pruned, "pruning", dry=dry_run)
