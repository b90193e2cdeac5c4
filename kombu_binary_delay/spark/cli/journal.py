"""The subcommand ``spark journal-export``: parse, call, print."""

from __future__ import annotations

import click

from .shared import broker, conf, console, given_broker, needs_spark, spark_session, usage


@click.command(
    "journal-export",
    help="""Add to a table what the journal has got since the last export.""",
)
@broker
@click.option("--namespace", default="kbd", show_default=True, help="The namespace of the ladder.")
@click.option("--output", required=True, metavar="TABLE", help="The table to add to.")
@conf
def journal_export(broker: str | None, namespace: str, output: str, conf: tuple[str, ...]) -> None:
    """Add to a table what the journal has got since the last export."""
    needs_spark()
    from kombu_binary_delay.spark.journal import export_journal  # noqa: PLC0415 - with Spark's
    from kombu_binary_delay.spark.tables import read  # noqa: PLC0415

    session = spark_session(conf)
    with usage():
        export_journal(session, given_broker(broker), output, namespace=namespace)
    console().print(f"{output} has {read(session, output).count()} events")
