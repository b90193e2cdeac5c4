"""The subcommands ``spark plan | publish | journal-export | audit | audit-follow | report``.

Under ``spark-submit`` or alone, the session follows Spark's configuration.
"""

from __future__ import annotations

import click

from .audit import audit, audit_follow, report
from .jobs import journal_export, plan, publish
from .shared import explained


@click.group(
    name="spark",
    short_help="Schedule, audit and plan tasks with Spark.",
    help="""Schedule, audit and plan delayed tasks with Spark (needs the extra [spark]).

    TABLE is a path of Parquet; FORMAT:PATH, such as delta:/lake/reminders or csv:reminders.csv; or
    table:NAME for a table in a catalogue, such as table:lake.reminders.

    \b
      kombu-binary-delay spark plan reminders.parquet --limit waiting=5000000
      kombu-binary-delay spark report audit --output report.html
    """,
)
def spark() -> None:
    """Schedule, audit and plan delayed tasks with Spark (needs the extra [spark])."""


for subcommand in (plan, publish, journal_export, audit, audit_follow, report):
    spark.add_command(explained(subcommand))
