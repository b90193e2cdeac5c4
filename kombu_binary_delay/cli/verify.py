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
        found = ops.verify(
            site.management(connection),
            site.topology(connection, ladder),
            declares=site.settings.declare != "never",
            user=user,
        )
    out.show(found, "verification", sound=found.sound)
    return OK if found.sound else FOUND
