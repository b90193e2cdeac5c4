"""``create``: make the ladder ahead of its first message."""

from __future__ import annotations

import click

from kombu_binary_delay import admin
from kombu_binary_delay.journal import stream_part

from .command import Printer, dry_run, subcommand
from .connect import Target


@click.command(
    help="""Make every level, the delivery side, and the streams of amendments and the journal.

    Applications make what they need by themselves; this is for those that may not
    (declare: never), and for a ladder that is to exist before the first message.
    Mends what verify finds between the ladder and your queues: bindings that were made
    or removed without the transport, and queues that refuse messages and have no relay.

    \b
      kombu-binary-delay create
      kombu-binary-delay create --queue mail --exchange events
      kombu-binary-delay -A shop create --dry-run
    """
)
@click.option("--queue", "queues", multiple=True, metavar="NAME", help="Lead to this queue, too.")
@click.option(
    "--exchange",
    "exchanges",
    multiple=True,
    metavar="NAME",
    help="Lead to this exchange, too, as its queues are bound now.",
)
@dry_run
@subcommand
def create(
    broker: Target,
    printer: Printer,
    queues: tuple[str, ...],
    exchanges: tuple[str, ...],
    dry_run: bool,
) -> None:
    """Make every level, the delivery side, and the streams of amendments and the journal."""
    with broker.plain() as connection:
        lanes = broker.lanes(connection, ahead=True)
        topology, part = lanes[0], broker.part(lanes)
        server = connection.connection.server_properties
        part += stream_part(broker.settings, server) + broker.amendments(server)
        repair = admin.Repair()
        try:
            snapshot = admin.Snapshot.read(broker.management(connection))
        except admin.UnreachableError as exc:
            if queues or exchanges:
                raise
            printer.log(f"the ways to queues and exchanges were not looked at: {exc}")
        else:
            relays = broker.settings.relays
            part += admin.ways(topology, snapshot, queues, exchanges, relays)
            repair = admin.repair(topology, snapshot, relays)
        made = admin.create(
            connection, topology, part + repair.missing, repair.stale, dry_run=dry_run
        )
    printer.show(made, "creation", dry=dry_run)
