"""The subcommands ``spark plan``, ``publish`` and ``journal-export``: parse, call, print."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from kombu_binary_delay.export.files import write_file
from kombu_binary_delay.ladder.ladder import Ladder
from kombu_binary_delay.settings import KEY, Settings
from kombu_binary_delay.spark.checks import check_number, read_settings

from .shared import (
    FAILED,
    broker,
    check_call,
    columns,
    conf,
    console,
    given_broker,
    limits_of,
    local,
    namespace,
    pairs,
    settings_before,
    spark_session,
    usage,
)

if TYPE_CHECKING:
    from kombu_binary_delay.spark.publish import Progress


@click.command(
    help="""Publish a delayed Celery task for each row in TABLE.

    With --column action=NAME, a row can cancel or reschedule its task instead. Exits with 1 where a
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
@columns
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
    "--slice-seconds",
    type=float,
    default=15.0,
    show_default=True,
    help="How long to publish between two commits of receipts.",
)
@conf
def publish(path: str, conf: tuple[str, ...], columns: tuple[str, ...], **options: Any) -> None:
    """Publish a delayed Celery task for each row in TABLE."""
    check_call(options["app"])
    from kombu_binary_delay.spark.columns import use  # noqa: PLC0415 - with Spark's
    from kombu_binary_delay.spark.publish import publish  # noqa: PLC0415
    from kombu_binary_delay.spark.tables import Place, read  # noqa: PLC0415

    if options["app"] is None:
        options["broker"] = given_broker(options["broker"])
    with usage():
        options["settings"] = _settings(options["settings"], options["app"])
        for name in ("max_rate", "horizon"):
            if options[name] is not None:
                check_number(name, options[name])
        session = spark_session(conf, options["broker"])
        rows = read(session, path)
        named = pairs(columns)
        out, errors = console(), console(stderr=True)
        out.print(str(use(rows, named)))
        begun = time.monotonic()

        def show(progress: Progress) -> None:
            done = progress.confirmed + progress.failed
            seconds = time.monotonic() - begun
            errors.print(f"{seconds:6.0f} s  {done:,} of {done + progress.remaining:,} rows")

        done = publish(rows, columns=named, on_progress=show, **options)
    out.print(_line(done, dry=options["dry_run"]))
    if done.rejected:
        where = options["rejects"] or str(Place.parse(options["receipts"]).beside("rejects"))
        where = "" if options["dry_run"] else f", see {where.removeprefix('parquet:')}"
        out.print(f"{done.rejected:,} rows are rejected{where}:")
        for reason, count in done.rejections.items():
            out.print(f"{count:>12,}  {reason}")
    if done.by_send_task:
        out.print(
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


def _line(progress: Progress, *, dry: bool) -> str:
    """Return what a run has done as one line; of a dry run, what it would do."""
    counts = {
        "cancelled": progress.cancelled,
        "rescheduled": progress.rescheduled,
        "to cancel": progress.to_cancel,
        "to reschedule": progress.to_reschedule,
    }
    if dry:
        tasks = progress.remaining - progress.to_cancel - progress.to_reschedule
        first = f"would publish {tasks:,}"
    else:
        first = (
            f"{progress.published:,} published ({progress.rate:,.0f}/s), {progress.failed:,} failed"
        )
    return (
        f"{first}, {progress.rejected:,} rejected, {progress.already:,} already, "
        f"{progress.later:,} later"
        + "".join(f", {count:,} {what}" for what, count in counts.items() if count)
    )


@click.command(
    "journal-export",
    help="""Add to a table what the journal has got since the last export.""",
)
@broker
@namespace
@click.option("--output", required=True, metavar="TABLE", help="The table to add to.")
@conf
def journal_export(broker: str | None, namespace: str, output: str, conf: tuple[str, ...]) -> None:
    """Add to a table what the journal has got since the last export."""
    check_call()
    from kombu_binary_delay.spark import schema as s  # noqa: PLC0415 - with Spark's
    from kombu_binary_delay.spark.journal import export_journal  # noqa: PLC0415
    from kombu_binary_delay.spark.tables import read  # noqa: PLC0415

    broker = given_broker(broker)
    session = spark_session(conf, broker)
    with usage():
        export_journal(session, broker, output, namespace=namespace)
    events = read(session, output).where(f"not event <=> '{s.COMPLETE}'")
    console().print(f"{output} has {events.count():,} events")


@click.command(
    help="""Forecast the load on the broker of the messages in TABLE.

    Exits with 1 where a limit is exceeded.
    """
)
@click.argument("path", metavar="TABLE")
@click.option(
    "--ladder",
    default=lambda: _ladder_before().name,
    show_default=Ladder.default().name,
    help="A ladder, as the names of its queues have it.",
)
@columns
@click.option(
    "--horizon",
    type=float,
    metavar="SECONDS",
    help="Publish each message no sooner than so long before it is due.",
)
@click.option(
    "--carries",
    type=click.FloatRange(min=0, min_open=True),
    metavar="NUMBER",
    help="How many messages a second the broker delivers.  [default: as measured on two cores]",
)
@click.option(
    "--limit",
    "limits",
    metavar="NAME=NUMBER",
    multiple=True,
    help="Exit with 1 above it, such as waiting=5000000. NAME is waiting, bytes, due_per_second, "
    "published_per_second, late, beyond or undated; may be repeated.",
)
@click.option("--output", metavar="TABLE", help="Also write the plan there, minute by minute.")
@click.option("--report", metavar="FILE", help="Also draw the plan as one HTML file.")
@conf
def plan(
    path: str,
    ladder: str,
    columns: tuple[str, ...],
    horizon: float | None,
    carries: float | None,
    limits: tuple[str, ...],
    output: str | None,
    report: str | None,
    conf: tuple[str, ...],
) -> None:
    """Forecast the load on the broker of the messages in TABLE."""
    check_call()
    from kombu_binary_delay.spark.measured import SUSTAINED  # noqa: PLC0415 - with Spark's
    from kombu_binary_delay.spark.plan import Limits, check, plan, summarize  # noqa: PLC0415
    from kombu_binary_delay.spark.tables import overwrite, read  # noqa: PLC0415

    allowed = limits_of(Limits, limits)
    page = local(report) if report else None
    with usage():
        chosen = Ladder.from_name(ladder)
        session = spark_session(conf)
        planned = plan(read(session, path), chosen, columns=pairs(columns), horizon=horizon)
        if output:
            overwrite(planned, output)
            planned = read(session, output)
    rate = SUSTAINED if carries is None else carries
    summary = summarize(planned, carries=rate)
    verdicts = check(summary, allowed)
    out = console()
    out.print(f"{'ladder':>22}  {chosen.name}")
    for name in _FIGURES:
        verdict = verdicts.get(name, {"passed": True})
        bound = f"  of at most {verdict['allowed']:,g}" if "allowed" in verdict else ""
        out.print(
            f"{name:>22}  {summary[name]:>15,.1f}{bound}", style="" if verdict["passed"] else "red"
        )
    if page is not None:
        from kombu_binary_delay.spark.report import plan_page  # noqa: PLC0415

        page.parent.mkdir(parents=True, exist_ok=True)
        write_file(page, plan_page(planned, allowed, rate, path))
        out.print(str(page))
    if not all(verdict["passed"] for verdict in verdicts.values()):
        sys.exit(FAILED)


#: The figures of a plan that are printed.
_FIGURES = (
    "messages",
    "hops_per_message",
    "waiting",
    "bytes",
    "due_per_second",
    "most_due",
    "carries",
    "late",
    "published_per_second",
    "beyond",
    "undated",
)


def _ladder_before() -> Ladder:
    with usage():
        return Settings.from_transport_options({KEY: settings_before()}).topology().ladder
