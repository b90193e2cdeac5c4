"""What every subcommand has: ``--json``, uniform error messages, and an exit code."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, cast

import click

from kombu_binary_delay.amendments.channel import UnansweredError
from kombu_binary_delay.celery_side.failures import BROKER_ERRORS, in_words, of_this_machine
from kombu_binary_delay.errors import BinaryDelayError, UnconfirmedError
from kombu_binary_delay.ladder.ladder import MAX_KEY
from kombu_binary_delay.operate import OperationError, RefusedError, UnreachableError
from kombu_binary_delay.operate.text import plain

from .asked import Asked, accepts_places, asked_after
from .connect import Target

OK, FOUND, USAGE, REFUSED, UNREACHABLE = 0, 1, 2, 3, 4
#: A shell's exit code for a program that SIGPIPE ends.
_CLOSED = 128 + 13
#: The longest time for what a subcommand puts back after a signal, in seconds.
_CLEANING = 90
#: The same where the broker puts it back: what was taken and not acknowledged.
SOON = 10


@dataclasses.dataclass
class Printer:
    """The output of a subcommand: prints a value as JSON, or as text."""

    as_json: bool

    def show(self, value: Any, drawn_by: str, *, dry: bool = False, **more: Any) -> None:
        """Print a value.

        :param drawn_by: the function of :mod:`~kombu_binary_delay.cli.output` that draws it.
        :param dry: whether it was a dry run.
        :param more: further values, only for the JSON.
        """
        if self.as_json:
            more = {**more, "dry_run": True} if dry else more
            click.echo(json.dumps({**dataclasses.asdict(value), **more}, default=str))
            return
        # Rich comes with the extra `cli`; JSON works without it.
        from . import output  # noqa: PLC0415 - see above

        draw = getattr(output, drawn_by)
        drawn = output.dry(draw(value, dry=True)) if dry else draw(value)
        # Commands to copy are longer than a line.
        output.console().print(drawn, crop=False)

    def log(self, text: str) -> None:
        """Print a message about progress, apart from the result; it may name untrusted ids."""
        click.echo(wrapped(plain(text)), err=True)

    def confirm(self, text: str, *, yes: bool) -> None:
        """Print what happens next, and ask for consent.

        :param yes: whether the user has already consented.
        :raises OperationError: if the user says no, or there is no terminal to ask on.
        """
        self.log(text)
        if yes:
            return
        if not _is_terminal():
            raise OperationError(
                "nothing was changed: there is no terminal to confirm it on; give --yes"
            )
        if not click.confirm("Go on?", err=True):
            raise OperationError("nothing was changed, as you did not confirm it")


def subcommand(
    function: Callable[..., int | None],
    *,
    management: bool = False,
    drawn: bool = True,
    cleaning: int = _CLEANING,
) -> Callable[..., None]:
    """Return a function that runs a subcommand with its broker and output, and sets the exit code.

    :param management: whether it asks the management API.
    :param drawn: whether it uses :meth:`Printer.show`.
    :param cleaning: how many seconds it may go on after a signal.
    """

    @partial(accepts_places, management=management)
    @click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
    @click.pass_context
    @wraps(function)
    def run(context: click.Context, /, as_json: bool, **given: Any) -> None:
        printer = Printer(as_json)
        asked = asked_after(context.find_object(Asked) or Asked(), given)
        target = Target()
        try:
            if drawn and not as_json:
                _need_rich()
            target = asked.target()
            # Before a connection to a broker that may not be the one of the settings.
            _ = target.settings
            with _ended_by_signals(cleaning):
                code = function(target, printer, **given) or OK
        except click.ClickException as exc:
            if not as_json:
                raise
            code = _fail(printer, exc.exit_code, exc.format_message())
        except BinaryDelayError as exc:
            code = _fail(printer, _code(exc), exc)
        except BROKER_ERRORS as exc:
            # The connection to the broker may also be such a pipe.
            if isinstance(exc, BrokenPipeError) and _output_is_closed():
                code = _CLOSED
            else:
                code = UNREACHABLE if of_this_machine(exc) is None else USAGE
                code = _fail(printer, code, in_words(exc, target))
                _drop_unwritable()
        sys.exit(code)

    return cast("Callable[..., None]", run)


@contextmanager
def _ended_by_signals(cleaning: int) -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C: the subcommand puts back what it has begun to remove.

    A second SIGTERM ends it at once, and so does the end of a time, as the broker may not answer.
    A second SIGHUP does not: a shell that ends may send two.

    :param cleaning: that time, in seconds.
    """
    before: dict[int, Any] = {}
    is_ending = False
    if threading.current_thread() is threading.main_thread():
        known = (getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP"))
        handlers = {number: signal.getsignal(number) for number in known if number}
        usual = (signal.SIG_DFL, signal.default_int_handler)
        before = {number: handler for number, handler in handlers.items() if handler in usual}

    def end(number: int, _: object) -> None:
        nonlocal is_ending
        is_ending = True
        for sign, handler in before.items():
            signal.signal(sign, handler if sign != getattr(signal, "SIGHUP", 0) else signal.SIG_IGN)
        if hasattr(signal, "alarm"):
            signal.alarm(cleaning)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    for sign in before:
        signal.signal(sign, end)
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
        # Otherwise an alarm is the program's own.
        if is_ending and hasattr(signal, "alarm"):
            signal.alarm(0)


def _output_is_closed() -> bool:
    """Return whether the output is closed, as by ``head``; if so, redirect it to nowhere."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(output, 0)
    closed = any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    if closed:
        _drop_unwritable()
    return closed


def _drop_unwritable() -> None:
    """Redirect the output to nowhere if it cannot be written.

    Python writes the rest of its buffer when it ends, and a failure then is an exit status of 120.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _need_rich() -> None:
    """Check that Rich is installed, before the subcommand does anything.

    :raises click.UsageError: if it is not.
    """
    try:
        from . import output  # noqa: F401, PLC0415 - it comes with the extra `cli`
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != "rich":
            raise
        raise click.UsageError("this needs Rich: pip install rich; or give --json") from exc


def _code(exc: BinaryDelayError) -> int:
    if isinstance(exc, RefusedError):
        return REFUSED
    unheard = (UnreachableError, UnconfirmedError, UnansweredError)
    return UNREACHABLE if isinstance(exc, unheard) else USAGE


def _fail(printer: Printer, code: int, reason: object) -> int:
    if printer.as_json:
        click.echo(json.dumps({"error": str(reason)}))
    else:
        click.secho(wrapped(plain(str(reason))), err=True, fg="red")
    return code


def wrapped(text: str, indent: int = 2) -> str:
    """Return a paragraph with its lines broken between words, to the terminal's width.

    :param indent: how far to the right the lines after the first begin.
    """
    if not sys.stderr.isatty():
        return text
    return textwrap.fill(
        text,
        max(shutil.get_terminal_size().columns, indent + 40),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _is_terminal() -> bool:
    return sys.stdin.isatty()


yes = click.option("--yes", is_flag=True, help="Do not ask; without a terminal, it is needed.")
dry_run = click.option(
    "--dry-run", is_flag=True, help="Only show what would be done, and change nothing."
)


def _check_queue_names(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> Any:
    for name in values:
        if not 0 < len(name.encode(errors="surrogateescape")) <= MAX_KEY:
            raise click.BadParameter(f"a queue's name has 1 to {MAX_KEY} bytes, got {name!r}")
    return values


queues_of_yours = click.option(
    "--queue",
    "queues",
    multiple=True,
    metavar="NAME",
    callback=_check_queue_names,
    help="Lead to this queue of yours, too; may be repeated.",
)
ladder = click.option(
    "--ladder",
    metavar="NAME",
    help="A ladder by its name, as 'status' shows it, or shorter: 250ms-2x30, celery.  [default: "
    "that "
    "of the settings]",
)
