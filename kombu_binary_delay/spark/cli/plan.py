"""The subcommand ``spark plan``: parse, call, print."""

from __future__ import annotations

import sys

import click

from kombu_binary_delay.model.ladder import Ladder

from .shared import (
    FAILED,
    conf,
    needs_spark,
    numbers,
    show,
    spark_session,
    usage,
)


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
@click.option("--output", metavar="TABLE", help="Also write the plan there.")
@conf
def plan(
    path: str,
    ladders: tuple[str, ...],
    horizon: float | None,
    queue_per_delay: bool,
    limits: tuple[str, ...],
    output: str | None,
    conf: tuple[str, ...],
) -> None:
    """Forecast the load on the brokers of the messages in TABLE."""
    needs_spark()
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
    allowed = Limits(**numbers(limits, Limits))
    session = spark_session(conf)
    with usage():
        planned = plan(read(session, path), variants)
    if output:
        with usage():
            overwrite(planned, output)
        planned = read(session, output)
    summary = summarize(planned)
    show(
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
    show(verdicts.orderBy("ladder", "limit"))
    if not verdicts.where("not passed").isEmpty():
        sys.exit(FAILED)
