"""``cancel`` and ``reschedule``: amend delayed tasks."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import IO, Any

import click

from kombu_binary_delay import operate
from kombu_binary_delay.operate.amend import CANCEL, RESCHEDULE
from kombu_binary_delay.operate.text import plural
from kombu_binary_delay.operate.waiting import JOURNAL

from .command import FOUND, OK, Printer, dry_run, subcommand
from .command import yes as no_question
from .connect import Target
from .sources import TaskSource
from .sources import choose as source
from .values import UUID, Countdown, Moment


class _TakesIds(click.Command):
    """A command whose arguments are ids, which may look like options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as exc:
            raise click.UsageError(
                f"{exc.format_message()} Give an id that begins with a dash after '--', as in "
                f"'{ctx.command_path} -- ID'.",
                ctx,
            ) from exc


def _select(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select tasks: by ids, or by patterns as for ``tasks``."""
    options: list[Callable[..., Any]] = [
        click.argument("ids", metavar="[ID]...", nargs=-1),
        click.option(
            "--file",
            type=click.File(encoding="utf-8"),
            help="A file with an id a line; - is standard input. So is - as an ID.",
        ),
        click.option("--name", metavar="PATTERN", help="All tasks that wait with such a name."),
        click.option(
            "--queue", metavar="PATTERN", help="All that wait for such a queue, or exchange:key."
        ),
        click.option("--due-after", type=Moment(), metavar="WHEN", help="All due then or later."),
        click.option("--due-before", type=Moment(), metavar="WHEN", help="All due before."),
        source,
        no_question,
        dry_run,
    ]
    for option in reversed(options):
        function = option(function)
    return function


@click.command(
    cls=_TakesIds,
    short_help="Cancel tasks that wait.",
    help="""Cancel tasks or messages that wait, by id, or all that 'tasks' finds by a pattern.

    A cancelled task stays on the broker until it is due. Then the consumer that gets it drops it,
    and a Celery worker reports it as revoked. What a worker has already got runs. An id that
    Celery makes is not looked up; of another one, the journal is asked, or you.

    A cancellation by id is remembered for 31 days, or as the setting amendments_max_age says; with
    an --eta more than two days ahead, for so long from now and again from a day before that time.
    By a pattern, the due times are known. For a pattern or a file, it says how many there are and
    asks before it acts; without a terminal, give --yes. Ends with 1 if some could not be found or
    cancelled.

    An id is whatever its publisher has chosen. Give one that begins with a dash after --, where
    nothing is read as an option, and one with blanks or signs of the shell in quotes.

    \b
      kombu-binary-delay cancel 2f1c3a52-5b0d-4a37-b2a5-3f6c44a7f0a1
      kombu-binary-delay -A shop cancel --name 'shop.mail.*' --dry-run
      kombu-binary-delay cancel --file ids.txt --eta 2030-01-31T12:00+00:00 --yes
      kombu-binary-delay cancel --eta 2h --yes -- '-7 of 9'
      psql -Atc 'select id from void' | kombu-binary-delay -A shop cancel - --yes
    """,
)
@click.option(
    "--eta",
    type=Moment(),
    metavar="WHEN",
    help="When the last of them is due. It is remembered beyond that time.",
)
@_select
@subcommand
def cancel(
    broker: Target, printer: Printer, eta: int | None, yes: bool, dry_run: bool, **given: Any
) -> int:
    """Cancel tasks or messages that wait."""
    if eta is not None and _is_pattern(given):
        raise click.UsageError("--eta goes with ids: a pattern finds the due times by itself")
    return _amend(broker, printer, CANCEL, eta, given, yes=yes, dry_run=dry_run)


@click.command(
    cls=_TakesIds,
    short_help="Postpone tasks that wait.",
    help="""Postpone tasks or messages that wait, by id, or all that 'tasks' finds by a pattern.

    Each is delayed again when it is first due, for the time that is left then. So none runs before
    it is first due, nor before a later time that it already waits for again. The first must be
    within 31 days from now, or as the setting amendments_max_age says: a pattern finds out, an id
    does not. A cancelled task stays cancelled. For the rest, see 'cancel --help'.

    \b
      kombu-binary-delay reschedule 2f1c3a52-5b0d-4a37-b2a5-3f6c44a7f0a1 \\
        --countdown 7200
      kombu-binary-delay -A shop reschedule --queue mail \\
        --eta 2030-01-31T12:00+00:00 --dry-run
    """,
)
@click.option("--eta", type=Moment(), metavar="WHEN", help="The new time.")
@click.option(
    "--countdown",
    type=Countdown(),
    metavar="SECONDS",
    help="Or how many seconds from now.",
)
@_select
@subcommand
def reschedule(
    broker: Target,
    printer: Printer,
    eta: int | None,
    countdown: int | None,
    yes: bool,
    dry_run: bool,
    **given: Any,
) -> int:
    """Postpone tasks or messages that wait."""
    if (eta is None) == (countdown is None):
        raise click.UsageError("say when: --eta or --countdown")
    due = countdown if eta is None else eta
    return _amend(broker, printer, RESCHEDULE, due, given, yes=yes, dry_run=dry_run)


def _amend(
    broker: Target,
    printer: Printer,
    action: str,
    due: int | None,
    given: dict[str, Any],
    *,
    yes: bool,
    dry_run: bool,
) -> int:
    if due is not None and due <= time.time() * 1000:
        raise click.UsageError("the time has passed; give one that is still to come")
    more: dict[str, Any] = {}
    is_seen = not _is_pattern(given) and given["file"] is None and "-" not in given["ids"]
    if is_seen:
        is_seen = yes or _are_ids(broker, action, given["ids"])
    if _is_pattern(given):
        if given["ids"] or given["file"]:
            raise click.UsageError("give ids or a pattern, not both")
        chosen, more = _matching(broker, **given)
    else:
        ids = _ids(given["ids"], given["file"])
        if not ids:
            raise click.UsageError(
                f"say what to {action}: ids, --file, --name, --queue or a due time"
            )
        chosen = operate.Chosen(dict.fromkeys(ids, due if action == CANCEL else None))
    if unseen := more.get("unseen"):
        printer.log(f"{'note:' if more['complete'] else '!'} {'; '.join(unseen)}")
    with broker.delaying() as connection:
        act = partial(
            operate.amend, connection, action, chosen, due if action == RESCHEDULE else None
        )
        # Find bad ids, and a broker without support, before the user is asked.
        planned = act(dry_run=True)
        if planned.ids and not dry_run and not is_seen:
            printer.confirm(f"{action} {_tasks(planned.ids)}", yes=yes)
        done = planned if dry_run else act()
    printer.show(done, "amended" if more else "amended_by_id", dry=dry_run, **more)
    all_of_them = more.get("complete", True) and not done.without_id and not done.left
    return OK if all_of_them else FOUND


def _is_pattern(given: dict[str, Any]) -> bool:
    words = "name", "queue", "due_after", "due_before"
    return any(given[word] is not None for word in words)


def _are_ids(broker: Target, action: str, ids: tuple[str, ...]) -> bool:
    """Return whether what was typed is known to be ids: Celery's own, or those of the journal.

    :raises click.UsageError: for a pattern.
    :raises OperationError: for an id that the journal does not know.
    """
    for id_ in ids:
        if set(id_) & set("*?["):
            raise click.UsageError(
                f"{id_!r} looks like a pattern, and this takes ids: give --name {shlex.quote(id_)} "
                f"for all tasks with such a name; an id with such signs goes into a --file"
            )
    others = [id_ for id_ in ids if not UUID.fullmatch(id_)]
    if not others:
        return True
    with broker.plain() as connection:
        if not operate.has_journal(connection, broker.settings.namespace):
            return False
    with ExitStack() as stack:
        table = TaskSource.of(broker, stack, JOURNAL, None).tasks()
    known = {task.id for task in table.tasks(operate.Selection(ids=frozenset(others)))}
    for id_ in others:
        if id_ not in known:
            raise operate.OperationError(
                f"no task that waits has the id {id_!r}, says the journal, and it is no id that "
                f"Celery makes; to {action} tasks by their name, give --name; to {action} it "
                f"nevertheless, --yes"
            )
    return True


def _matching(
    broker: Target,
    *,
    name: str | None,
    queue: str | None,
    due_after: int | None,
    due_before: int | None,
    source: str | None,
    node_command: str | None,
    **_: Any,
) -> tuple[operate.Chosen, dict[str, Any]]:
    select = operate.Selection(name, queue, frozenset(), due_after, due_before)
    with ExitStack() as stack:
        table = TaskSource.of(broker, stack, source, node_command).tasks()
    chosen = operate.choose(table.tasks(select))
    more = {
        "source": table.source,
        "complete": table.complete,
        "unseen": table.unseen(select),
    }
    return chosen, more


def _ids(given: tuple[str, ...], file: IO[str] | None) -> tuple[str, ...]:
    listed = [id_ for id_ in given if id_ != "-"]
    for lines in (file, sys.stdin if "-" in given else None):
        if lines is not None:
            try:
                # Excel and PowerShell begin a file with a byte-order mark.
                listed += filter(None, (line.removeprefix("\ufeff").strip() for line in lines))
            except UnicodeDecodeError as exc:
                raise click.UsageError(f"the ids cannot be read: {exc}") from exc
    return tuple(dict.fromkeys(listed))


def _tasks(ids: tuple[str, ...]) -> str:
    first = ", ".join(ids[:3]) + (", …" if len(ids) > 3 else "")
    return f"{plural(len(ids), 'task')}: {first}"
