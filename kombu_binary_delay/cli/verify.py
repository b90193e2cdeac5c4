"""``verify``: compare the broker with the topology."""

from __future__ import annotations

import click

from kombu_binary_delay import admin
from kombu_binary_delay.model.parts import Part

from .command import FOUND, OK, Printer, ladder, subcommand
from .connect import Target


@click.command(
    help="""Compare the broker with the topology, and say what each difference causes.

    Looks at exchanges, queues, bindings, those of your exchanges that are not repeated for delayed
    messages or are no more, queues that could hold up others, the streams of
    amendments, the broker's version, policies that would break the ladder, and permissions. Ends
    with 1 where it finds an error or a warning, or nothing of the ladder that you name.

    \b
      kombu-binary-delay verify
      kombu-binary-delay -A shop verify --json
      kombu-binary-delay verify --user shop
    """
)
@click.option("--user", metavar="NAME", help="Whose permissions to look at; else one's own.")
@ladder
@subcommand
def verify(broker: Target, printer: Printer, user: str | None, ladder: str | None) -> int:
    """Compare what exists on the broker with the topology, and say what each difference causes."""
    with broker.plain() as connection:
        never = broker.settings.declare == "never"
        lanes = broker.lanes(connection, ladder, ahead=never)
        amendments = broker.amendments(connection.connection.server_properties)
        found = [
            admin.verify(
                broker.management(connection),
                each,
                declares=broker.settings.declare != "never",
                user=user,
                relays=broker.settings.relays,
                must_exist=ladder is not None,
                # They belong to all lanes.
                amendments=amendments if each is lanes[0] else Part(),
            )
            for each in lanes
        ]
    for each in found:
        printer.show(each, "verification", sound=each.sound)
    return OK if all(each.sound for each in found) else FOUND
