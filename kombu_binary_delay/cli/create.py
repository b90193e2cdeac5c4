"""``create``: declare the ladder ahead of its first message."""

from __future__ import annotations

from functools import partial

import click

from kombu_binary_delay import operate

from .command import Printer, dry_run, queues_of_yours, subcommand
from .connect import Target


@click.command(
    short_help="Make the ladder ahead of its first message.",
    help="""Make the whole ladder, with all it needs, ahead of its first message.

    Programs make what they need by themselves, when they first need it. Use this if they may not
    (the setting declare is 'never'), or if the ladder is to be there before the first message.

    It makes all levels, the exchanges and queues that lead on to yours, and the streams for
    cancellations and for the journal. What exists stays as it is. It also corrects what leads to
    your queues: bindings that were made or removed without the transport, and queues that refuse
    messages and have no relay.

    \b
      kombu-binary-delay create
      kombu-binary-delay create --queue mail --exchange events
      kombu-binary-delay -A shop create --dry-run
    """,
)
@queues_of_yours
@click.option(
    "--exchange",
    "exchanges",
    multiple=True,
    metavar="NAME",
    help="Lead to this exchange of yours, too, and to the queues that are bound to it now; may be "
    "repeated.",
)
@dry_run
@partial(subcommand, management=True)
def create(
    broker: Target,
    printer: Printer,
    queues: tuple[str, ...],
    exchanges: tuple[str, ...],
    dry_run: bool,
) -> None:
    """Make the whole ladder, with all it needs, ahead of its first message."""
    with broker.plain() as connection:
        lanes = broker.lanes(connection, ahead=True)
        topology, part = lanes[0], broker.part(lanes)
        part = sum(broker.streams(connection).values(), part)
        repair = operate.Repair()
        try:
            snapshot = operate.Snapshot.read(broker.management(connection))
        except operate.UnreachableError as exc:
            if queues or exchanges:
                raise
            printer.log(f"the ways to queues and exchanges were not looked at: {exc}")
        else:
            relays = broker.settings.relays
            part += operate.ways(topology, snapshot, queues, exchanges, relays)
            repair = operate.repair(topology, snapshot, relays)
        made = operate.create(
            connection, topology, part + repair.missing, repair.stale, dry_run=dry_run
        )
    printer.show(made, "creation", dry=dry_run)
