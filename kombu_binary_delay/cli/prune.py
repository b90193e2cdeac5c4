"""``prune``: remove idle queues that each serve one delay."""

from __future__ import annotations

import click

from kombu_binary_delay import ops

from .site import Site
from .verb import Out, dry_run, verb


@click.command()
@dry_run
@verb
def prune(site: Site, out: Out, dry_run: bool) -> None:
    """Remove queues that each serve one delay, where they are empty.

    They come with the setting queue_per_delay. A delay whose queue is gone walks down the levels.

    \b
      kombu-binary-delay prune --dry-run
      kombu-binary-delay -A shop prune
    """
    with site.plain() as connection:
        for lane in site.lanes(connection):
            pruned = ops.prune(
                connection, site.management(connection), lane, dry_run=dry_run, say=out.say
            )
            out.show(pruned, "pruning", dry=dry_run)
