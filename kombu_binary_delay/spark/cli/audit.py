"""The subcommands ``spark audit`` and ``spark report``: parse, call, print."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kombu_binary_delay.celery_side.urls import is_broker_url
from kombu_binary_delay.export.files import write_file

from .before import check_before
from .progress import following
from .shared import (
    FAILED,
    check_call,
    check_job,
    conf,
    console,
    depths,
    job_id,
    late_after,
    limits_of,
    local,
    namespace,
    planned,
    receipts,
    spark_session,
    usage,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@click.command(
    help="""Give a verdict on each task, and write data, summary.json and report.html.

    Exits with 1 where a threshold is exceeded: by default, a task that is lost or early. So it does
    where no task is judged, unless --allow judged=0 says that this may be.
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
    help="Also keep the verdicts there: a task's new verdict replaces the old one. A table that "
    "cannot merge is overwritten.",
)
@job_id
@late_after
@click.option(
    "--patience",
    type=float,
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="A task that has not come and ended so long after it was due is lost: give more than the "
    "longest run, and the wait in a worker before it.",
)
@click.option(
    "--complete",
    is_flag=True,
    help="The journal has all that has happened until now, though its last event is older. Not for "
    "a table of journal-export, which says itself until when it is complete.",
)
@click.option(
    "--allow",
    metavar="NAME=NUMBER",
    multiple=True,
    help="Allow so many, or so many seconds, such as duplicates=10 or p99=5. NAME is early, "
    "lost, duplicates, late, unpublished, unknown or p99; may be repeated.",
)
@planned
@depths
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
    planned: str | None,
    depths: str | None,
    conf: tuple[str, ...],
) -> None:
    """Write a verdict on each task, with data, summary.json and report.html."""
    check_call()
    from datetime import datetime  # noqa: PLC0415

    from kombu_binary_delay.spark import schema as s  # noqa: PLC0415 - with Spark's
    from kombu_binary_delay.spark.audit import Thresholds, audit, lateness  # noqa: PLC0415
    from kombu_binary_delay.spark.journal import read_journal  # noqa: PLC0415
    from kombu_binary_delay.spark.tables import Place, merge, overwrite, read  # noqa: PLC0415

    folder = local(output)
    check_job(job_id, receipts)
    _check_plan(planned, depths)
    thresholds = limits_of(Thresholds, allow)
    check_before(conf, reads=(receipts, journal, planned, depths), writes=(output, kept))
    session = spark_session(conf)
    plan = _plan(session, planned)
    seen = _depths(session, depths, plan)
    table = None
    if receipts is not None:
        table = read(session, receipts, s.RECEIPTS)
        if job_id is not None:
            table = table.where(table["job_id"] == job_id)
    is_broker = is_broker_url(journal)
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
    page, summary_file = folder / "report.html", folder / "summary.json"
    with following(session) as phase:
        phase("judging the tasks")
        overwrite(judged, Place("parquet", f"{output}/verdicts"))
        # An audit that ends half-way leaves none beside other verdicts.
        summary_file.unlink(missing_ok=True)
        verdicts = session.read.parquet(f"{output}/verdicts")
        phase("counting how late they are")
        overwrite(lateness(verdicts), Place("parquet", f"{output}/lateness"))
        if kept is not None:
            phase("storing the verdicts")
            with usage():
                if not merge(verdicts, kept, ("task_id", "retries")):
                    overwrite(verdicts, kept)
        phase("drawing the report")
        summary = _report(verdicts, page, plan, seen, thresholds, _jobs(table))
    write_file(summary_file, json.dumps(summary, indent=2) + "\n")
    show_counts(summary)
    console().print(str(page))
    _show_judged(summary)
    if not summary["passed"]:
        sys.exit(FAILED)


@click.command(
    help="""Draw the verdicts at PATH as one HTML file: a folder that an audit has written, or the
    table of its option --verdicts."""
)
@click.argument("path")
@click.option("--output", required=True, metavar="FILE", help="The HTML file.")
@planned
@depths
@conf
def report(
    path: str, output: str, planned: str | None, depths: str | None, conf: tuple[str, ...]
) -> None:
    """Draw the verdicts at PATH as one HTML file."""
    check_call()
    from kombu_binary_delay.spark import schema as s  # noqa: PLC0415 - with Spark's
    from kombu_binary_delay.spark.classic import cached, release  # noqa: PLC0415
    from kombu_binary_delay.spark.follow import is_followed, read_verdicts  # noqa: PLC0415
    from kombu_binary_delay.spark.tables import Place, read  # noqa: PLC0415

    file = local(output)
    _check_plan(planned, depths)
    check_before(conf, reads=(path, planned, depths), writes=(output,))
    session = spark_session(conf)
    plan = _plan(session, planned)
    seen = _depths(session, depths, plan)
    is_folder = str(Place.parse(path)) == f"parquet:{path}"
    if is_folder and is_followed(session, path):
        # It is read often, and finding the latest rows takes a shuffle.
        verdicts = cached(read_verdicts(session, path))
    else:
        # A table written by an earlier release does not have all columns.
        verdicts = read(session, f"{path}/verdicts" if is_folder else path, s.VERDICTS)
    thresholds, jobs = _judged(path) if is_folder else (None, [])
    with following(session) as phase:
        phase("drawing the report")
        _report(verdicts, file, plan, seen, thresholds, jobs)
    release(verdicts)
    console().print(str(file))


def _report(
    verdicts: DataFrame,
    output: Path,
    plan: DataFrame | None,
    depths: DataFrame | None,
    thresholds: Any,
    jobs: list[str],
) -> dict[str, Any]:
    from kombu_binary_delay.spark.report.figures import figures  # noqa: PLC0415 - see above
    from kombu_binary_delay.spark.report.page import page  # noqa: PLC0415

    found = figures(verdicts, thresholds=thresholds, plan=plan, depths=depths, jobs=jobs)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_file(output, page(found))
    summary: dict[str, Any] = {"jobs": jobs, **found["summary"]}
    return summary


def _plan(session: SparkSession, table: str | None) -> DataFrame | None:
    """Return a plan; None without one.

    :raises click.UsageError: if it compares ladders, of which only one can be in the chart.
    """
    from kombu_binary_delay.spark.tables import read  # noqa: PLC0415 - see above

    if table is None:
        return None
    plan = read(session, table)
    rows = plan.select("ladder").distinct().sort("ladder").limit(3).collect()
    if len(rows) > 1:
        raise click.UsageError(
            f"{table} compares {' with '.join(row['ladder'] for row in rows)}: give the plan of "
            f"the one that is used, which spark plan writes with one --ladder and nothing else to "
            f"compare"
        )
    return plan


def _depths(session: SparkSession, table: str | None, plan: DataFrame | None) -> DataFrame | None:
    """Return the depths that were seen; None without them.

    :raises click.UsageError: if they cannot be read, or the plan has none of their queues.
    """
    from kombu_binary_delay.spark.report.figures import checked_depths  # noqa: PLC0415 - see above
    from kombu_binary_delay.spark.tables import read  # noqa: PLC0415

    with usage():
        return checked_depths(plan, read(session, table) if table else None)


def _check_plan(planned: str | None, depths: str | None) -> None:
    """Raise a usage error for depths that nothing would show."""
    if depths is not None and planned is None:
        raise click.UsageError("depths are drawn beside those of a plan: give --plan")


def _jobs(receipts: DataFrame | None) -> list[str]:
    """Return the jobs of receipts; a count instead of the names if a title has no room for them."""
    if receipts is None:
        return []
    rows = receipts.select("job_id").dropna().distinct().sort("job_id").limit(4).collect()
    names = [row["job_id"] for row in rows]
    return names if len(names) < 4 else [*names[:2], "others"]


def _judged(path: str) -> tuple[Any, list[str]]:
    """Read an audit's thresholds and jobs; nothing if its files are not on this machine.

    :raises click.UsageError: for a summary that is not one.
    """
    from kombu_binary_delay.spark.audit import Thresholds  # noqa: PLC0415 - see above

    try:
        file = local(path) / "summary.json"
        text = file.read_text(encoding="utf-8")
    except (OSError, click.BadParameter):
        return None, []
    none = dict.fromkeys(each.name for each in fields(Thresholds))
    try:
        summary = json.loads(text)
        limits = {name: each["allowed"] for name, each in summary["thresholds"].items()}
        return Thresholds(**{**none, **limits}), summary.get("jobs", [])
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise click.UsageError(
            f"{file} is not the summary of an audit: {exc!r}; run the audit again, or delete the "
            f"file to draw the verdicts against the default limits"
        ) from exc


def _show_judged(summary: dict[str, Any]) -> None:
    """Print what may be wrong if too few tasks are judged."""
    judged = summary["thresholds"].get("judged")
    if judged and not judged["passed"]:
        console().print(
            f"{judged['measured']:,} tasks are judged, and {judged['allowed']:,g} must be: are the "
            f"job, the receipts and the journal those that you mean? --allow judged=0 allows none"
        )


def show_counts(summary: dict[str, Any]) -> None:
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
