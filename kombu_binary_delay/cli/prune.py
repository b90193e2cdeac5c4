"""``prune``: remove idle queues that each serve one delay."""

from __future__ import annotations

import click

from kombu_binary_delay import admin

from .command import Out, dry_run, verb
from .connect import Target


@click.command()
@dry_run
@verb
def prune(broker: Target, out: Out, dry_run: bool) -> None:
    """Remove queues that each serve one delay, where they are empty.

    They come with the setting queue_per_delay. A delay whose queue is gone walks down the levels.

    \b
      kombu-binary-delay prune --dry-run
      kombu-binary-delay -A shop prune
    """
    with broker.plain() as connection:
        for lane in broker.lanes(connection):
            pruned = admin.prune(
                connection, broker.management(connection), lane, dry_run=dry_run, notify=out.say
            )
            out.show(pruned, "pruning", dry=dry_run)
