"""``teardown``: remove a ladder."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from kombu_binary_delay import admin

from .command import Printer, dry_run, ladder, subcommand
from .command import yes as no_question
from .connect import Target


@click.command(
    short_help="Remove a ladder.",
    help="""Remove a ladder, and the delivery side with it if no other ladder leads there.

    Stop the programs that delay on it first. It refuses while messages wait, with exit status 3.
    On a terminal, it says what goes, and asks before it acts.

    The delivery side is what leads from the ladders of a namespace to your queues; the ladder of
    the settings needs it even before its first message. With the last ladder, the streams of
    cancellations go, too: a task that was cancelled, and is in a queue of yours already, then
    runs.

    \b
      kombu-binary-delay teardown --dry-run
      kombu-binary-delay teardown --ladder 250ms-2x30
      kombu-binary-delay teardown --ladder celery
    """,
)
@ladder
@click.option("--force", is_flag=True, help="Remove it though messages wait. They are lost.")
@no_question
@dry_run
@subcommand
def teardown(
    broker: Target, printer: Printer, ladder: str | None, force: bool, yes: bool, dry_run: bool
) -> None:
    """Remove a ladder, and the delivery side with it if no other ladder leads there."""
    with broker.plain() as connection:
        going = broker.lanes(connection, ladder)
        settings = [] if ladder is None else broker.lanes(connection)
        in_use = [each for each in settings if each not in going]
        for lane in going:
            act = partial(
                admin.teardown,
                connection,
                broker.management(connection),
                lane,
                in_use=in_use,
                force=force,
                notify=printer.log,
            )
            # A ladder that cannot be removed is refused before the user is asked.
            removed = act(dry_run=True)
            if not dry_run and (removed.exchanges or removed.queues):
                printer.confirm(_question(lane.prefix, connection, removed), yes=yes)
                removed = act()
            printer.show(removed, "teardown", dry=dry_run)


def _question(ladder: str, connection: Any, planned: admin.Teardown) -> str:
    lost = f", with {planned.lost:,} messages that wait" if planned.lost else ""
    return (
        f"remove the ladder {ladder} in the virtual host {connection.virtual_host or '/'}: "
        f"{len(planned.exchanges):,} exchanges and {len(planned.queues):,} queues{lost}"
    )
