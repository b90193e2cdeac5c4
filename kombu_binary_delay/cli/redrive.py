"""``redrive``: send parked messages to their destinations."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import click

from kombu_binary_delay import admin
from kombu_binary_delay.admin.probe import Probe
from kombu_binary_delay.admin.reading import UNREADABLE
from kombu_binary_delay.admin.redrive import end_last_line
from kombu_binary_delay.compat.failures import of_this_machine
from kombu_binary_delay.model.address import Destination

from . import words
from .command import FOUND, OK, SOON, Printer, dry_run, ladder, subcommand
from .connect import Target
from .progress import bar
from .values import Places


@click.command(
    short_help="Send on what is parked.",
    help="""Send parked messages to where they were meant to go, or elsewhere, or into a file.

    With --dry-run, only counts parked messages, and takes none: where they were meant to go is in
    them.

    A message leaves the parking queue only when the broker has confirmed its copy. It stays
    parked, and the exit status is 1, if there is still no queue for it, or if it is not due yet.
    One without an address needs --to or --to-file, and one that cannot be decoded --to; --only ''
    takes those alone.

    Names may have colons: --only takes what is parked for any reading of its text, and --to the
    one that exists, of the exchange up to the first colon, up to the next, and the queue. It is
    refused if several do. With a colon before it, the text is a queue's name: --to :jobs:high.

    \b
      kombu-binary-delay redrive --dry-run
      kombu-binary-delay redrive --only mail
      kombu-binary-delay redrive --only events:order.paid --to orders
      kombu-binary-delay redrive --to-file parked.jsonl
      kombu-binary-delay redrive --from-file parked.jsonl --to mail
    """,
)
@click.option("--only", type=Places(), help="Only messages for this queue, or exchange:key.")
@click.option("--to", type=Places(), help="Send them to this queue, or exchange:key, instead.")
@click.option(
    "--to-file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write them to the end of this file instead, a line of JSON each.",
)
@click.option(
    "--from-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Send what --to-file has written, in place of parked messages. What cannot be sent goes "
    "to a "
    "file beside it, whose name ends in .left.",
)
@ladder
@dry_run
@partial(subcommand, cleaning=SOON)
def redrive(
    broker: Target,
    printer: Printer,
    only: tuple[Destination, ...] | None,
    to: tuple[Destination, ...] | None,
    to_file: Path | None,
    from_file: Path | None,
    ladder: str | None,
    dry_run: bool,
) -> int:
    """Send parked messages to where they were meant to go, or elsewhere, or into a file."""
    if to_file is not None and (to is not None or from_file is not None):
        raise click.UsageError("--to-file goes with neither --to nor --from-file")
    if from_file is not None and (only is not None or dry_run):
        raise click.UsageError("--from-file goes with neither --only nor --dry-run")
    with broker.plain() as connection:
        topology = broker.topology(ladder)
        place = _existing(connection, to, printer) if to else None
        if from_file is not None:
            return _refill(connection, printer, from_file, place)
        management = broker.management(connection)
        planned = admin.parked(connection, topology, management, to=place)
    if dry_run:
        if only and planned.messages:
            printer.log("which of them --only takes is seen when they are taken")
        printer.show(planned, "plan", dry=True, messages=planned.messages)
        return FOUND if planned.reasons else OK
    with ExitStack() as stack:
        file = None
        if to_file is not None:
            file = stack.enter_context(_appended(to_file))
        update = stack.enter_context(bar("redrive", planned.messages))
        done = admin.redrive(
            broker.plain,
            topology,
            management,
            only=only,
            to=place,
            file=file,
            progress=update,
        )
    sys.stderr.flush()
    found = {each.destination for each in done.parked}
    if only and UNREADABLE not in only and found.isdisjoint(only) and not done.reasons:
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
        found = [
            each
            for each in places
            if (probe.has_exchange if each.exchange else probe.has_queue)(
                each.exchange or each.routing_key
            )
        ]
    if len(found) > 1:
        raise click.UsageError(
            f"--to can be {' or '.join(map(words.place, found))}, which exist: messages would go "
            f"to one of them; use a queue, as :NAME"
        )
    for each in found:
        printer.log(f"--to is {words.place(each)}")
    return (found or list(places))[0]


@contextmanager
def _appended(path: Path) -> Iterator[IO[str]]:
    """Open a file to write to its end; an error of the disk names it."""
    end_last_line(path)
    try:
        with path.open("a", encoding="utf-8") as file:
            yield file
    except OSError as exc:
        if exc.filename is None and of_this_machine(exc) is not None:
            raise OSError(exc.errno, exc.strerror, str(path)) from exc
        raise


def _refill(connection: Any, printer: Printer, path: Path, to: Destination | None) -> int:
    beside, part = (path.with_name(f"{path.name}{end}") for end in (".left", ".left.part"))
    if beside.exists():
        raise click.UsageError(
            f"{beside} is there, from a time before: send it with --from-file, or remove it"
        )
    try:
        # By lines, so that a full disk is seen by who writes one.
        left = part.open("x", buffering=1, encoding="utf-8")
    except FileExistsError as exc:
        raise click.UsageError(
            f"{part} is there: another command sends {path}, or one was killed; if none does, "
            f"remove it"
        ) from exc
    except OSError as exc:
        raise click.UsageError(f"{part}, for what cannot be sent, cannot be made: {exc}") from exc
    try:
        with path.open(encoding="utf-8") as file:
            done = admin.refill(connection, file, to, left=left.write)
    except admin.IncompleteError:
        # A full disk does not take the rest on closing either.
        with suppress(OSError):
            left.close()
        part.unlink()
        raise
    except BaseException:
        _keep(left, printer)
        raise
    _keep(left, printer)
    for reason in done.reasons:
        printer.log(f"! {reason}")
    printer.show(done, "refill")
    return FOUND if done.left else OK


def _keep(left: IO[str], printer: Printer) -> None:
    """Rename the part, now that it is complete, or remove it if it is empty."""
    part = Path(left.name)
    beside = part.with_suffix("")
    with left:
        left.flush()
        os.fsync(left.fileno())
    if part.stat().st_size:
        part.replace(beside)
        path = beside.with_suffix("")
        printer.log(f"what was not sent is in {beside}: send that next time, and not {path}")
    else:
        part.unlink()
