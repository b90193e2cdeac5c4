"""The subcommand ``spark publish``: parse, call, print."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from kombu_binary_delay.spark.checks import check_number, read_settings

from .before import check_before
from .progress import following, span
from .shared import (
    FAILED,
    broker,
    check_call,
    conf,
    console,
    given_broker,
    settings_before,
    spark_session,
    usage,
)

if TYPE_CHECKING:
    from kombu_binary_delay.spark.publish import Progress


@click.command(
    help="""Publish a delayed Celery task for each row in TABLE.

    With a column action, a row can cancel or reschedule its task instead. Exits with 1 where a
    message has not been published: where a row is rejected, or its publish has failed.
    """
)
@click.argument("path", metavar="TABLE")
@broker
@click.option(
    "--job-id", required=True, help="The job's name. A task's id is made of it and the key."
)
@click.option(
    "--receipts",
    required=True,
    metavar="TABLE",
    help="The table to which a receipt for each message is added.",
)
@click.option(
    "--rejects",
    metavar="TABLE",
    help="The table for rows that cannot be published.  [default: <receipts>-rejects]",
)
@click.option("--app", metavar="MODULE:NAME", help="A Celery app that executors can import.")
@click.option("--key", default="key", show_default=True, help="The column of the keys.")
@click.option(
    "--settings", metavar="JSON", help="Settings of the transport, such as '{\"radix\": 4}'."
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with a job: publish only what the broker has not taken yet.",
)
@click.option("--dry-run", is_flag=True, help="Count only; publish and write nothing.")
@click.option(
    "--max-rate",
    type=float,
    metavar="NUMBER",
    help="Messages a second at most, of all publishers together.",
)
@click.option(
    "--horizon",
    type=float,
    metavar="SECONDS",
    help="Publish only what is due within so long; the rest with --resume later.",
)
@click.option(
    "--past",
    type=click.Choice(["send", "reject"]),
    default="send",
    show_default=True,
    help="What to do with a task that is due already.",
)
@click.option(
    "--publishers",
    type=int,
    default=2,
    show_default=True,
    help="How many of Spark's tasks publish at once.",
)
@click.option(
    "--slice-rows",
    type=int,
    default=200_000,
    show_default=True,
    help="Rows to publish between two commits of receipts.",
)
@conf
def publish(path: str, conf: tuple[str, ...], **options: Any) -> None:
    """Publish a delayed Celery task for each row in TABLE."""
    check_call(options["app"])
    from kombu_binary_delay.spark.publish import publish  # noqa: PLC0415 - with Spark's
    from kombu_binary_delay.spark.tables import read  # noqa: PLC0415

    if options["app"] is None:
        options["broker"] = given_broker(options["broker"])
    with usage():
        options["settings"] = _settings(options["settings"], options["app"])
        for name in ("max_rate", "horizon"):
            if options[name] is not None:
                check_number(name, options[name])
        check_before(
            conf,
            reads=(path,),
            writes=(options["receipts"], options["rejects"]),
            broker=options["broker"],
            app=options["app"],
        )
        session = spark_session(conf)
        with following(session) as phase:
            phase("preparing the rows")
            done = publish(
                read(session, path),
                on_progress=lambda progress: phase("publishing", _rows(progress)),
                **options,
            )
    console().print(_line(done))
    if done.by_send_task:
        console().print(
            f"{done.by_send_task:,} messages were made by send_task, one by one, which takes "
            f"longer: {'; '.join(done.reasons)}"
        )
    if done.failed or done.rejected:
        sys.exit(FAILED)


def _settings(given: str | None, app: str | None) -> dict[str, Any] | None:
    """Return the settings of the transport; None for those of the app, or the defaults."""
    before = settings_before()
    if before and app is not None and given is None:
        raise click.UsageError(
            f"the app has its own settings, and {', '.join(before)} is given before 'spark' or in "
            f"the environment: say with --settings which count"
        )
    settings = None if given is None else read_settings(given)
    if before and app is None:
        return {**before, **(settings or {})}
    return settings


def _rows(progress: Progress) -> str:
    """Return how many rows are done, with a rate and the time left as soon as there is one."""
    done = progress.confirmed + progress.failed
    text = f"{done:,} of {done + progress.remaining:,} rows"
    if not progress.rate:
        return text
    return f"{text}, {progress.rate:,.0f}/s, {span(progress.remaining / progress.rate)} left"


def _line(progress: Progress) -> str:
    """Return what a run has done as one line."""
    amended = {
        "cancelled": progress.cancelled,
        "rescheduled": progress.rescheduled,
        "to cancel": progress.to_cancel,
        "to reschedule": progress.to_reschedule,
    }
    return (
        f"{progress.published:,} published ({progress.rate:,.0f}/s), "
        f"{progress.failed:,} failed, {progress.remaining:,} remaining, "
        f"{progress.rejected:,} rejected, {progress.already:,} already, "
        f"{progress.later:,} later"
        + "".join(f", {count:,} {what}" for what, count in amended.items() if count)
    )
