"""``check``: find out by one delayed message whether it is on, and works."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import click

from kombu_binary_delay import operate
from kombu_binary_delay.operate.check import Finding

from .command import FOUND, OK, Printer, subcommand
from .connect import Target
from .values import Delay, Seconds

_MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "error": ("ERROR", "red")}
_INDENT = 19


@click.command(
    short_help="Send one delayed message, and say what came of it.",
    help="""Send one short delayed message through the ladder, and say what came of it.

    Looks at the app's transport (with -A), the connection, the broker's release, the ladder, this
    user's permissions, and at the delay that was seen. Declares only what any publish with a delay
    declares, and a private queue, which is deleted in the end. Ends with 1, and says what to do,
    where the app has another transport, the user may not do it, or the message comes too early,
    late or not at all.

    \b
      kombu-binary-delay check -A shop
      kombu-binary-delay check -b amqp://guest:guest@localhost// --delay 10s
    """,
)
@click.option(
    "--delay", type=Delay(), default="1s", show_default=True, help="How long to delay the message."
)
@click.option(
    "--late",
    type=Seconds(min=0),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long after the due time the message counts as late.",
)
@partial(subcommand, drawn=False)
def check(broker: Target, printer: Printer, delay: float, late: float) -> int:
    """Send one short delayed message through the ladder, and say what it saw."""
    found = []
    for each in _findings(broker, delay, late):
        found.append(each)
        if not printer.as_json:
            _print(each)
    passed = all(each.state != "error" for each in found)
    if printer.as_json:
        printer.show(operate.Check(tuple(found), passed), "")
    return OK if passed else FOUND


def _findings(broker: Target, delay: float, late: float) -> Iterator[Finding]:
    if broker.app is None:
        yield Finding("transport", "note", "no app is given with -A: only the broker is looked at")
    else:
        fine = True
        for each in operate.check_app(broker.app):
            fine = fine and each.state != "error"
            yield each
        if not fine:
            yield Finding("delay", "note", "nothing was sent, and nothing declared")
            return
    # Keep the message out of the journal; and a queue for this delay would outlive the check.
    given = {**broker.given, "journal": None, "queue_per_delay": False}
    broker = replace(broker, given=given)
    with broker.delaying() as connection:
        yield from operate.check(connection, broker.settings, delay, late)


def _print(finding: Finding) -> None:
    mark, colour = _MARKS[finding.state]
    width = max(shutil.get_terminal_size().columns - _INDENT, 40)
    remedy = f"→ {finding.remedy}".splitlines() if finding.remedy else []
    texts = [finding.said, *remedy]
    first, *rest = [
        line
        for text in texts
        for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    ]
    click.echo(f"{click.style(f'{mark:<6}', fg=colour)} {finding.what:<{_INDENT - 8}} {first}")
    for line in rest:
        click.echo(f"{'':{_INDENT}}{line}")
