"""The subcommands ``spark audit``, ``audit-follow`` and ``report``: parse, call, print."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from kombu_binary_delay.celery_side.urls import is_broker_url
from kombu_binary_delay.export.files import write_file

from .shared import (
    FAILED,
    NOT_YET,
    allow,
    broker,
    check_call,
    check_job,
    conf,
    console,
    first_line,
    given_broker,
    job_id,
    late_after,
    limits_of,
    local,
    namespace,
    patience,
    receipts,
    spark_session,
    usage,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@click.command(
    help="""Give a verdict on each task, and write data, summary.json and report.html.

    Exits with 1 where a threshold is exceeded: by default, a task that is lost, early, or amended
    in vain. So it does where no task is judged, unless --allow judged=0 says that this may be; and
    with 3 where no task is judged yet, since all of them still wait.
    """
)
@receipts
@click.option(
    "--journal",
    required=True,
    metavar="TABLE OR URL",
    help="What journal-export has written, a folder of the journal's files, or a broker's URL.",
)
@namespace
@click.option("--output", required=True, metavar="PATH", help="A folder for the results.")
@click.option(
    "--verdicts",
    "kept",
    metavar="TABLE",
    help="Also keep the verdicts there: in a table that can merge, a task's new verdict replaces "
    "the old one. Plain files are overwritten.",
)
@job_id
@late_after
@patience
@click.option(
    "--complete",
    is_flag=True,
    help="The journal has all that has happened until now, though its last event is older. Not for "
    "a table of journal-export, which says itself until when it is complete.",
)
@allow
@conf
def audit(
    receipts: str | None,
    journal: str,
    namespace: str,
    output: str,
    kept: str | None,
    job_id: str | None,
    late_after: float,
    patience: float,
    complete: bool,
    allow: tuple[str, ...],
    conf: tuple[str, ...],
) -> None:
    """Write a verdict on each task, with data, summary.json and report.html."""
    check_call()
    from kombu_binary_delay.spark import schema as s  # noqa: PLC0415 - with Spark's
    from kombu_binary_delay.spark.audit import Thresholds, audit, lateness  # noqa: PLC0415
    from kombu_binary_delay.spark.journal import read_journal  # noqa: PLC0415
    from kombu_binary_delay.spark.report import audit_page  # noqa: PLC0415
    from kombu_binary_delay.spark.tables import Place, merge, overwrite, read  # noqa: PLC0415

    folder = local(output)
    check_job(job_id, receipts)
    thresholds = limits_of(Thresholds, allow)
    is_broker = is_broker_url(journal)
    session = spark_session(conf, journal if is_broker else None)
    table = None
    if receipts is not None:
        table = read(session, receipts, s.RECEIPTS)
        if job_id is not None:
            table = table.where(table["job_id"] == job_id)
    with usage():
        events = read_journal(session, journal, namespace=namespace)
        is_marked = f"event = '{s.COMPLETE}'"
        if complete and not is_broker and not events.where(is_marked).limit(1).isEmpty():
            raise click.UsageError(
                f"{journal} says until when it is complete, as a table of journal-export does: "
                f"leave --complete out"
            )
        judged = audit(
            table,
            events,
            late_after=late_after,
            patience=patience,
            until=datetime.now(UTC) if complete or is_broker else None,
        )
    if job_id is not None and table is not None:
        # Not sooner: the events of all tasks are needed to find the journal's end.
        judged = judged.join(table.select("task_id"), "task_id", "left_semi")
    # An audit that ends half-way leaves none beside other verdicts.
    summary_file = folder / "summary.json"
    summary_file.unlink(missing_ok=True)
    overwrite(judged, Place("parquet", f"{output}/verdicts"))
    verdicts = session.read.parquet(f"{output}/verdicts")
    overwrite(lateness(verdicts), Place("parquet", f"{output}/lateness"))
    if kept is not None:
        with usage():
            merge(verdicts, kept, ("task_id", "retries"))
    jobs = _jobs(table)
    page, summary = audit_page(verdicts, thresholds, jobs)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "report.html", page)
    write_file(summary_file, json.dumps({"jobs": jobs, **summary}, indent=2) + "\n")
    show(summary)
    console().print(str(folder / "report.html"))
    _exit(summary)


@click.command(
    "audit-follow",
    help="""Judge each task, and go on until stopped.

    Each step adds what the broker's journal has got to a table, judges the tasks of the last days,
    and appends the verdicts that are new or have changed. A second run goes on where the first has
    ended. `spark report` draws the verdicts so far.

    With --once, exits with 1 where a threshold is exceeded, as audit does.
    """,
)
@broker
@namespace
@receipts
@click.option(
    "--journal",
    required=True,
    metavar="TABLE",
    help="The table of the journal, to which the broker's new events are added.",
)
@click.option("--output", required=True, metavar="TABLE", help="The table of the verdicts.")
@job_id
@late_after
@patience
@click.option(
    "--window",
    type=float,
    default=3 * 86_400.0,
    show_default=True,
    metavar="SECONDS",
    help="Tasks that were due and seen longer ago keep their verdict.",
)
@click.option(
    "--every",
    type=click.FloatRange(min=0),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="The time between the beginnings of two steps.",
)
@click.option("--once", is_flag=True, help="Do one step, as for a scheduler.")
@allow
@conf
def audit_follow(
    broker: str | None,
    namespace: str,
    receipts: str | None,
    journal: str,
    output: str,
    job_id: str | None,
    late_after: float,
    patience: float,
    window: float,
    every: float,
    once: bool,
    allow: tuple[str, ...],
    conf: tuple[str, ...],
) -> None:
    """Judge each task, and go on until stopped."""
    check_call()
    from kombu_binary_delay.spark import schema as s  # noqa: PLC0415 - with Spark's
    from kombu_binary_delay.spark.audit import Thresholds, summarize  # noqa: PLC0415
    from kombu_binary_delay.spark.follow import follow, read_verdicts  # noqa: PLC0415
    from kombu_binary_delay.spark.journal import export_journal  # noqa: PLC0415
    from kombu_binary_delay.spark.tables import read  # noqa: PLC0415

    check_job(job_id, receipts)
    thresholds = limits_of(Thresholds, allow)
    url = given_broker(broker)
    session = spark_session(conf, url)
    is_first = True
    while True:
        begun = time.monotonic()
        try:
            export_journal(session, url, journal, namespace=namespace)
        except Exception as exc:
            # At the start, the broker may be the wrong one.
            if once or is_first:
                raise
            console(stderr=True).print(f"tried again in {every:g} s: {first_line(exc)}")
        else:
            is_first = False
            with usage():
                changed = follow(
                    read(session, receipts, s.RECEIPTS) if receipts else None,
                    read(session, journal, s.JOURNAL),
                    output,
                    job_id=job_id,
                    late_after=late_after,
                    patience=patience,
                    window=window,
                )
            _show_changed(changed)
        if once:
            summary = summarize(read_verdicts(session, output), thresholds)
            show(summary)
            _exit(summary)
            return
        time.sleep(max(0.0, begun + every - time.monotonic()))


@click.command(
    help="""Draw the verdicts at PATH as one HTML file: a folder that an audit has written, or a
    table of verdicts."""
)
@click.argument("path")
@click.option("--output", required=True, metavar="FILE", help="The HTML file.")
@conf
def report(path: str, output: str, conf: tuple[str, ...]) -> None:
    """Draw the verdicts at PATH as one HTML file."""
    check_call()
    from kombu_binary_delay.spark import schema as s  # noqa: PLC0415 - with Spark's
    from kombu_binary_delay.spark.follow import read_verdicts  # noqa: PLC0415
    from kombu_binary_delay.spark.report import audit_page  # noqa: PLC0415
    from kombu_binary_delay.spark.tables import Place, existing, read  # noqa: PLC0415

    file = local(output)
    session = spark_session(conf)
    thresholds, jobs = _judged(path)
    of_audit = Place("parquet", f"{path}/verdicts")
    if str(Place.parse(path)) == f"parquet:{path}" and existing(session, of_audit, s.VERDICTS):
        verdicts = read(session, of_audit, s.VERDICTS)
    elif "judged_at" in read(session, path).columns:
        verdicts = read_verdicts(session, path)
    else:
        verdicts = read(session, path, s.VERDICTS)
    page, _ = audit_page(verdicts, thresholds, jobs)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, page)
    console().print(str(file))


def _exit(summary: dict[str, Any]) -> None:
    from kombu_binary_delay.spark.audit import NOT_JUDGED_YET  # noqa: PLC0415 - see above

    if summary["outcome"] == NOT_JUDGED_YET:
        console().print("not judged yet: every task still waits; audit again when they were due")
        sys.exit(NOT_YET)
    judged = summary["thresholds"].get("judged")
    if judged and not judged["passed"]:
        console().print(
            f"{judged['measured']:,} tasks are judged, and {judged['allowed']:,g} must be: are the "
            f"job, the receipts and the journal those that you mean? --allow judged=0 allows none"
        )
    if not summary["passed"]:
        sys.exit(FAILED)


def _jobs(receipts: DataFrame | None) -> list[str]:
    """Return the jobs of receipts; a count instead of the names if a title has no room for them."""
    if receipts is None:
        return []
    rows = receipts.select("job_id").dropna().distinct().sort("job_id").limit(4).collect()
    names = [row["job_id"] for row in rows]
    return names if len(names) < 4 else [*names[:2], "others"]


def _judged(path: str) -> tuple[Any, list[str]]:
    """Read an audit's thresholds and jobs; nothing if its files are not on this machine."""
    from kombu_binary_delay.spark.audit import Thresholds  # noqa: PLC0415 - see above

    try:
        summary = json.loads((local(path) / "summary.json").read_text(encoding="utf-8"))
    except (OSError, click.BadParameter):
        return None, []
    none = dict.fromkeys(limit.name for limit in fields(Thresholds))
    limits = {name: limit["allowed"] for name, limit in summary["thresholds"].items()}
    return Thresholds(**{**none, **limits}), summary["jobs"]


def _show_changed(changed: DataFrame) -> None:
    rows = changed.groupBy("verdict").count().orderBy("verdict").collect()
    if rows:
        counts = ", ".join(f"{row['count']:,} {row['verdict']}" for row in rows)
        console().print(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {counts}")


def show(summary: dict[str, Any]) -> None:
    """Print how many tasks have each verdict."""
    for name, count in summary["verdicts"].items():
        if count:
            console().print(f"{count:>12,}  {name}")
    for name, what in (
        ("postponed", "were postponed"),
        ("misdated", "have an event of a wrong clock"),
    ):
        if summary[name]:
            console().print(f"{summary[name]:,} of {summary['tasks']:,} tasks {what}")
