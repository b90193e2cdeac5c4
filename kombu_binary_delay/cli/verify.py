"""``verify``: compare the broker with the topology."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import click

from .command import FOUND, OK, Printer, ladder, subcommand
from .connect import Target


@click.command(
    short_help="Compare the broker with what should be there.",
    help="""Compare the broker with what should be there, and say what to do about each difference.

    Looks at exchanges, queues and bindings of the ladder; bindings of your exchanges that delayed
    messages do not follow; queues that could hold up others; the streams of amendments; the
    broker's release, and its known defects; policies and limits that would break the ladder; and
    permissions.

    Below each difference stands what it causes, and behind an arrow what to do. --fix does what is
    safe: it makes what is missing, as 'create' does, and corrects the bindings that lead to your
    queues. It deletes no exchange and no queue, changes none, and moves no message. Then it
    compares again: what is left is for you to do.

    \b
    Ends with
      0  if all is well, or there are only notes
      1  for an error or a warning; with --fix, for one that is left
      2  where it cannot be done as asked, such as without a permission to declare
      4  if the broker or its management API does not answer, or refuses the user

    \b
      kombu-binary-delay verify
      kombu-binary-delay -A shop verify --fix
      kombu-binary-delay verify --json
      kombu-binary-delay verify --user shop
    """,
)
@click.option("--fix", is_flag=True, help="Make what is missing; see above.")
@click.option(
    "--user", metavar="NAME", help="Whose permissions to look at.  [default: this user's]"
)
@ladder
@partial(subcommand, management=True)
def verify(
    broker: Target, printer: Printer, fix: bool, user: str | None, ladder: str | None
) -> int:
    """Compare the broker with what should be there, and say what to do about each difference."""
    more: dict[str, Any] = {}
    with broker.plain() as connection:
        if fix:
            mended = broker.fix(connection, ladder)
            if printer.as_json:
                more["fixed"] = asdict(mended)
            else:
                printer.show(mended, "fixed")
        compared = broker.verify(connection, ladder, user=user)
    for verification in compared:
        printer.show(verification, "verification", sound=verification.sound, **more)
        more = {}
    return OK if all(verification.sound for verification in compared) else FOUND
