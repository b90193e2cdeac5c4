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
from .migrate import migrate, transfer
from .prune import prune
from .redrive import redrive
from .status import status
from .tasks import tasks
from .teardown import teardown
from .verify import verify
from .web import web


@click.group(
    name="binary-delay",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit status: 0 if all is well; 1 if something was found, such as a difference or a "
    "parked message; 2 if it cannot be done as asked; 3 if it would lose messages, and was "
    "refused; "
    "4 if the broker or its management API does not answer, refuses the user, or has not confirmed "
    "what was sent.",
    help="""See and manage the delayed messages that wait in RabbitMQ.

    Say where RabbitMQ is, and which settings your programs have, with the options below or with -A
    and your Celery app. You can give them before or after the subcommand. All but -A can be set in
    the environment, too: BINARY_DELAY_BROKER, BINARY_DELAY_TICK and so on.
    """,
)
@click.version_option(package_name="kombu-binary-delay")
@click.pass_context
def binary_delay(context: click.Context, /, **given: Any) -> None:
    """See and manage the delayed messages that wait in RabbitMQ."""
    if os.environ.get("NO_COLOR"):
        # Click does not read it: https://no-color.org
        context.color = False
    # Celery's own command has loaded the app already.
    context.obj = asked_before(context, given, getattr(context.obj, "app", None))


binary_delay.params[:0] = place_options(after=False)
for _subcommand in (
    check,
    create,
    verify,
    status,
    tasks,
    explain,
    cancel,
    reschedule,
    export,
    redrive,
    migrate,
    transfer,
    prune,
    teardown,
    web,
    spark,
):
    if _subcommand is not spark:
        _subcommand.epilog = (
            "Takes all options that 'kombu-binary-delay --help' lists, such as --tick."
        )
    binary_delay.add_command(_subcommand)


def main() -> None:
    """Run the console script."""
    binary_delay(prog_name="kombu-binary-delay")
