"""What the subcommands share: options, the session, and what they print.

PySpark and Rich are imported when a subcommand runs, so that other subcommands do not need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .before import here, quiet
from .failures import is_verbose

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.console import Console

_Limits = TypeVar("_Limits")
FAILED = 1


def _broker_before() -> str | None:
    """Return the broker's URL from before ``spark``, which may be from the environment."""
    return getattr(click.get_current_context().obj, "broker", None)


# Not by `envvar`, which would override an option before `spark`.
broker = click.option(
    "--broker", "-b", metavar="URL", default=_broker_before, help="Where RabbitMQ is."
)
conf = click.option(
    "--conf", metavar="KEY=VALUE", multiple=True, help="A setting of Spark; may be repeated."
)


def settings_before() -> dict[str, Any]:
    """Return the settings from the tool's options before ``spark``, and from the environment."""
    return dict(getattr(click.get_current_context().obj, "given", {}))


namespace = click.option(
    "--namespace",
    default=lambda: settings_before().get("namespace", "kbd"),
    show_default="kbd",
    help="The namespace of the ladder.",
)
receipts = click.option("--receipts", metavar="TABLE", help="The receipts of the jobs to audit.")
planned = click.option("--plan", "planned", metavar="TABLE", help="What spark plan has written.")
depths = click.option(
    "--depths",
    metavar="TABLE",
    help="Depths of queues that were recorded, with the columns at, queue and waiting, to draw "
    "beside those of --plan.",
)
job_id = click.option("--job-id", help="Only the tasks of this job, as the receipts name them.")
late_after = click.option(
    "--late-after",
    type=float,
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="A task that comes so long after it was due is late.",
)


def check_call(app: str | None = None) -> None:
    """Raise a usage error if PySpark or Rich is missing, or for an app before ``spark``.

    :param app: that of the subcommand, which counts instead.
    """
    missing = [name for name in ("pyspark", "rich") if find_spec(name) is None]
    if missing:
        raise click.UsageError(
            f"{' and '.join(missing)} must be installed: pip install 'kombu-binary-delay[spark]'"
        )
    if app is None and _is_app_named_before():
        raise click.UsageError(
            "the app is named before 'spark', where it does not count: name it after 'publish', "
            "with --app MODULE:NAME, so that executors can import it. Run the other subcommands "
            "as 'kombu-binary-delay spark' without an app; give them the broker and, before "
            "'spark', what the app sets, such as --namespace"
        )


def console(*, stderr: bool = False) -> Console:
    """Return the console to print on; where there is no terminal, 120 columns wide."""
    from rich.console import Console  # noqa: PLC0415 - see above

    # Show names literally: Rich must not read markup in them.
    as_it_is = partial(Console, highlight=False, markup=False, emoji=False, stderr=stderr)
    made = as_it_is()
    return made if made.is_terminal else as_it_is(width=120)


def error_console() -> Console:
    """Return the console for what is not the result."""
    return console(stderr=True)


@contextmanager
def usage() -> Iterator[None]:
    """Raise invalid values as usage errors: a traceback's exit code has another meaning here."""
    try:
        yield
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc


def local(output: str) -> Path:
    """Return the folder for the files that Spark does not write.

    :raises click.BadParameter: if it is not on this machine.
    """
    path = here(output)
    if path is None:
        raise click.BadParameter(
            f"{output!r} is not on this machine, to which the report is written: name a path that "
            f"Spark and this machine both see, and copy it from there",
            param_hint="--output",
        )
    return path


def spark_session(conf: tuple[str, ...]) -> SparkSession:
    """Return the session, with settings of the form ``KEY=VALUE``."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - see above

    from kombu_binary_delay.spark.classic import hush  # noqa: PLC0415 - needs PySpark

    builder = SparkSession.builder.appName("kombu-binary-delay")
    for each in conf:
        name, _, value = each.partition("=")
        builder = builder.config(name, value)
    if SparkSession.getActiveSession() is None:
        error_console().print("starting Spark", style="dim")
    with quiet(conf):
        session: SparkSession = builder.getOrCreate()
    if not is_verbose():
        hush(session)
    return session


def check_job(job_id: str | None, receipts: str | None) -> None:
    """Raise a usage error if nothing says which tasks are of the job."""
    if job_id is not None and receipts is None:
        raise click.UsageError("the receipts name the tasks of a job: give --receipts")


def limits_of(kind: Callable[..., _Limits], given: tuple[str, ...], **more: float) -> _Limits:
    """Read limits of the form ``NAME=NUMBER``; the names are the fields of a dataclass.

    :param more: the limits that hold unless others are given.
    :raises click.UsageError: for a name that is unknown, or a number that is not valid.
    """
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    numbers = dict(more)
    for each in given:
        name, _, value = each.partition("=")
        if name not in known:
            raise click.BadParameter(f"{name!r} is unknown; known are {', '.join(known)}")
        try:
            numbers[name] = float(value)
        except ValueError:
            raise click.BadParameter(f"{each!r} must be {name}=NUMBER") from None
    with usage():
        return kind(**numbers)


def given_broker(broker: str | None) -> str:
    """Return the broker's URL; raise a usage error if none is given."""
    if not broker:
        raise click.UsageError("say where RabbitMQ is: --broker, or BINARY_DELAY_BROKER")
    return broker


def _is_app_named_before() -> bool:
    """Return whether an app was named; Celery's command has one also without that."""
    context = click.get_current_context().parent
    while context is not None:
        if context.params.get("app") is not None:
            return True
        context = context.parent
    return False
