"""The subcommand ``spark plan``: parse, call, print."""

from __future__ import annotations

import sys

import click

from kombu_binary_delay.model.ladder import Ladder

from .before import check_before
from .shared import (
    FAILED,
    conf,
    console,
    input_format,
    needs_spark,
    numbers,
    read,
    spark_session,
    usage,
)
from .table import show_plan


@click.command(
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
    needs_spark()
    from kombu_binary_delay.spark.plan import (  # noqa: PLC0415
        Limits,
        Variant,
        check,
        plan,
        summarize,
    )

    with usage():
        variants = [Variant(Ladder.from_name(name)) for name in ladders]
    if horizon is not None:
        variants += [Variant(each.ladder, horizon) for each in variants]
    if queue_per_delay:
        variants.append(Variant(variants[0].ladder, queue_per_delay=True))
    allowed = Limits(**numbers(limits, Limits))
    check_before(conf, reads=(path,), writes=(output,))
    session = spark_session(conf)
    with usage():
        planned = plan(read(session, path, kind), variants)
    if output:
        planned.write.mode("overwrite").parquet(output)
        planned = session.read.parquet(output)
    summary = summarize(planned)
    summaries = [row.asDict() for row in summary.orderBy("ladder").collect()]
    verdicts = [
        row.asDict() for row in check(summary, allowed).orderBy("ladder", "limit").collect()
    ]
    show_plan(console(), summaries, verdicts)
    if not all(each["passed"] for each in verdicts):
        sys.exit(FAILED)
