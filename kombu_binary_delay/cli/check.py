"""``check``: find out by one delayed message whether it is on, and works."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import click

from kombu_binary_delay import operate
from kombu_binary_delay.operate.check import Finding

from .command import FOUND, OK, Printer, subcommand, wrapped
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
    findings = []
    for finding in _findings(broker, delay, late):
        findings.append(finding)
        if not printer.as_json:
            _print(finding)
    passed = all(finding.state != "error" for finding in findings)
    if printer.as_json:
        printer.show(operate.Check(tuple(findings), passed), "")
    return OK if passed else FOUND


def _findings(broker: Target, delay: float, late: float) -> Iterator[Finding]:
    if broker.app is None:
        yield Finding("transport", "note", "no app is given with -A: only the broker is looked at")
    else:
        fine = True
        for finding in operate.check_app(broker.app):
            fine = fine and finding.state != "error"
            yield finding
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
    remedy = f"→ {finding.remedy}".splitlines() if finding.remedy else []
    said = wrapped(f"{mark:<6} {finding.what:<{_INDENT - 8}} {finding.said}", _INDENT)
    click.echo(click.style(said[:6], fg=colour) + said[6:])
    for line in remedy:
        click.echo(wrapped(f"{'':{_INDENT}}{line}", _INDENT))
