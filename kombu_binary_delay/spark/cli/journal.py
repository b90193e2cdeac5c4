"""The subcommand ``spark journal-export``: parse, call, print."""

from __future__ import annotations

import click

from .before import check_before
from .progress import following
from .shared import (
    broker,
    check_call,
    conf,
    console,
    given_broker,
    namespace,
    spark_session,
    usage,
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
    check_before(conf, writes=(output,), broker=broker)
    session = spark_session(conf)
    with following(session) as phase, usage():
        phase("exporting the journal")
        export_journal(session, broker, output, namespace=namespace)
    events = read(session, output).where(f"not event <=> '{s.COMPLETE}'")
    console().print(f"{output} has {events.count():,} events")
