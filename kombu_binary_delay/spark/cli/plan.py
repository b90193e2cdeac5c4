"""The subcommand ``spark plan``: parse, call, print."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kombu_binary_delay.export.files import write_file
from kombu_binary_delay.ladder.ladder import Ladder
from kombu_binary_delay.settings import KEY, Settings

from .before import check_before
from .progress import following
from .shared import (
    FAILED,
    check_call,
    conf,
    console,
    limits_of,
    local,
    settings_before,
    spark_session,
    usage,
)
from .table import show_plan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@click.command(
    help="""Forecast the load on the brokers of the messages in TABLE.

    Exits with 1 where a limit is exceeded.
    """
)
@click.argument("path", metavar="TABLE")
@click.option(
    "--ladder",
    "ladders",
    multiple=True,
    default=lambda: [_ladder_before().name],
    show_default=Ladder.default().name,
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
@click.option("--output", metavar="TABLE", help="Also write the plan there.")
@click.option(
    "--report",
    metavar="FILE",
    help="Also draw the plan as one HTML file: when the load comes, what each ladder costs, where "
    "it would be late, and which settings the figures ask for.",
)
@conf
def plan(
    path: str,
    ladders: tuple[str, ...],
    horizon: float | None,
    queue_per_delay: bool,
    limits: tuple[str, ...],
    output: str | None,
    report: str | None,
    conf: tuple[str, ...],
) -> None:
    """Forecast the load on the brokers of the messages in TABLE."""
    check_call()
    from kombu_binary_delay.spark.classic import cached  # noqa: PLC0415 - with Spark's
    from kombu_binary_delay.spark.plan import (  # noqa: PLC0415
        Limits,
        Variant,
        check,
        plan,
        summarize,
    )
    from kombu_binary_delay.spark.tables import overwrite, read  # noqa: PLC0415

    with usage():
        variants = [Variant(Ladder.from_name(name)) for name in ladders]
    if horizon is not None:
        variants += [Variant(each.ladder, horizon) for each in variants]
    if queue_per_delay:
        variants.append(Variant(variants[0].ladder, queue_per_delay=True))
    allowed = limits_of(Limits, limits)
    page = local(report) if report else None
    check_before(conf, reads=(path,), writes=(output, report))
    session = spark_session(conf)
    with following(session) as phase:
        phase("planning")
        with usage():
            rows = _published(read(session, path))
            planned = plan(rows, variants)
            if output:
                overwrite(planned, output)
                planned = read(session, output)
        if report and not output:
            planned = cached(planned)
        summary = summarize(planned)
        found = summary.orderBy("ladder").collect()
        summaries = [row.asDict() for row in found]
        # Of what was found: of the summary, it would compute the plan again.
        judged = check(session.createDataFrame(found, summary.schema), allowed)
        judged = judged.orderBy("ladder", "limit")
        verdicts = [row.asDict() for row in judged.collect()]
        if page is not None:
            phase("drawing the report")
            _report(page, rows, planned, variants[0].name, limits=asdict(allowed), name=path)
    show_plan(console(), summaries, verdicts)
    if page is not None:
        console().print(str(page))
    if not all(each["passed"] for each in verdicts):
        sys.exit(FAILED)


def _ladder_before() -> Ladder:
    with usage():
        return Settings.from_transport_options({KEY: settings_before()}).topology().ladder


def _published(rows: DataFrame) -> DataFrame:
    """Return rows with the time of their publish, the same for the plan and for its report."""
    from pyspark.sql import functions as F  # noqa: PLC0415 - see above
    from pyspark.sql import types as t  # noqa: PLC0415

    from kombu_binary_delay.spark.columns import (  # noqa: PLC0415
        find,
        instant,
        kind_of,
        named,
        time_of,
    )

    at = datetime.now(UTC)
    now, name = instant(at), find(rows.columns, "published")
    if name is None:
        return rows.withColumn("published", now)
    if isinstance(kind_of(rows, name), t.StringType):
        # It stays text, in which the plan finds what is not a time.
        return rows.withColumn(name, F.coalesce(named(rows, name), F.lit(at.isoformat())))
    return rows.withColumn(name, F.coalesce(time_of(rows, name), now))


def _report(
    output: Path,
    rows: DataFrame,
    planned: DataFrame,
    chosen: str,
    *,
    limits: dict[str, Any],
    name: str,
) -> None:
    from kombu_binary_delay.spark.report.plan_page import plan_page  # noqa: PLC0415 - with Spark's
    from kombu_binary_delay.spark.report.planned import plan_figures  # noqa: PLC0415

    given = {each: value for each, value in limits.items() if value is not None}
    found = plan_figures(rows, planned, limits=given, name=name)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_file(output, plan_page({**found, "chosen": chosen}))
