"""The subcommands ``spark plan | publish | journal-export | audit | report``: parse, call, print.

PySpark and Rich are imported when a subcommand runs, so that other subcommands do not need them.
Under ``spark-submit`` or alone, the session follows Spark's configuration.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import click

from kombu_binary_delay.compat.urls import is_broker_url
from kombu_binary_delay.model.ladder import Ladder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from rich.console import Console

    from kombu_binary_delay.spark.publish import Progress

FAILED = 1
_FORMATS = ("parquet", "orc", "json", "csv")

input_format = click.option(
    "--format",
    "kind",
    type=click.Choice(_FORMATS),
    default="parquet",
    show_default=True,
    help="The format of the files at PATH; CSV needs a header line.",
)
broker = click.option(
    "--broker", "-b", metavar="URL", envvar="BINARY_DELAY_BROKER", help="Where RabbitMQ is."
)
conf = click.option(
    "--conf", metavar="KEY=VALUE", multiple=True, help="A setting of Spark; may be repeated."
)


@click.group(
    name="spark",
    short_help="Schedule, audit and plan tasks with Spark.",
    help="""Schedule, audit and plan delayed tasks with Spark (needs the extra [spark]).

    \b
      kombu-binary-delay spark plan reminders.parquet --limit waiting=5000000
      kombu-binary-delay spark report audit --output report.html
    """,
)
def spark() -> None:
    """Schedule, audit and plan delayed tasks with Spark (needs the extra [spark])."""


@spark.command(
    help="""Forecast the load on the brokers of the messages at PATH.

    Exits with 1 where a limit is exceeded.
    """
)
@click.argument("path")
@input_format
@click.option(
    "--ladder",
    "ladders",
    multiple=True,
    default=[Ladder.uniform().name],
    show_default=True,
    help="A ladder, as the names of its queues have it; repeat it to compare several.",
)
@click.option(
    "--horizon",
    type=float,
    metavar="SECONDS",
    help="Compare with publishing each message no sooner than so long before it is due.",
)
@click.option("--queue-per-delay", is_flag=True, help="Compare with the setting queue_per_delay.")
@click.option(
    "--limit",
    "limits",
    metavar="NAME=NUMBER",
    multiple=True,
    help="Exit with 1 above it, such as waiting=5000000. NAME is waiting, queue_waiting, bytes, "
    "hops_per_second, published_per_second, queues, beyond or undated; may be repeated.",
)
@click.option("--output", metavar="PATH", help="Also write the plan there, as Parquet.")
@conf
def plan(
    path: str,
    kind: str,
    ladders: tuple[str, ...],
    horizon: float | None,
    queue_per_delay: bool,
    limits: tuple[str, ...],
    output: str | None,
    conf: tuple[str, ...],
) -> None:
    """Forecast the load on the brokers of the messages at PATH."""
    _needs_spark()
    from kombu_binary_delay.spark.plan import (  # noqa: PLC0415
        Limits,
        Variant,
        check,
        plan,
        summarize,
    )

    with _usage():
        variants = [Variant(Ladder.from_name(name)) for name in ladders]
    if horizon is not None:
        variants += [Variant(each.ladder, horizon) for each in variants]
    if queue_per_delay:
        variants.append(Variant(variants[0].ladder, queue_per_delay=True))
    allowed = Limits(**_numbers(limits, Limits))
    session = _session(conf)
    with _usage():
        planned = plan(_read(session, path, kind), variants)
    if output:
        planned.write.mode("overwrite").parquet(output)
        planned = session.read.parquet(output)
    summary = summarize(planned)
    _show(
        summary.orderBy("ladder").select(
            "ladder",
            "messages",
            "hops_per_message",
            "waiting",
            "queue_waiting",
            "queues",
            "hops_per_second",
            "published_per_second",
            "bytes",
            "at_once",
            "beyond",
            "undated",
        )
    )
    verdicts = check(summary, allowed)
    _show(verdicts.orderBy("ladder", "limit"))
    if not verdicts.where("not passed").isEmpty():
        sys.exit(FAILED)


@spark.command(
    help="""Publish a delayed Celery task for each row at PATH.

    Exits with 1 where a message has not been published: where a row is rejected, or its publish
    has failed.
    """
)
@click.argument("path")
@input_format
@broker
@click.option(
    "--job-id", required=True, help="The job's name. A task's id is made of it and the key."
)
@click.option(
    "--receipts",
    required=True,
    metavar="PATH",
    help="The Parquet table to which a receipt for each message is added.",
)
@click.option(
    "--rejects",
    metavar="PATH",
    help="The Parquet table for rows that cannot be published.  [default: <receipts>-rejects]",
)
@click.option("--app", metavar="MODULE:NAME", help="A Celery app that executors can import.")
@click.option("--key", default="key", show_default=True, help="The column of the keys.")
@click.option(
    "--settings", metavar="JSON", help="Settings of the transport, such as '{\"radix\": 4}'."
)
@click.option(
    "--resume", is_flag=True, help="Go on with a job: publish only what has no receipt yet."
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
def publish(path: str, kind: str, conf: tuple[str, ...], **options: Any) -> None:
    """Publish a delayed Celery task for each row at PATH."""
    _needs_spark()
    from kombu_binary_delay.spark.publish import publish  # noqa: PLC0415 - with Spark's

    if options["app"] is None:
        options["broker"] = _given(options["broker"])
    with _usage():
        if options["settings"] is not None:
            options["settings"] = json.loads(options["settings"])
        with _Watch() as watch:
            done = publish(_read(_session(conf), path, kind), on_progress=watch.show, **options)
    _console().print(watch.line(done))
    if done.by_send_task:
        _console().print(
            f"{done.by_send_task:,} messages were made by send_task, one by one, which takes "
            f"longer: {'; '.join(done.reasons)}"
        )
    if done.failed or done.rejected:
        sys.exit(FAILED)


@spark.command(
    "journal-export",
    help="""Add to a Parquet table what the journal has got since the last export.""",
)
@broker
@click.option("--namespace", default="kbd", show_default=True, help="The namespace of the ladder.")
@click.option("--output", required=True, metavar="PATH", help="The Parquet table to add to.")
@conf
def journal_export(broker: str | None, namespace: str, output: str, conf: tuple[str, ...]) -> None:
    """Add to a Parquet table what the journal has got since the last export."""
    _needs_spark()
    from kombu_binary_delay.spark.journal import export_journal  # noqa: PLC0415 - with Spark's

    session = _session(conf)
    export_journal(session, _given(broker), output, namespace=namespace)
    _console().print(f"{output} has {session.read.parquet(output).count()} events")


@spark.command(
    help="""Give a verdict on each task, and write data, summary.json and report.html.

    Exits with 1 where a threshold is exceeded: by default, a task that is lost or early. So it does
    where no task is judged, unless --allow judged=0 says that this may be.
    """
)
@click.option("--receipts", metavar="PATH", help="The receipts of the jobs to audit.")
@click.option(
    "--journal",
    required=True,
    metavar="PATH OR URL",
    help="Parquet that journal-export has written, a folder of the journal's files, or a "
    "broker's URL.",
)
@click.option("--output", required=True, metavar="PATH", help="A folder for the results.")
@click.option("--job-id", help="Only the tasks of this job, as the receipts name them.")
@click.option(
    "--late-after",
    type=float,
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="A task that comes so long after it was due is late.",
)
@click.option(
    "--patience",
    type=float,
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="A task that has not come so long after it was due is lost.",
)
@click.option(
    "--complete",
    is_flag=True,
    help="The journal has all that has happened until now, though its last event is older; that "
    "of a broker always has.",
)
@click.option(
    "--allow",
    metavar="NAME=NUMBER",
    multiple=True,
    help="Allow so many, or so many seconds, such as duplicates=10 or p99=5. NAME is early, "
    "lost, duplicates, late, unpublished, unknown or p99; may be repeated.",
)
@click.option("--plan", "planned", metavar="PATH", help="What spark plan has written.")
@click.option(
    "--depths",
    metavar="PATH",
    help="Depths of queues that were recorded, as Parquet with the columns at, queue and waiting.",
)
@conf
def audit(
    receipts: str | None,
    journal: str,
    output: str,
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
    _needs_spark()
    from datetime import datetime, timezone  # noqa: PLC0415

    from kombu_binary_delay.spark import schema as s  # noqa: PLC0415 - with Spark's
    from kombu_binary_delay.spark.audit import Thresholds, audit, lateness  # noqa: PLC0415
    from kombu_binary_delay.spark.journal import read_journal  # noqa: PLC0415

    folder = _local(output)
    if job_id is not None and receipts is None:
        raise click.UsageError("the receipts name the tasks of a job: give --receipts")
    thresholds = Thresholds(**_numbers(allow, Thresholds))
    session = _session(conf)
    table = None
    if receipts is not None:
        table = session.read.schema(s.RECEIPTS).parquet(receipts)
        if job_id is not None:
            table = table.where(table["job_id"] == job_id)
    with _usage():
        judged = audit(
            table,
            read_journal(session, journal),
            late_after=late_after,
            patience=patience,
            until=datetime.now(timezone.utc) if complete or is_broker_url(journal) else None,
        )
    if job_id is not None and table is not None:
        # Not sooner: the events of all tasks are needed to find the journal's end.
        judged = judged.join(table.select("task_id"), "task_id", "left_semi")
    judged.write.mode("overwrite").parquet(f"{output}/verdicts")
    verdicts = session.read.parquet(f"{output}/verdicts")
    lateness(verdicts).write.mode("overwrite").parquet(f"{output}/lateness")
    page = folder / "report.html"
    summary = _report(session, verdicts, page, planned, depths, thresholds, _jobs(table))
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    _show_counts(summary)
    _console().print(str(page))
    judged = summary["thresholds"].get("judged")
    if judged and not judged["passed"]:
        _console().print(
            f"{judged['measured']:,} tasks are judged, and {judged['allowed']:,g} must be: are the "
            f"job, the receipts and the journal those that you mean? --allow judged=0 allows none"
        )
    if not summary["passed"]:
        sys.exit(FAILED)


@spark.command(
    help="""Draw the verdicts at PATH, a folder that an audit has written, as one HTML file."""
)
@click.argument("path")
@click.option("--output", required=True, metavar="FILE", help="The HTML file.")
@click.option("--plan", "planned", metavar="PATH", help="What spark plan has written.")
@click.option(
    "--depths",
    metavar="PATH",
    help="Depths of queues that were recorded, as Parquet with the columns at, queue and waiting.",
)
@conf
def report(
    path: str, output: str, planned: str | None, depths: str | None, conf: tuple[str, ...]
) -> None:
    """Draw the verdicts at PATH, a folder that an audit has written, as one HTML file."""
    _needs_spark()
    from kombu_binary_delay.spark import schema as s  # noqa: PLC0415 - with Spark's

    file = _local(output)
    session = _session(conf)
    # A table written by an earlier release does not have all columns.
    verdicts = session.read.schema(s.VERDICTS).parquet(f"{path}/verdicts")
    thresholds, jobs = _judged(path)
    _report(session, verdicts, file, planned, depths, thresholds, jobs)
    _console().print(str(file))


# -- what the subcommands share ---------------------------------------------------------------


class _Watch:
    """Shows progress: a bar in a terminal, otherwise an occasional line."""

    def __init__(self) -> None:
        from rich import progress  # noqa: PLC0415 - with Spark's

        self._bar: progress.Progress | None = None
        self._last = 0.0
        self._console = _console()
        if self._console.is_terminal:
            self._bar = progress.Progress(
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[more]}"),
                progress.TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=None, more="")

    def __enter__(self) -> _Watch:  # noqa: PYI034 - typing.Self is not in Python 3.10
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, progress: Progress) -> None:
        """Show the progress."""
        done = progress.published + progress.failed
        if self._bar:
            more = f"{progress.rate:,.0f}/s, {progress.rejected:,} rejected"
            total = done + progress.remaining
            self._bar.update(self._task, total=total, completed=done, more=more)
        elif time.monotonic() - self._last >= 5:
            self._last = time.monotonic()
            self._console.print(self.line(progress))

    def line(self, progress: Progress) -> str:
        """Return the progress as one line."""
        return (
            f"{progress.published:,} published ({progress.rate:,.0f}/s), "
            f"{progress.failed:,} failed, {progress.remaining:,} remaining, "
            f"{progress.rejected:,} rejected, {progress.already:,} already, "
            f"{progress.later:,} later"
        )


def _needs_spark() -> None:
    missing = [name for name in ("pyspark", "rich") if find_spec(name) is None]
    if missing:
        raise click.UsageError(
            f"{' and '.join(missing)} must be installed: pip install 'kombu-binary-delay[spark]'"
        )


def _console() -> Console:
    from rich.console import Console  # noqa: PLC0415 - see above

    # Show names literally: Rich must not read markup in them.
    as_it_is = partial(Console, highlight=False, markup=False, emoji=False)
    made = as_it_is()
    return made if made.is_terminal else as_it_is(width=120)


@contextmanager
def _usage() -> Iterator[None]:
    """Raise invalid values as usage errors: a traceback's exit code has another meaning here."""
    try:
        yield
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc


def _local(output: str) -> Path:
    """Return the folder for the files that Spark does not write.

    :raises click.BadParameter: if it is not on this machine.
    """
    place = urlsplit(output)
    if place.scheme == "file":
        return Path(url2pathname(place.path))
    # A drive letter is not a URL scheme.
    if len(place.scheme) > 1:
        raise click.BadParameter(
            f"{output!r} is not on this machine, to which the report is written: name a path that "
            f"Spark and this machine both see, and copy it from there",
            param_hint="--output",
        )
    return Path(output)


def _session(conf: tuple[str, ...]) -> SparkSession:
    from pyspark.sql import SparkSession  # noqa: PLC0415 - see above

    builder = SparkSession.builder.appName("kombu-binary-delay")
    for each in conf:
        name, _, value = each.partition("=")
        builder = builder.config(name, value)
    session: SparkSession = builder.getOrCreate()
    return session


def _read(session: SparkSession, path: str, kind: str) -> DataFrame:
    options = {"header": "true", "inferSchema": "true"} if kind == "csv" else {}
    return session.read.format(kind).options(**options).load(path)


def _report(
    session: SparkSession,
    verdicts: DataFrame,
    output: Path,
    planned: str | None,
    depths: str | None,
    thresholds: Any,
    jobs: list[str],
) -> dict[str, Any]:
    from kombu_binary_delay.spark.report.figures import figures  # noqa: PLC0415 - see above
    from kombu_binary_delay.spark.report.page import page  # noqa: PLC0415

    found = figures(
        verdicts,
        thresholds=thresholds,
        plan=session.read.parquet(planned) if planned else None,
        depths=session.read.parquet(depths) if depths else None,
        jobs=jobs,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page(found), encoding="utf-8")
    summary: dict[str, Any] = {"jobs": jobs, **found["summary"]}
    return summary


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
        summary = json.loads((_local(path) / "summary.json").read_text(encoding="utf-8"))
    except (OSError, click.BadParameter):
        return None, []
    limits = {name: each["allowed"] for name, each in summary["thresholds"].items()}
    none = dict.fromkeys(each.name for each in fields(Thresholds))
    return Thresholds(**{**none, **limits}), summary.get("jobs", [])


def _numbers(given: tuple[str, ...], of: type) -> dict[str, float]:
    known = [each.name for each in fields(of)]
    numbers = {}
    for each in given:
        name, _, value = each.partition("=")
        if name not in known:
            raise click.BadParameter(f"{name!r} is unknown; known are {', '.join(known)}")
        try:
            numbers[name] = float(value)
        except ValueError:
            raise click.BadParameter(f"{each!r} must be {name}=NUMBER") from None
    return numbers


def _given(broker: str | None) -> str:
    # The tool's options before the subcommand apply to it too.
    url = broker or getattr(click.get_current_context().obj, "url", None)
    if url is None:
        raise click.UsageError("say where RabbitMQ is: --broker, or BINARY_DELAY_BROKER")
    return str(url)


def _show_counts(summary: dict[str, Any]) -> None:
    for name, count in summary["verdicts"].items():
        if count:
            _console().print(f"{count:>12,}  {name}")
    for name, what in (
        ("postponed", "were postponed"),
        ("misdated", "have an event of a wrong clock"),
    ):
        if summary[name]:
            _console().print(f"{summary[name]:,} of {summary['tasks']:,} tasks {what}")


def _show(df: DataFrame) -> None:
    from rich.table import Table  # noqa: PLC0415 - see above

    table = Table(*df.columns)
    for row in df.collect():
        table.add_row(*(f"{v:,.1f}" if isinstance(v, float) else str(v) for v in row))
    _console().print(table)
