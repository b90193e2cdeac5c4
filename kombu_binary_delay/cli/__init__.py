"""The command ``kombu-binary-delay``, which is also ``celery binary-delay``.

One subcommand per file, thin: parse, call :mod:`kombu_binary_delay.operate`, print.
"""

from __future__ import annotations

import os
from typing import Any

import click

from kombu_binary_delay.spark.cli import spark

from .amend import cancel, reschedule
from .asked import asked_before, place_options
from .check import check
from .create import create
from .explain import explain
from .export import export
from .help import topic
from .migrate import migrate, transfer
from .prune import prune
from .redrive import redrive
from .schedule import schedule
from .status import status
from .tasks import tasks
from .teardown import teardown
from .verify import verify
from .web import web

#: The subcommands, as the help groups them.
GROUPS = {
    "Look": (status, tasks, explain, web, check, verify),
    "Change": (cancel, reschedule, redrive, schedule),
    "Move and remove": (migrate, transfer, prune, teardown),
    "Set up": (create, export),
    "More": (spark, topic),
}


class _Grouped(click.Group):
    """A group whose help has the commands first, and groups them."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, and then the options."""
        width = max(map(len, self.commands))
        for title, commands in GROUPS.items():
            rows = [(f"{cmd.name:<{width}}", cmd.get_short_help_str(90)) for cmd in commands]
            with formatter.section(title):
                formatter.write_dl(rows)
        click.Command.format_options(self, ctx, formatter)


@click.group(
    name="binary-delay",
    cls=_Grouped,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="'help settings' has the options of the ladder and the other settings, 'help exit' what "
    "the exit status means. Every option may stand before the subcommand or after it, and in the "
    "environment, such as BINARY_DELAY_BROKER.",
    help="""See and manage the delayed messages that wait in RabbitMQ.

    Name the Celery app with -A, or RabbitMQ with -b.
    """,
)
@click.version_option(
    package_name="kombu-binary-delay", prog_name="kombu-binary-delay", help="Show the version."
)
@click.pass_context
def binary_delay(context: click.Context, /, **given: Any) -> None:
    """See and manage the delayed messages that wait in RabbitMQ."""
    if os.environ.get("NO_COLOR"):
        # Click does not read it: https://no-color.org
        context.color = False
    # Celery's own command has loaded the app already.
    context.obj = asked_before(context, given, getattr(context.obj, "app", None))


binary_delay.params[:0] = place_options(after=False)
for _subcommands in GROUPS.values():
    for _subcommand in _subcommands:
        binary_delay.add_command(_subcommand)


def main() -> None:
    """Run the console script."""
    binary_delay(prog_name="kombu-binary-delay")
