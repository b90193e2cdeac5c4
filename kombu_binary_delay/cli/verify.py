"""``verify``: compare the broker with the topology."""

from __future__ import annotations

import click

from kombu_binary_delay import ops

from .site import Site
from .verb import FOUND, OK, Out, ladder, verb


@click.command()
@click.option("--user", metavar="NAME", help="Whose permissions to look at; else one's own.")
@ladder
@verb
def verify(site: Site, out: Out, user: str | None, ladder: str | None) -> int:
    """Compare what stands on the broker with the topology, and say what each difference causes.

    Looks at exchanges, queues, bindings, the broker's version, policies that would break the
    ladder, and permissions. Ends with 1 where it finds an error or a warning.

    \b
      kombu-binary-delay verify
      kombu-binary-delay -A shop verify --json
      kombu-binary-delay verify --user shop
    """
    with site.plain() as connection:
        never = site.settings.declare == "never"
        lanes = site.lanes(connection, ladder, ahead=never)
        found = [
            ops.verify(
                site.management(connection),
                each,
                declares=site.settings.declare != "never",
                user=user,
            )
            for each in lanes
        ]
    for each in found:
        out.show(each, "verification", sound=each.sound)
    return OK if all(each.sound for each in found) else FOUND
