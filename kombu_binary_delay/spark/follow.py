"""Audit continuously: an audit over a moving window, which writes what has changed since the last.

Each step judges the messages of the last days by :func:`~kombu_binary_delay.spark.audit.audit`, and
appends the verdicts that are new or have changed. The latest verdict of a message counts, so a step
that dies is repeated without harm. Steps read tables only. This module must not touch a broker.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from . import schema as s
from .audit import audit, span
from .checks import check_number
from .columns import instant
from .tables import append, empty, existing

_ID = ["task_id", "retries"]
_ROW = [*s.columns_of(s.VERDICTS)]
#: The longest window, in seconds; before the present, it is still in years that Python knows.
_MOST = 1e9


def follow(
    receipts: DataFrame | None,
    journal: DataFrame,
    output: str,
    *,
    job_id: str | None = None,
    late_after: float = 5.0,
    patience: float = 300.0,
    window: float = 3 * 86_400.0,
) -> DataFrame:
    """Judge the messages of the window, and append the verdicts that are new or have changed.

    :param receipts: what was published so far, with the schema ``RECEIPTS``; None to use the
        journal alone.
    :param journal: the events so far, with the schema ``JOURNAL``.
    :param output: the place of a table of verdicts; read it with :func:`read_verdicts`.
    :param job_id: judge only the tasks of this job, as the receipts name them.
    :param late_after: as for :func:`~kombu_binary_delay.spark.audit.audit`.
    :param patience: as for :func:`~kombu_binary_delay.spark.audit.audit`.
    :param window: seconds. Messages are judged that were published, due or seen within it; the
        verdict of older ones stays as it is.
    :returns: what this step has written; messages that still wait have no verdict yet.
    :raises ValueError: for an invalid time, or for a job without receipts.
    """
    check_number("window", window, most=_MOST)
    if job_id is not None:
        if receipts is None:
            raise ValueError("job_id needs receipts, which name the tasks of a job")
        receipts = receipts.where(F.col("job_id") == job_id)
    spark, begun = journal.sparkSession, datetime.now(UTC)
    since, until = span(journal, patience)
    start = instant(begun - timedelta(seconds=window))
    events = journal.where(F.col("task_id").isNotNull())
    # Two exports at once have written the same events.
    events = events.dropDuplicates([*_ID, "event", "at", "offset"])
    recent = events.where((F.col("due") >= start) | (F.col("at") >= start)).select("task_id")
    sent = receipts
    if receipts is not None:
        is_recent = (F.col("due") >= start) | (F.col("published_at") >= start)
        recent = recent.union(receipts.where(is_recent).select("task_id"))
        sent = receipts.join(recent, "task_id", "left_semi")
    judged = audit(
        sent,
        events.join(recent, "task_id", "left_semi"),
        late_after=late_after,
        patience=patience,
        since=since or begun,
        until=until or datetime.fromtimestamp(0, UTC),
    ).where(F.col("verdict") != s.STILL_WAITING)
    if job_id is not None and sent is not None:
        judged = judged.join(sent.select("task_id"), "task_id", "left_semi")
    row, before = F.struct(*_ROW), read_verdicts(spark, output)
    was = before.select(*_ID, row.alias("was"))
    changed = judged.join(was, _ID, "left").where(~row.eqNullSafe(F.col("was"))).select(*_ROW)
    append(changed.withColumn("judged_at", instant(begun)), output)
    written = existing(spark, output, s.FOLLOWED)
    if written is None:
        return before
    return written.where(F.col("judged_at") == instant(begun)).select(*_ROW)


def read_verdicts(spark: SparkSession, output: str) -> DataFrame:
    """Return the latest verdict of each message that the steps have written."""
    table = existing(spark, output, s.FOLLOWED)
    if table is None:
        return empty(spark, s.VERDICTS)
    latest = table.groupBy(*_ID).agg(F.max_by(F.struct(*_ROW), "judged_at").alias("latest"))
    return latest.select("latest.*")
