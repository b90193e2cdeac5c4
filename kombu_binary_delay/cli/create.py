"""``create``: make the ladder ahead of its first message."""

from __future__ import annotations

import click

from kombu_binary_delay import admin
from kombu_binary_delay.journal import stream_part

from .command import Out, dry_run, verb
from .connect import Target


@click.command()
@click.option("--queue", "queues", multiple=True, metavar="NAME", help="Lead to this queue, too.")
@click.option(
    "--exchange",
    "exchanges",
    multiple=True,
    metavar="NAME",
    help="Lead to this exchange, too, as its queues are bound now.",
)
@dry_run
@verb
def create(
    broker: Target,
    out: Out,
    queues: tuple[str, ...],
    exchanges: tuple[str, ...],
    dry_run: bool,
) -> None:
    """Make every level, the delivery side and the parking queue, and a journal's stream.

    Applications make what they need by themselves; this is for those that may not
    (declare: never), and for a ladder that is to stand before the first message.

    \b
      kombu-binary-delay create
      kombu-binary-delay create --queue mail --exchange events
      kombu-binary-delay -A shop create --dry-run
    """
    with broker.plain() as connection:
        lanes = broker.lanes(connection, ahead=True)
        topology, part = lanes[0], broker.part(lanes)
        part += stream_part(broker.settings, connection.connection.server_properties)
        if queues or exchanges:
            snapshot = admin.Snapshot.read(broker.management(connection))
            part += admin.ways(topology, snapshot, queues, exchanges, broker.settings.relays)
        made = admin.create(connection, topology, part, dry_run=dry_run)
    out.show(made, "creation", dry=dry_run)
