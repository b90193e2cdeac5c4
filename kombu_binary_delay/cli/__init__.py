"""The tool ``kombu-binary-delay``, which is also ``celery binary-delay``.

One subcommand a file, thin: parse, call :mod:`kombu_binary_delay.admin`, print.
"""

from __future__ import annotations

from typing import Any

import click

from kombu_binary_delay.spark.cli import spark

from .amend import cancel, reschedule
from .asked import asked_before, place_options
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


@click.group(
    name="binary-delay",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 all is well; 1 something was found, such as a difference or a parked "
    "message; 2 it cannot be done as asked; 3 refused, since messages would be lost; 4 the broker "
    "or its management API cannot be reached, or has not confirmed what was sent.",
    help="""Look after ladders of kombu-binary-delay on RabbitMQ.

    Options before the subcommand say where, and with which settings of the transport. Each has a
    variable in the environment: BINARY_DELAY_BROKER, BINARY_DELAY_TICK and so on.
    """,
)
@click.version_option(package_name="kombu-binary-delay")
@click.pass_context
def binary_delay(context: click.Context, /, **given: Any) -> None:
    """Look after ladders of kombu-binary-delay on RabbitMQ."""
    # Celery's own command has loaded the app already.
    context.obj = asked_before(context, given, getattr(context.obj, "app", None))


binary_delay.params[:0] = place_options(after=False)
for _subcommand in (
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
    spark,
):
    binary_delay.add_command(_subcommand)


def main() -> None:
    """Run the console script."""
    binary_delay(prog_name="kombu-binary-delay")
