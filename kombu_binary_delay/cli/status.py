"""``status``: what waits, what is parked, what is stuck."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import Any

import click

from kombu_binary_delay import admin

from .command import FOUND, OK, Printer, ladder, subcommand
from .connect import Target

_HISTORY = 60  # looks


@click.command(
    help="""Show what waits, level by level, when it leaves, and what is parked or stuck.

    Every ladder of the namespace is shown, and how many ids and keys have amendments that count:
    these are read, and a record that amends nothing is appended, to measure their lag. The broker's
    figures, but for what waits, are up to ten seconds old. Ends with 1 where something is parked or
    stuck. With --watch --json, prints one line of JSON a look.

    \b
      kombu-binary-delay status
      kombu-binary-delay -A shop status --watch
      kombu-binary-delay status --json
    """
)
@click.option("--watch", is_flag=True, help="Look again and again, until Ctrl-C.")
@click.option(
    "--every", type=click.FloatRange(min=0.5), default=2.0, show_default=True, metavar="SECONDS"
)
@ladder
@subcommand
def status(broker: Target, printer: Printer, watch: bool, every: float, ladder: str | None) -> int:
    """Show what waits, level by level, when it leaves, and what is parked or stuck."""
    # It connects where there are amendments to be read.
    with broker.plain() as connection, broker.delaying() as amending:
        management = broker.management(connection)
        topology = broker.topology(connection, ladder)
        lanes = [each.prefix for each in broker.lanes(connection, ladder)]

        def look() -> admin.Status:
            return admin.status(
                connection,
                management,
                topology,
                lanes,
                amending if broker.settings.amendments else None,
            )

        if watch:
            # Ctrl-C is how it ends.
            with suppress(KeyboardInterrupt):
                if printer.as_json:
                    while True:
                        printer.show(look(), "status")
                        time.sleep(every)
                _watch(look, every)
            return OK
        found = look()
    if ladder is not None and not any(each.current for each in found.ladders):
        raise admin.OperationError(f"nothing of the ladder {ladder} exists in this virtual host")
    printer.show(found, "status")
    return FOUND if found.troubles else OK


def _watch(look: Any, every: float) -> None:
    from rich.console import Group  # noqa: PLC0415 - Rich comes with the extra `cli`
    from rich.live import Live  # noqa: PLC0415 - see above

    from . import output  # noqa: PLC0415 - see above

    history: deque[tuple[float, float]] = deque(maxlen=_HISTORY)
    with Live(console=output.console(), auto_refresh=False, screen=False) as live:
        while True:
            found = look()
            ladders = found.ladders
            history.append(
                (sum(each.rate_in for each in ladders), sum(each.rate_out for each in ladders))
            )
            live.update(Group(output.status(found), output.rates(history)), refresh=True)
            time.sleep(every)
