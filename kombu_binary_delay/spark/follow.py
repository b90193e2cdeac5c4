"""Audit continuously: write the verdict of each message once it is final.

A step judges the messages whose time has come since the last step, with :func:`audit`, and appends
their verdicts. A verdict is final when the journal goes on for longer than the patience after the
last due time of its message. If a later event or receipt changes it, the step that reads that
writes the row again, as corrected. A step that dies is repeated, and overwrites what it wrote.

Steps read tables only. This module must not touch a broker.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from operator import attrgetter

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from . import schema as s
from .audit import audit, span
from .checks import check_not_negative, check_number
from .classic import cached, release
from .columns import action_of, instant
from .tables import Place, append, existing, with_statistics

#: How long after its publish a receipt can be seen, at most; publishers write them in slices.
_UNSEEN = timedelta(days=1)
#: The largest difference between the clocks of two machines that is accepted.
_SKEW = timedelta(minutes=2)
#: The longest time, in seconds; before the present, it is still in years that Python knows.
_MOST = 1e9
_ID = ["task_id", "retries"]
_ROW = [each.split()[0] for each in s.VERDICTS.split(", ")]
_LOST = (s.LOST_IN_THE_LADDER, s.LOST_AFTER_RELEASE)


@dataclass(frozen=True)
class Step:
    """What a step of a continuous audit has done.

    :param batch: its number; that of the last step if this one found nothing new.
    :param final_to: messages whose last due time is before it have their verdicts.
    :param verdicts: how many messages have got their first verdict within the reach, by verdict.
    :param corrected: how many verdicts of earlier steps have changed.
    :param alarms: rows of some of the messages that are lost or early.
    """

    batch: int
    final_to: datetime | None
    verdicts: dict[str, int]
    corrected: int
    alarms: tuple[dict[str, object], ...] = ()


@dataclass(frozen=True)
class _State:
    """A finished step; see the schema ``STEPS``."""

    batch: int = -1
    final_to: datetime | None = None
    complete_from: datetime | None = None
    complete_to: datetime | None = None
    offset: int = 0


def audit_due(
    receipts: DataFrame | None,
    journal: DataFrame,
    output: str,
    *,
    job_id: str | None = None,
    late_after: float = 5.0,
    patience: float = 300.0,
    reach: float = 30 * 86_400.0,
) -> Step:
    """Judge the messages that have become final since the last step, and append their verdicts.

    Run one step at a time for an output.

    :param receipts: what was published so far, with the schema ``RECEIPTS``; None to use the
        journal alone.
    :param journal: the events so far, with the schema ``JOURNAL`` and with offsets.
    :param output: a folder for verdicts and steps; read it with :func:`read_verdicts`.
    :param job_id: judge only the tasks of this job, as the receipts name them. Each job needs an
        output of its own.
    :param late_after: as for :func:`~kombu_binary_delay.spark.audit.audit`.
    :param patience: as for :func:`~kombu_binary_delay.spark.audit.audit`.
    :param reach: seconds. Rows of messages that were due longer than that before the last step
        are not read, and no later event changes their verdicts. A task that is published again
        after that is judged by what has happened since.
    :raises ValueError: for an invalid time, or for a job without receipts.
    :raises RuntimeError: if another process writes to the same output; or if a step was done by a
        clock that was ahead, as all verdicts would be final.
    """
    for name, value in (("late_after", late_after), ("patience", patience)):
        check_not_negative(name, value, most=_MOST)
    check_number("reach", reach, most=_MOST)
    if job_id is not None:
        if receipts is None:
            raise ValueError("job_id needs receipts, which name the tasks of a job")
        receipts = receipts.where(F.col("job_id") == job_id)
    of_job = receipts
    if receipts is not None:
        # An audit does not use them: their new due times may not be those of any message.
        receipts = receipts.where(action_of(receipts) != s.RESCHEDULE)
    spark = journal.sparkSession
    steps = _steps(spark, output)
    last = steps[-1] if steps else _State()
    if last.complete_to is not None and last.complete_to > datetime.now(UTC) + _SKEW:
        raise RuntimeError(
            f"the steps in {output} go until {last.complete_to:%Y-%m-%d %H:%M:%S} UTC, which is in "
            f"the future: a clock was wrong; begin another output"
        )
    complete_from, complete_to = _ends(journal, last, patience)
    if complete_to is None or complete_to == last.complete_to:
        return Step(last.batch, last.final_to, {}, 0)
    window = _Window(last.final_to, complete_to - timedelta(seconds=patience), reach)
    [[offset]] = journal.where(F.col("offset") >= last.offset).agg(F.max("offset")).collect()
    first = next((each.batch for each in steps if window.is_within_reach(each.final_to)), 0)
    before = _verdicts(spark, output, first, last.batch) if steps else None
    chosen = _candidates(receipts, journal, before, window, last.offset).distinct()
    if job_id is not None and of_job is not None:
        # Of any age: a task may be retried or postponed for long.
        chosen = chosen.join(of_job.select("task_id"), "task_id", "left_semi")
    batch, path = last.batch + 1, f"{output}/verdicts/batch={last.batch + 1}"
    # What judges them asks for them several times, and they take a join.
    chosen = cached(chosen)
    try:
        sent, events = _rows_of(chosen, receipts, journal, window)
        judged = audit(
            sent,
            events,
            late_after=late_after,
            patience=patience,
            since=complete_from,
            until=complete_to,
        ).where(F.col("verdict") != s.STILL_WAITING)
        found = judged.join(_final(sent, events, window), _ID, "left_semi")
        found = _corrected(found, before)
        with with_statistics(spark):
            found.write.mode("overwrite").parquet(path)
    finally:
        release(chosen)
    written = spark.read.schema(s.FOLLOWED).parquet(path)
    counts = written.groupBy("verdict", "corrected").count().collect()
    verdicts = {row["verdict"]: row["count"] for row in counts if not row["corrected"]}
    corrected = sum(row["count"] for row in counts if row["corrected"])
    if _steps(spark, output) != steps:
        raise RuntimeError(f"another process writes the verdicts in {output}: run one at a time")
    following = last.offset if offset is None else offset + 1
    ends = window.end, complete_from, complete_to
    row = batch, *ends, following, sum(verdicts.values()), corrected
    append(spark.createDataFrame([row], s.STEPS).coalesce(1), f"{output}/steps")
    bad = written.where(F.col("verdict").isin(s.EARLY, *_LOST)).select(*_ROW).limit(3)
    alarms = bad.collect() if any(row["verdict"] in {s.EARLY, *_LOST} for row in counts) else []
    return Step(batch, window.end, verdicts, corrected, tuple(each.asDict() for each in alarms))


def read_verdicts(spark: SparkSession, output: str) -> DataFrame:
    """Return the verdicts that finished steps have written: the latest one of each message."""
    steps = _steps(spark, output)
    if not steps:
        return spark.createDataFrame([], s.VERDICTS)
    table = _written(spark, output, 0, steps[-1].batch)
    # Not by `corrected` alone: a task that comes again beyond the reach has two first verdicts.
    latest = table.groupBy(*_ID).agg(F.max_by(F.struct(*_ROW), "batch").alias("latest"))
    return latest.select("latest.*")


def is_followed(spark: SparkSession, output: str) -> bool:
    """Return whether a folder has the verdicts of a continuous audit."""
    return bool(_steps(spark, output))


def _verdicts(spark: SparkSession, output: str, first: int, last: int) -> DataFrame:
    """Return the latest verdict of each message in a range of steps, all within the reach."""
    table = _written(spark, output, first, last)
    # Only few are corrected.
    newest = table.where("corrected").groupBy(*_ID).agg(F.max("batch").alias("newest"))
    is_old = F.coalesce(F.col("batch") < F.col("newest"), F.lit(False))
    return table.join(newest, _ID, "left").where(~is_old).select(*_ROW)


def _written(spark: SparkSession, output: str, first: int, last: int) -> DataFrame:
    """Return all rows that a range of steps has written."""
    table = spark.read.schema(s.FOLLOWED).parquet(f"{output}/verdicts")
    return table.where(F.col("batch").between(first, last))


def _steps(spark: SparkSession, output: str) -> list[_State]:
    """Return the finished steps."""
    table = existing(spark, Place("parquet", f"{output}/steps"), s.STEPS)
    if table is None:
        return []
    rows = table.selectExpr(*_MICROS).collect()
    found = [_State(row[0], _time(row[1]), _time(row[2]), _time(row[3]), row[4]) for row in rows]
    return sorted(found, key=attrgetter("batch"))


_TIMES = "final_to", "complete_from", "complete_to"
#: Times as numbers: Python's are in the time zone of the machine.
_MICROS = ["batch", *(f"unix_micros({each})" for each in _TIMES), "offset"]


def _time(micros: int | None) -> datetime | None:
    if micros is None:
        return None
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)


def _ends(
    journal: DataFrame, last: _State, patience: float
) -> tuple[datetime | None, datetime | None]:
    """Return from when to when the journal is complete; only new rows can move the end."""
    if last.complete_from is not None and last.complete_to is not None:
        seconds = timedelta(seconds=patience)
        rows = (F.col("at") >= instant(last.complete_to - seconds)) | (
            F.col("at") <= instant(last.complete_from + timedelta(days=1))
        )
        journal = journal.where(rows)
    first, end = span(journal, patience)
    if end is None or last.complete_to is None:
        return first, end
    return first, max(end, last.complete_to)


@dataclass(frozen=True)
class _Window:
    """The times, from ``start`` to before ``end``, that a step looks at."""

    start: datetime | None
    end: datetime
    reach: float

    def has(self, column: str) -> Column:
        """Return whether a time is in the window."""
        is_in = F.col(column) < instant(self.end)
        return is_in if self.start is None else is_in & (F.col(column) >= instant(self.start))

    def is_within_reach(self, time: datetime | None) -> bool:
        """Return whether a time is not too long ago."""
        if self.start is None or time is None:
            return True
        return time >= self.start - timedelta(seconds=self.reach)

    def reaches(self, *columns: str) -> Column:
        """Return whether a row is young enough to be read: by any of its times, or without any."""
        if self.start is None:
            return F.lit(True)
        oldest = instant(self.start - timedelta(seconds=self.reach))
        is_young, is_undated = F.lit(False), F.lit(True)
        for each in columns:
            is_young |= F.col(each) >= oldest
            is_undated &= F.col(each).isNull()
        return is_young | is_undated


def _candidates(
    receipts: DataFrame | None,
    journal: DataFrame,
    before: DataFrame | None,
    window: _Window,
    offset: int,
) -> DataFrame:
    """Return the ids of messages whose verdict may have become final, or have changed."""
    # A message that was due when it was sent, or that was released, is lost when nothing follows
    # in time, without any new event.
    # One that is out of reach would be judged by the rest of its events.
    is_due = window.has("due") | (
        window.has("at")
        & window.reaches("due")
        & (F.col("due").isNull() | (F.col("at") >= F.col("due")))
    )
    if window.start is not None:
        start, is_new = instant(window.start), F.col("offset") >= offset
        is_due |= is_new & (F.coalesce("due", "at") < start) & window.reaches("due")
        # That includes this, which Spark can compare with the statistics of files.
        journal = journal.where((F.col("due") >= start) | (F.col("at") >= start) | is_new)
    ids = journal.where(F.col("task_id").isNotNull() & is_due).select("task_id", _retries())
    if receipts is None:
        return ids
    is_due = window.has("due") | window.has("published_at")
    sent = receipts.where(F.col("task_id").isNotNull())
    ids = ids.unionByName(sent.where(is_due).select("task_id", F.lit(0).alias("retries")))
    if before is None or window.start is None:
        return ids
    # Receipts that could not be seen when their messages were judged.
    unseen = sent.where(
        (F.greatest("published_at", _due(sent)) < instant(window.start))
        & (F.col("published_at") >= instant(window.start - _UNSEEN))
    )
    seen = before.where("key is not null").select(F.col("task_id").alias("seen"), "verdict")
    # A cancellation can be seen after the receipt of its message, and changes the verdict then.
    is_known = (action_of(sent) == s.PUBLISH) | F.col("verdict").isin(
        s.TAKEN_BACK, s.RAN_AFTER_CANCEL
    )
    first = unseen.join(seen, (F.col("task_id") == F.col("seen")) & is_known, "left_anti")
    ids = ids.unionByName(first.select("task_id", F.lit(0).alias("retries")))
    # Of its retries, too, which have no receipts of their own.
    cancelled = unseen.where(action_of(unseen) == s.CANCEL)
    retried = before.where((F.col("retries") > 0) & (F.col("verdict") != s.RAN_AFTER_CANCEL))
    return ids.unionByName(retried.join(cancelled, "task_id", "left_semi").select(*_ID))


def _rows_of(
    chosen: DataFrame, receipts: DataFrame | None, journal: DataFrame, window: _Window
) -> tuple[DataFrame | None, DataFrame]:
    """Return the receipts and the events of messages, by their ids."""
    events = journal.where(window.reaches("due", "at")).withColumn("retries", _retries())
    events = events.join(chosen, _ID, "left_semi")
    # Two exports at once have written the same events.
    events = events.dropDuplicates([*_ID, "event", "at", "offset"])
    if receipts is None:
        return None, events
    # A cancellation may not know the due time of its task.
    sent = receipts.where(window.reaches("due", "published_at") | F.col("due").isNull())
    # A receipt is of the first try; only that of a cancellation is of all.
    is_of_it = (F.col("retries") == 0) | (action_of(receipts) == s.CANCEL)
    tries = chosen.withColumnRenamed("task_id", "chosen")
    return sent.join(tries, (F.col("task_id") == F.col("chosen")) & is_of_it, "left_semi"), events


def _retries() -> Column:
    return F.coalesce("retries", F.lit(0)).alias("retries")


def _due(receipts: DataFrame) -> Column:
    """Return the due time of a message; that of a cancellation may be one that never came."""
    return F.when(action_of(receipts) == s.PUBLISH, F.col("due"))


def _final(receipts: DataFrame | None, events: DataFrame, window: _Window) -> DataFrame:
    """Return the ids of messages of which no due time or publish is after the window."""
    now = instant(datetime.now(UTC))

    def past(time: str) -> Column:
        """Return a time, unless it is in the future: a clock is wrong."""
        return F.when(F.col(time) <= now, F.col(time))

    times = events.select(*_ID, F.coalesce("due", past("at")).alias("time"))
    if receipts is not None:
        published = F.greatest(_due(receipts), past("published_at")).alias("time")
        times = times.unionByName(receipts.select("task_id", F.lit(0).alias("retries"), published))
    last = times.groupBy(*_ID).agg(F.max("time").alias("last"))
    return last.where(F.coalesce(F.col("last") < instant(window.end), F.lit(True))).select(*_ID)


def _corrected(found: DataFrame, before: DataFrame | None) -> DataFrame:
    """Return the rows that are not there yet as they are now, and whether they correct others."""
    if before is None:
        return found.withColumn("corrected", F.lit(False))
    row = F.struct(*_ROW)
    known = found.join(before.select(*_ID, row.alias("was")), _ID, "left")
    is_there = F.col("was").isNotNull()
    new = known.where(~is_there | ~row.eqNullSafe(F.col("was")))
    return new.select(*_ROW, is_there.alias("corrected"))
