"""``schedule``: recurring tasks without beat."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from kombu_binary_delay import schedules

from .command import FOUND, OK, Printer, dry_run, subcommand
from .connect import Target


@click.group(
    name="schedule",
    short_help="Repeat tasks by Celery's beat_schedule, without beat.",
    help="""Repeat tasks by Celery's beat_schedule, without beat: the workers send them.

    'apply' takes the schedules of the app that -A names to the broker. Run it when you deploy.

    \b
      celery -A shop binary-delay schedule apply
      kombu-binary-delay schedule list -A shop
    """,
)
def schedule() -> None:
    """Repeat tasks by Celery's beat_schedule, without beat."""


def _app(broker: Target) -> Any:
    if broker.app is None:
        raise click.UsageError("schedules belong to a Celery app: name it with -A")
    return broker.app


@schedule.command(
    "apply",
    short_help="Make the schedules on the broker those of the app.",
    help="""Make the schedules on the broker those of the app's beat_schedule.

    Adds, changes and removes by name what differs, and prints it. Doing it twice, or in several
    programs at once, changes nothing more. What is paused stays paused.
    """,
)
@dry_run
@subcommand
def apply(broker: Target, printer: Printer, dry_run: bool) -> None:
    """Make the schedules on the broker those of the app."""
    app = _app(broker)
    with broker.delaying() as connection:
        done = schedules.apply(app, dry_run=dry_run, connection=connection)
    printer.show(done, "applied", dry=dry_run)


@schedule.command(
    "list",
    short_help="List the schedules, and how far each has come.",
    help="""List the schedules: when each is due next, and when it ran last.

    Ends with 1 if one is overdue by ten seconds: then no worker of the app runs, or what a worker
    needs is missing.
    """,
)
@subcommand
def list_(broker: Target, printer: Printer) -> int:
    """List the schedules, and how far each has come."""
    app = _app(broker)
    with broker.delaying() as connection:
        of_apps = schedules.listed(app, connection=connection)
    printer.show(of_apps, "schedules")
    return FOUND if of_apps.overdue else OK


def _by_name(
    name: str, short_help: str, long_help: str, change: Callable[..., Any], done: str
) -> None:
    @schedule.command(name, short_help=short_help, help=long_help)
    @click.argument("name")
    @partial(subcommand, drawn=False)
    def change_one(broker: Target, printer: Printer, name: str) -> None:
        app = _app(broker)
        with broker.delaying() as connection:
            result = change(app, name, connection=connection)
        if printer.as_json:
            click.echo(json.dumps({"schedule": name, "done": done, "id": result}))
        else:
            click.echo(f"{done} {name}" + (f", as the task {result}" if result else ""))


_by_name(
    "pause",
    "Send nothing of a schedule for now.",
    "Send nothing of a schedule until it is resumed.",
    schedules.pause,
    "paused",
)
_by_name(
    "resume",
    "Resume a schedule.",
    "Resume a schedule. What was due while it was paused does not run.",
    schedules.resume,
    "resumed",
)
_by_name(
    "remove",
    "Remove a schedule.",
    "Remove a schedule. The next 'apply' of an app whose beat_schedule has it adds it again.",
    schedules.remove,
    "removed",
)
_by_name(
    "trigger",
    "Send a schedule's task now.",
    "Send a schedule's task now, beside its due times. It may be paused.",
    schedules.trigger,
    "triggered",
)
