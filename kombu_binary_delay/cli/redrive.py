"""``redrive``: send parked messages to their destinations."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from kombu_binary_delay import operate
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.operate.probe import Probe
from kombu_binary_delay.operate.reading import UNREADABLE

from . import words
from .command import FOUND, OK, SOON, Printer, dry_run, ladder, subcommand
from .connect import Target
from .values import Places


@click.command(
    short_help="Send on what is parked.",
    help="""Send parked messages to where they were meant to go, or elsewhere.

    With --dry-run, only counts parked messages, and takes none: where they were meant to go is in
    them.

    A message leaves the parking queue only when the broker has confirmed its copy. It stays
    parked, and the exit status is 1, if there is still no queue for it, or if it is not due yet.
    One without an address, and one that cannot be decoded, needs --to; --only '' takes
    those alone.

    Names may have colons: --only takes what is parked for any reading of its text, and --to the
    one that exists, of the exchange up to the first colon, up to the next, and the queue. It is
    refused if several do. With a colon before it, the text is a queue's name: --to :jobs:high.

    \b
      kombu-binary-delay redrive --dry-run
      kombu-binary-delay redrive --only mail
      kombu-binary-delay redrive --only events:order.paid --to orders
    """,
)
@click.option("--only", type=Places(), help="Only messages for this queue, or exchange:key.")
@click.option("--to", type=Places(), help="Send them to this queue, or exchange:key, instead.")
@ladder
@dry_run
@partial(subcommand, management=True, cleaning=SOON)
def redrive(
    broker: Target,
    printer: Printer,
    only: tuple[Destination, ...] | None,
    to: tuple[Destination, ...] | None,
    ladder: str | None,
    dry_run: bool,
) -> int:
    """Send parked messages to where they were meant to go, or elsewhere."""
    with broker.plain() as connection:
        topology = broker.topology(ladder)
        place = _existing(connection, to, printer) if to else None
        management = broker.management(connection)
        planned = operate.parked(connection, topology, management, to=place)
    if dry_run:
        if only and planned.messages:
            printer.log("which of them --only takes is seen when they are taken")
        printer.show(planned, "plan", dry=True, messages=planned.messages)
        return FOUND if planned.reasons else OK
    from .progress import bar  # noqa: PLC0415 - Rich comes with the extra `cli`

    with bar("redrive", planned.messages) as update:
        done = operate.redrive(
            broker.plain, topology, management, only=only, to=place, progress=update
        )
    places = {parked.destination for parked in done.parked}
    if only and UNREADABLE not in only and places.isdisjoint(only) and not done.reasons:
        printer.log(f"! nothing is parked for {' or '.join(map(words.place, only))}")
    sums: dict[str, Any] = {"sent": done.sent, "stays": done.stays, "unreadable": done.unreadable}
    printer.show(done, "redriven", **sums)
    return FOUND if done.reasons or (done.unreadable and only in {None, (UNREADABLE,)}) else OK


def _existing(connection: Any, places: tuple[Destination, ...], printer: Printer) -> Destination:
    """Return the one of these destinations that exists; if none does, the first.

    :raises UsageError: if several do.
    """
    if len(places) == 1:
        return places[0]
    with Probe(connection) as probe:
        existing = [
            place
            for place in places
            if (probe.has_exchange if place.exchange else probe.has_queue)(
                place.exchange or place.routing_key
            )
        ]
    if len(existing) > 1:
        raise click.UsageError(
            f"--to can be {' or '.join(map(words.place, existing))}, which exist: messages would "
            f"go to one of them; use a queue, as :NAME"
        )
    for place in existing:
        printer.log(f"--to is {words.place(place)}")
    return (existing or list(places))[0]
