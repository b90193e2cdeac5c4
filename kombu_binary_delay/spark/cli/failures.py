"""Errors of the subcommands: a sentence that names the value and the remedy, and an exit code.

Spark's errors come from another process, most often as the text of a Java or Python traceback. So
they are recognised by that text. ``--verbose`` shows them whole, with Spark's log.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from itertools import product
from pathlib import Path
from typing import Any

import click

from kombu_binary_delay.celery_side.failures import BROKER_ERRORS, in_words, of_this_machine
from kombu_binary_delay.celery_side.urls import is_broker_url
from kombu_binary_delay.errors import UnconfirmedError

USAGE, UNREACHABLE = 2, 4
_VERBOSE = f"{__name__}.verbose"
_LOG = f"{__name__}.log"
_INSTALL = (
    "install it in the Python of Spark's workers, on a cluster with --archives, or name its folder "
    "in PYTHONPATH"
)
CANNOT_IMPORT = f"Spark's workers cannot import {{0!r}}: {_INSTALL}"
CANNOT_START = (
    "Spark's workers cannot start the Python {0!r}: set PYSPARK_PYTHON, or on a cluster "
    "spark.pyspark.python, to one that has this package, such as {python}"
)
WRONG_PYTHON = (
    "Spark's workers run Python {0}{worker}, and this is Python {1}: set PYSPARK_PYTHON, or on a "
    "cluster spark.pyspark.python, to a Python {1} that has this package, such as {python}"
)
_CANNOT_REACH = (
    "Spark's workers cannot reach the broker: {0}; name one with --broker that their machines can "
    "reach"
)
#: Of a broker that is away, and may be back soon: what Spark's text says, the exit code, and what
#: we say, in which {0} is the first group.
_AWAY: tuple[tuple[str, int, str], ...] = (
    # If it is the stream that is away, the next read finds that out.
    (
        (
            r"RuntimeError: "
            r"(the stream .+ (?:cannot be read now|gave nothing for|or its node has stopped).+)"
        ),
        UNREACHABLE,
        "{0}",
    ),
    (
        (
            r"(?m)^(?:[\w.]+\.)?("
            r"(?:Connection(?:Refused|Reset|Aborted|Forced)|BrokenPipe|RecoverableConnection|"
            r"Operational|Timeout|Unreachable|gai)(?:Error|error)?: .+|"
            r"OSError: Server unexpectedly closed connection.*|"
            r"NotAllowed: .+ is down.*)$"
        ),
        UNREACHABLE,
        _CANNOT_REACH,
    ),
)
#: The same of all that is known.
_KNOWN: tuple[tuple[str, int, str], ...] = (
    (
        r"different version:? (.+?) than that in driver:? (.+?),",
        USAGE,
        WRONG_PYTHON,
    ),
    (
        r'Cannot run program "(.+?)"',
        USAGE,
        CANNOT_START,
    ),
    (
        r"ModuleNotFoundError: No module named '(.+?)'",
        USAGE,
        CANNOT_IMPORT,
    ),
    (
        r"ImportError: (.+)",
        USAGE,
        f"Spark's workers cannot import what they need, {{0}}: {_INSTALL}",
    ),
    (
        r"AttributeError: module '(.+?)' has no attribute '(.+?)'",
        USAGE,
        "the module {0} has no {1!r}: name the app as --app MODULE:NAME",
    ),
    (
        r"PATH_NOT_FOUND\] Path does not exist: (?:file:)?(.+?)\.(?: SQLSTATE|\s|$)",
        USAGE,
        "there is nothing at {0}: name a path that Spark sees",
    ),
    (
        r"TABLE_OR_VIEW_NOT_FOUND\] The table or view (.+?) cannot be found",
        USAGE,
        "there is no table {0}: name one of the session's catalogue",
    ),
    (
        r"DATA_SOURCE_NOT_FOUND\] Failed to find the data source: (.+?)\.\s",
        USAGE,
        "this Spark has no format {0!r}: add it, such as by --conf spark.jars.packages=...",
    ),
    (
        r"UNABLE_TO_INFER_SCHEMA\] Unable to infer schema for (\w+)",
        USAGE,
        "there are no files of the format {0} at {places}: name the path of such files",
    ),
    (
        r"CSV header (?s:.+?)CSV file: (?:file:/*(?=/))?(\S+)",
        USAGE,
        (
            "{0} does not have the header line of the other files, or has a name in it twice: give "
            "all files the same one, or name a path with fewer of them"
        ),
    ),
    (
        r"Malformed records are detected in record parsing: (.+?)\.(?:\s|$)",
        USAGE,
        (
            "a row has more or fewer cells than the header line of its file, or is not JSON, {0}, "
            "at {places}: correct or delete it"
        ),
    ),
    (
        r"(?:CANNOT_READ_FILE_FOOTER|NO_HINT)\] .*?(?:file |file:)(\S+?)[.:]?\s",
        USAGE,
        "{0} cannot be read as Parquet: name a path of such files, or the format that it has",
    ),
    (
        (
            r"(?:Mkdirs failed to create |Parent path is not a directory: |"
            r"AccessDeniedException:? |Permission denied: ?)(?:file:)?(\S+?)(?=/_temporary|\s|$)"
        ),
        USAGE,
        "Spark cannot write {0}: name a path where it may, or give it the permission",
    ),
    (
        r"FileNotFoundException: (?:file:)?(\S+) \((?:Permission denied|Not a directory)\)",
        USAGE,
        "Spark cannot write {0}: name a path where it may, or give it the permission",
    ),
    (
        # In an alarm, RabbitMQ takes nothing. Its address is right: it has let the workers in.
        r"not all confirms came within (\d\S* s)",
        UNREACHABLE,
        (
            "RabbitMQ confirmed nothing for {0}: look for an alarm with 'rabbitmqctl status', and "
            "when it is over go on with --resume"
        ),
    ),
    *_AWAY,
    (
        # Of the journal, which has dropped events, or has been deleted and declared again.
        r"RuntimeError: (the stream .+)",
        USAGE,
        "{0}",
    ),
    (
        r"Could not parse Master URL|masters are unresponsive|methods on a stopped SparkContext",
        UNREACHABLE,
        "no Spark runs at {master}: change spark.master",
    ),
    (
        r"StatusCode\.UNAVAILABLE|failed to connect to all addresses",
        UNREACHABLE,
        (
            "no Spark Connect server answers at {remote}: start it, or change SPARK_REMOTE or "
            "spark.remote"
        ),
    ),
    (
        r"UnsupportedClassVersionError",
        USAGE,
        "the Java at {java} is too old for this PySpark: set JAVA_HOME to a Java 17 or later",
    ),
    (
        r"JAVA_GATEWAY_EXITED|JAVA_HOME is not set",
        USAGE,
        (
            "the Java at {java} does not run: install Java 17 or later, or set JAVA_HOME to where "
            "it is"
        ),
    ),
    (
        r"(?m)^(?:[\w.]+\.)?((?:AccessRefused|NotAllowed)(?:Error|error)?: .+)$",
        UNREACHABLE,
        _CANNOT_REACH,
    ),
    (
        # Messages that were sent again have other receipts than before.
        r"cannot rollback the (?:Result|ShuffleMap)Stage",
        USAGE,
        (
            "Spark lost an executor while it wrote, and could not repeat that: run the command "
            "again, and spark publish with --resume"
        ),
    ),
    (
        (
            r"(?:OutOfMemoryError|Answer from Java side is empty|Connection reset by peer|"
            r"trying to connect to the Java server)"
        ),
        USAGE,
        (
            "the Java process of Spark has ended, as for want of memory: give it more with --conf "
            "spark.driver.memory=4g; spark publish goes on with --resume"
        ),
    ),
)


class Failure(click.ClickException):
    """A sentence for a person, and an exit code."""

    def __init__(self, text: str, code: int = USAGE) -> None:
        super().__init__(text)
        self.exit_code = code  # type: ignore[misc]

    def show(self, file: Any = None) -> None:
        """Print the sentence, in red on a terminal; wrapped between words there."""
        width = shutil.get_terminal_size().columns if sys.stderr.isatty() else sys.maxsize
        text = click.wrap_text(self.message, width, subsequent_indent="  ")
        click.secho(text, file=file, err=True, fg="red")


def explained(command: click.Command) -> click.Command:
    """Add ``--verbose`` to a subcommand, and without it turn its errors into :class:`Failure`."""
    run: Callable[..., Any] = command.callback or (lambda: None)

    @wraps(run)
    def explaining(*args: Any, **given: Any) -> Any:
        context = click.get_current_context()
        try:
            done = run(*args, **given)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except Exception as exc:
            text, code, known = _in_words(exc)
            if is_verbose():
                traceback.print_exc()
            elif not known:
                log = context.meta.pop(_LOG, None)
                text += f"; {f'its log is {log}, and ' if log else ''}--verbose shows more"
            raise Failure(text, code) from exc
        finally:
            log = context.meta.pop(_LOG, None)
            if log is not None:
                log.unlink(missing_ok=True)
        return done

    command.callback = explaining
    command.params.append(
        click.Option(
            ["--verbose"],
            is_flag=True,
            expose_value=False,
            callback=lambda context, _, value: context.meta.__setitem__(_VERBOSE, value),
            help="Show Spark's log and, of an error, the traceback.",
        )
    )
    return command


def outage(exc: Exception) -> str | None:
    """Return what Spark says of a broker that is away, and may be back soon; None for the rest."""
    found = (re.search(pattern, str(exc)) for pattern, *_ in _AWAY)
    return next((each[1] for each in found if each), None)


def is_verbose() -> bool:
    """Return whether the subcommand has the option ``--verbose``."""
    context = click.get_current_context(silent=True)
    return context is None or bool(context.meta.get(_VERBOSE))


def keep_log(path: Path) -> None:
    """Delete the log at the end of the subcommand, unless an error needs it."""
    click.get_current_context().meta[_LOG] = path


def _in_words(exc: Exception) -> tuple[str, int, bool]:
    """Return the sentence, the exit code, and whether the error is a known one."""
    text, code, known = str(exc), USAGE, True
    if isinstance(exc, OSError) and _is_of_java(exc):
        text, code, known = _of_spark("Answer from Java side is empty")
    elif type(exc).__module__.startswith(("pyspark", "py4j", "grpc")):
        text, code, known = _of_spark(text)
    elif isinstance(exc, ModuleNotFoundError):
        text = (
            f"this Python has no module {exc.name!r}: install it, or name its folder in "
            f"PYTHONPATH, and the app as --app MODULE:NAME"
        )
    elif isinstance(exc, UnconfirmedError):
        code = UNREACHABLE
    elif isinstance(exc, BROKER_ERRORS):
        text = in_words(exc)
        code = UNREACHABLE if of_this_machine(exc) is None else USAGE
    elif not isinstance(exc, (ValueError, RuntimeError)):
        text, known = f"{type(exc).__name__}: {text}", False
    return text, code, known


def _is_of_java(exc: Exception) -> bool:
    """Return whether it is the connection to the Java process that failed, and not the broker's."""
    frames = (frame for frame, _ in traceback.walk_tb(exc.__traceback__))
    return any(str(each.f_globals.get("__name__")).startswith("py4j.") for each in frames)


def _of_spark(text: str) -> tuple[str, int, bool]:
    context = click.get_current_context()
    log = context.meta.get(_LOG)
    if log is not None and "JAVA_GATEWAY_EXITED" in text:
        text += log.read_text(errors="replace")
    # What Python raised while it handled another error is why the job ended.
    last = text.rpartition("another exception occurred")[2]
    for words, (pattern, code, sentence) in product((last, text), _KNOWN):
        if found := re.search(pattern, words):
            return sentence.format(*found.groups(), **_values(context.params)), code, True
    said = re.sub(r"^An error occurred while calling \S+\n: ", "", text.strip())
    first = said.partition("\n")[0].partition(" SQLSTATE")[0]
    return f"Spark failed: {first or 'it does not say why'}", USAGE, False


def _values(params: dict[str, Any]) -> dict[str, str]:
    """Return what the sentences name, apart from what Spark has said."""
    worker = os.environ.get("PYSPARK_PYTHON")
    home = os.environ.get("JAVA_HOME")
    settings = dict(each.partition("=")[::2] for each in params.get("conf") or ())
    names = ("path", "receipts", "journal", "planned", "depths")
    # The journal may be a broker, whose URL has a password.
    read = [each for name in names if (each := params.get(name)) and not is_broker_url(each)]
    return {
        "worker": f" (PYSPARK_PYTHON is {worker})" if worker else "",
        "python": sys.executable,
        "java": home or shutil.which("java") or "PATH",
        "places": " or ".join(read),
        "master": settings.get("spark.master") or os.environ.get("MASTER") or "spark.master",
        "remote": settings.get("spark.remote") or os.environ.get("SPARK_REMOTE") or "its address",
    }
