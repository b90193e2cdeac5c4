"""What the subcommands share: options, the session, errors, and what they print.

PySpark and Rich are imported when a subcommand runs, so that other subcommands do not need them.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

import click
from kombu import Connection

from kombu_binary_delay.celery_side.failures import BROKER_ERRORS, in_words, of_this_machine
from kombu_binary_delay.celery_side.urls import check_url, for_kombus_transport

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.console import Console

_Limits = TypeVar("_Limits")
#: Exit codes: a limit is exceeded; it cannot be done as asked; nothing is judged yet; the broker is
#: away.
FAILED, USAGE, NOT_YET, UNREACHABLE = 1, 2, 3, 4
#: Where one of these is set, Spark may run elsewhere.
_ELSEWHERE = ("PYSPARK_GATEWAY_PORT", "PYSPARK_SUBMIT_ARGS", "SPARK_CONF_DIR", "SPARK_REMOTE")
#: What the session has unless it is configured otherwise: Spark's own progress, and no log of it.
_DEFAULTS = {"spark.ui.showConsoleProgress": "true", "spark.log.level": "ERROR"}


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
columns = click.option(
    "--column",
    "columns",
    metavar="OURS=NAME",
    multiple=True,
    help="The table's name of a column, such as eta=next_contact; may be repeated.",
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
job_id = click.option("--job-id", help="Only the tasks of this job, as the receipts name them.")
late_after = click.option(
    "--late-after",
    type=float,
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="A task that comes so long after it was due is late.",
)
patience = click.option(
    "--patience",
    type=float,
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="A task that has not come and ended so long after it was due is lost: give more than the "
    "longest run, and the wait in a worker before it.",
)
allow = click.option(
    "--allow",
    metavar="NAME=NUMBER",
    multiple=True,
    help="Allow so many, or so many seconds, such as duplicates=10 or p99=5. NAME is early, lost, "
    "duplicates, late, unpublished, ran_after_cancel, reschedule_ignored, unknown or p99; may be "
    "repeated.",
)


def explained(command: click.Command) -> click.Command:
    """Add ``--verbose`` to a subcommand; without it, an error is one line, and an exit code."""
    run: Callable[..., Any] = command.callback or (lambda: None)

    @wraps(run)
    def explaining(*args: Any, verbose: bool, **given: Any) -> Any:
        try:
            return run(*args, **given)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except Exception as exc:
            if verbose:
                traceback.print_exc()
            is_away = isinstance(exc, BROKER_ERRORS) and of_this_machine(exc) is None
            error = click.ClickException(first_line(exc))
            error.exit_code = UNREACHABLE if is_away else USAGE  # type: ignore[misc]
            raise error from exc

    command.callback = explaining
    command.params.append(
        click.Option(["--verbose"], is_flag=True, help="Show the traceback of an error.")
    )
    return command


def first_line(exc: BaseException) -> str:
    """Return what an error says, without the traces of Java and of Python on an executor."""
    text = str(exc).strip() or type(exc).__name__
    raised = re.findall(r"(?m)^(?:\S+\.)*\w*(?:Error|Exception): (.+)$", text)
    is_of_python = "Traceback (most recent call last)" in text
    lines = [line for line in text.splitlines() if not line.startswith("An error occurred while")]
    line = raised[-1] if is_of_python and raised else lines[0] if lines else text
    return line.removeprefix(": ")


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

    made = Console(highlight=False, markup=False, emoji=False, stderr=stderr)
    if not made.is_terminal:
        made.width = 120
    return made


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
    place = urlsplit(output)
    if place.scheme == "file":
        return Path(url2pathname(place.path))
    if len(place.scheme) > 1:  # a drive letter is not a URL scheme
        raise click.BadParameter(
            f"{output!r} is not on this machine, to which the report is written: name a path that "
            f"Spark and this machine both see, and copy it from there",
            param_hint="--output",
        )
    return Path(output)


def spark_session(conf: tuple[str, ...], broker: str | None = None) -> SparkSession:
    """Return the session, with settings of the form ``KEY=VALUE``.

    :param broker: a URL that is checked first, where Spark runs on this machine: the session takes
        many seconds to start.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415 - see above

    settings = dict(setting.partition("=")[::2] for setting in conf)
    is_alone = (
        settings.get("spark.master", "local").startswith("local")
        and not any(map(os.environ.get, _ELSEWHERE))
        and "spark.remote" not in settings
    )
    if is_alone:
        if broker is not None:
            _check_answers(broker)
        # Not the first python3 in the path: this one has the package.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("kombu-binary-delay")
    for name, value in {**(_DEFAULTS if is_alone else {}), **settings}.items():
        builder = builder.config(name, value)
    session: SparkSession = builder.getOrCreate()
    return session


def _check_answers(url: str) -> None:
    check_url(url)
    plain, ssl = for_kombus_transport(url)
    try:
        with Connection(plain, ssl=ssl or False, connect_timeout=10) as connection:
            connection.connect()
    except BROKER_ERRORS as exc:
        error = click.ClickException(in_words(exc))
        error.exit_code = UNREACHABLE  # type: ignore[misc]
        raise error from exc


def check_job(job_id: str | None, receipts: str | None) -> None:
    """Raise a usage error if nothing says which tasks are of the job."""
    if job_id is not None and receipts is None:
        raise click.UsageError("the receipts name the tasks of a job: give --receipts")


def limits_of(kind: Callable[..., _Limits], given: tuple[str, ...], **more: float) -> _Limits:
    """Read limits of the form ``NAME=NUMBER``; the names are the fields of a dataclass.

    :param more: the limits that hold unless others are given.
    :raises click.UsageError: for a name that is unknown, or a number that is not valid.
    """
    known = [limit.name for limit in fields(kind)]  # type: ignore[arg-type]
    numbers = dict(more)
    for name, value in pairs(given).items():
        if name not in known:
            raise click.BadParameter(f"{name!r} is unknown; known are {', '.join(known)}")
        try:
            numbers[name] = float(value)
        except ValueError:
            raise click.BadParameter(f"{name}={value} must be {name}=NUMBER") from None
    with usage():
        return kind(**numbers)


def pairs(given: tuple[str, ...]) -> dict[str, str]:
    """Read options of the form ``NAME=VALUE``."""
    return dict(pair.partition("=")[::2] for pair in given)


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
