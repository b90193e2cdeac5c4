"""``teardown``: remove a ladder."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from kombu_binary_delay import operate
from kombu_binary_delay.amendments.parts import IDS, KEYS, stream_name
from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.operate.text import plural

from .command import Printer, dry_run, ladder, subcommand
from .command import yes as no_question
from .connect import Target


@click.command(
    short_help="Remove a ladder.",
    help="""Remove a ladder, and the delivery side with it if no other ladder leads there.

    Stop the programs that delay on it first. It refuses while messages wait, with exit status 3.
    It says what goes, and asks before it acts; without a terminal, give --yes. A cancelled task
    waits until it is due, too: --force removes it with the rest.

    The delivery side is what leads from the ladders of a namespace to your queues; the ladder of
    the settings needs it even before its first message. With the last ladder, the streams of
    cancellations go, too: a task that was cancelled, and is in a queue of yours already, then
    runs. They stay if the setting foreign_ladder puts your programs on another system's ladder.
    The journal always stays, with the arguments of tasks in it.

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
@partial(subcommand, management=True)
def teardown(
    broker: Target, printer: Printer, ladder: str | None, force: bool, yes: bool, dry_run: bool
) -> None:
    """Remove a ladder, and the delivery side with it if no other ladder leads there."""
    with broker.plain() as connection:
        going, in_use = _chosen(broker, connection, ladder)
        settings = broker.settings
        act = partial(
            operate.teardown,
            connection,
            broker.management(connection),
            in_use=in_use,
            amended=[settings.namespace] if settings.foreign_ladder and settings.amendments else [],
            force=force,
            notify=printer.log,
        )
        # What cannot be removed is refused before the user is asked, and before anything goes.
        planned = [act(lane, gone=going[:n], dry_run=True) for n, lane in enumerate(going)]
        exist = [n for n, part in enumerate(planned) if part.exchanges or part.queues]
        if exist and not dry_run:
            names = [going[n].prefix for n in exist]
            printer.confirm(_question(going, names, connection, planned), yes=yes)
        for n, lane in enumerate(going):
            removed = planned[n] if dry_run or n not in exist else act(lane)
            printer.show(removed, "teardown", dry=dry_run)


def _chosen(
    broker: Target, connection: Any, ladder: str | None
) -> tuple[list[Topology], list[Topology]]:
    """Return the ladders to remove, and those that stay in use."""
    going = broker.lanes(connection, ladder)
    if ladder is None:
        return going, []
    in_use = [lane for lane in broker.lanes(connection) if lane != going[0]]
    if all(lane.urgent for lane in in_use):
        # The one for urgent messages goes with the last that fills it.
        in_use = []
    return [lane for lane in going if lane not in in_use], in_use


def _question(
    going: list[Topology], names: list[str], connection: Any, planned: list[operate.Teardown]
) -> str:
    lost = sum(removed.lost for removed in planned)
    parts = [
        plural(sum(len(removed.exchanges) for removed in planned), "exchange"),
        plural(sum(len(removed.queues) for removed in planned), "queue"),
    ]
    streams = {stream_name(lane.namespace, key) for lane in going for key in (IDS, KEYS)}
    forgets = any(not streams.isdisjoint(removed.queues) for removed in planned)
    return (
        f"remove the ladder{'s' if len(names) > 1 else ''} {', '.join(names)} in the virtual host "
        f"{connection.virtual_host or '/'}: {' and '.join(parts)}"
        + (f", with {plural(lost, 'message')} in them" if lost else "")
        + (", and what was cancelled or rescheduled is forgotten" if forgets else "")
    )
