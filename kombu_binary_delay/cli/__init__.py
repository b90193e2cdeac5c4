"""The tool ``kombu-binary-delay``, which is also ``celery binary-delay``.

One subcommand a file, thin: parse, call :mod:`kombu_binary_delay.admin`, print.
"""

from __future__ import annotations

from typing import Any

import click

from kombu_binary_delay.spark.cli import spark

from .amend import cancel, reschedule
from .connect import Target, options
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
    epilog="Exit codes: 0 all is well; 1 something was found, such as a difference or a parked "
    "message; 2 it cannot be done as asked; 3 refused, since messages would be lost; 4 the broker "
    "or its management API cannot be reached, or has not confirmed what was sent.",
    help="""Look after ladders of kombu-binary-delay on RabbitMQ.

    Options before the subcommand say where, and with which settings of the transport. Each has a
    variable in the environment: BINARY_DELAY_BROKER, BINARY_DELAY_TICK and so on.
    """,
)
@click.option("--app", "-A", metavar="MODULE", help="A Celery app, whose settings to use.")
@click.option(
    "--broker",
    "-b",
    metavar="URL",
    envvar="BINARY_DELAY_BROKER",
    help="Where RabbitMQ is.  [default: the app's, or amqp://guest:guest@localhost//]",
)
@click.option(
    "--management",
    "-m",
    metavar="URL",
    envvar="BINARY_DELAY_MANAGEMENT",
    help="Where its management API is.  [default: the broker's host, port 15672, "
    "or 15671 over TLS]",
)
@click.version_option(package_name="kombu-binary-delay")
@click.pass_context
def binary_delay(
    context: click.Context,
    /,
    app: str | None,
    broker: str | None,
    management: str | None,
    **given: Any,
) -> None:
    """Look after ladders of kombu-binary-delay on RabbitMQ."""
    # Celery's own command has loaded the app already.
    loaded = getattr(context.obj, "app", None)
    if app is not None:
        loaded = _load(app)
    settings = {name: value for name, value in given.items() if value is not None}
    context.obj = Target.of(loaded, broker, management, settings)


for _option in options():
    binary_delay.params.append(_option)
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
    web,
    spark,
):
    binary_delay.add_command(_subcommand)


def _load(name: str) -> Any:
    try:
        from celery.app.utils import find_app  # noqa: PLC0415 - Celery is no dependency

        return find_app(name)
    except (ImportError, AttributeError) as exc:
        raise click.BadParameter(f"no Celery app can be loaded from {name!r}: {exc}") from exc


def main() -> None:
    """Run the console script."""
    binary_delay(prog_name="kombu-binary-delay")
