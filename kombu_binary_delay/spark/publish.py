"""Publish a DataFrame as delayed tasks, the earliest due time first, with a receipt for each.

Rows can also cancel or reschedule the tasks of the job: these amendments come first.

The rows are staged first: the rows that are published are those that were checked, even if the
DataFrame gives other rows when it is computed again. Then, slice by slice in the order of the due
times, a Spark job publishes on the executors and writes the receipts. A retried Spark task leaves
one receipt per message, and a driver that dies loses the receipts of one slice at most.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from . import schema as s
from .checks import check_number, check_whole
from .columns import instant, readable
from .compiled import REASONS
from .prepare import FIRST, LAST, job_uuid, prepare
from .send import Sender, Sent, Target
from .tables import (
    Place,
    append,
    check_nulls,
    create,
    delete_matched,
    existing,
    merge,
    read,
    reads_once,
    stage,
)

logger = logging.getLogger(__name__)

_REASON = "reason"
_SENT_COLUMNS = (
    "key string, task_id string, task string, args string, kwargs string, eta bigint, "
    "countdown double, queue string, exchange string, routing_key string, priority int, "
    "expires bigint, headers string, due bigint, action string"
)


#: What is known of a key by its receipts; times in microseconds since the epoch.
_DONE = {
    "was_published": "boolean",
    "was_cancelled": "boolean",
    "due_first": "bigint",
    "due_moved": "bigint",
}


@dataclass(frozen=True)
class Progress:
    """The progress of a publish, in rows.

    :param published: rows confirmed by the broker in this run.
    :param failed: receipts of this run with another status.
    :param remaining: rows still to be published.
    :param rejected: invalid rows, which are not published.
    :param already: rows with a receipt of an earlier run.
    :param later: rows due beyond the horizon.
    :param seconds: time since the first message.
    :param by_send_task: messages of this run that Celery's ``send_task`` made one by one. Over
        Spark Connect, a busy server may not tell of all.
    :param reasons: the reasons for that, each once.
    :param cancelled: cancellations that the broker has confirmed in this run.
    :param rescheduled: the same of reschedulings.
    :param to_cancel: of the remaining rows, those that cancel a task.
    :param to_reschedule: of the remaining rows, those that reschedule a task.
    """

    published: int = 0
    failed: int = 0
    remaining: int = 0
    rejected: int = 0
    already: int = 0
    later: int = 0
    seconds: float = 0.0
    by_send_task: int = 0
    reasons: tuple[str, ...] = ()
    cancelled: int = 0
    rescheduled: int = 0
    to_cancel: int = 0
    to_reschedule: int = 0

    @property
    def confirmed(self) -> int:
        """Rows of any action that the broker has confirmed in this run."""
        return self.published + self.cancelled + self.rescheduled

    @property
    def rate(self) -> float:
        """Rows confirmed per second."""
        return self.confirmed / self.seconds if self.seconds else 0.0


def publish(
    df: DataFrame,
    *,
    job_id: str,
    receipts: str,
    broker: str | None = None,
    key: str = "key",
    app: str | None = None,
    settings: dict[str, Any] | None = None,
    rejects: str | None = None,
    resume: bool = False,
    dry_run: bool = False,
    max_rate: float | None = None,
    horizon: float | None = None,
    past: str = "send",
    publishers: int = 2,
    slice_rows: int = 200_000,
    patience: float = 60.0,
    on_progress: Callable[[Progress], object] | None = None,
) -> Progress:
    """Publish one delayed Celery task per row, and write a receipt for each.

    Tasks arrive at least once, and never early by the publisher's clock. Duplicates have the same
    task id.

    :param df: see :func:`~kombu_binary_delay.spark.prepare.prepare` for its columns.
    :param job_id: the task ids are made from this and the key. Run a job once at a time.
    :param receipts: the place of a table of the schema ``RECEIPTS``, to which rows are appended:
        a path of Parquet, ``FORMAT:PATH``, or ``table:NAME`` for a table in a catalogue.
    :param broker: the broker's URL; None to use that of ``app``.
    :param app: ``"module:name"`` of a Celery application that the executors can import.
    :param settings: the transport's settings, as in ``broker_transport_options["binary_delay"]``.
    :param rejects: the place of a table of the schema ``REJECTS``; by default beside the receipts,
        ``<receipts>-rejects`` or ``<receipts>_rejects`` in a catalogue.
    :param resume: publish only rows without a receipt that says "published", and amend only what
        has no receipt that says "recorded". Without it, a job that has receipts raises an error.
    :param dry_run: count only; publish and write nothing.
    :param max_rate: the most messages per second, of all publishers together.
    :param horizon: seconds; publish only rows due within it, and leave the others for a later run
        with ``resume``. A longer ``countdown`` is rejected, because each run would leave it.
    :param publishers: how many Spark tasks publish at once. More do not make one small broker
        faster.
    :param slice_rows: about how many rows are published between two commits of receipts.
    :param patience: how long an executor waits for an unreachable broker, in seconds.
    :param on_progress: called on the driver after each slice.
    :raises ValueError: for an invalid parameter or column.
    :raises RuntimeError: with speculative execution, which would publish twice; and for a job that
        has receipts, without ``resume``.
    """
    spark = df.sparkSession
    _check(spark, job_id, max_rate, publishers, slice_rows)
    rate = None if max_rate is None else max_rate / publishers
    target = Target(broker, app, settings, rate, patience)
    ladder = target.ladder()
    prepared = prepare(df, job_id=job_id, key=key, ladder=ladder, past=past, horizon=horizon)
    done = _done(spark, receipts, job_id, resume=resume)
    marked = _compared(prepared, done, target.max_age())
    fate = (
        # A published row stays published, even if its due time has passed since.
        F.when(F.col("already"), "already")
        .when(F.col("reason").isNotNull(), "rejected")
        .when(F.col("later"), "later")
        .otherwise("ready")
    )
    marked = marked.withColumn("fate", fate)
    if dry_run:
        return _counted(marked)
    # Before anything is sent: afterwards, there must be a place for the receipts.
    none = spark.createDataFrame([], s.RECEIPTS)
    create(spark, receipts, none.schema)
    check_nulls(spark, receipts, s.OPTIONAL)
    # Many rows may be due at the same time, so the slices are cut by the rows' positions.
    # The amendments come first, because the tasks that they are for may be due soon.
    order = (F.col("action") == s.PUBLISH, "due", "task_id")
    placed = marked.repartitionByRange(*order).sortWithinPartitions(*order)
    placed = placed.withColumn("place", F.monotonically_increasing_id())
    staged, unstage = stage(placed, receipts, job_uuid(job_id))
    progress = _counted(staged)
    if progress.rejected:
        rejected = staged.where("fate = 'rejected'").select(
            F.lit(job_id).alias("job_id"),
            # Many readers refuse a whole table with a text that is not UTF-8.
            *(readable(F.col(name)).alias(name) for name in ("key", "task", "reason")),
            instant(datetime.now(UTC)).alias("rejected_at"),
        )
        _reject(rejected, rejects or Place.parse(receipts).beside("rejects"))
    report = on_progress or (lambda _: None)
    report(progress)
    once = reads_once(spark, receipts)
    begin = time.monotonic()
    for part in _slices(staged.where("fate = 'ready'"), progress.remaining, slice_rows):
        seen = Observation()
        why = F.col(_REASON)
        sent = _sent(part, job_id, target, publishers).observe(
            seen,
            *_outcomes(),
            F.count(why).alias("by_send_task"),
            *(_count(why == place).alias(f"reason_{place}") for place in range(len(REASONS))),
        )
        sent = sent.drop(_REASON)
        if not once:
            # Spark reads them twice from here, not from the publishers. Not for other tables: an
            # executor that is lost while the receipts are written would end the job.
            sent = sent.repartition(publishers)
        append(sent, receipts)
        # Over Spark Connect, a server that is busy ends the command without what was observed.
        counts = Counter(seen.get or _stored(read(spark, receipts, s.RECEIPTS), part, job_id))
        reasons = [each for place, each in enumerate(REASONS) if counts[f"reason_{place}"]]
        progress = replace(
            progress,
            published=progress.published + counts["published"],
            cancelled=progress.cancelled + counts["cancelled"],
            rescheduled=progress.rescheduled + counts["rescheduled"],
            failed=progress.failed
            + counts["all"]
            - sum(counts[each] for each in ("published", "cancelled", "rescheduled")),
            remaining=progress.remaining - counts["all"],
            to_cancel=progress.to_cancel - counts["cancels"],
            to_reschedule=progress.to_reschedule - counts["reschedules"],
            seconds=time.monotonic() - begin,
            by_send_task=progress.by_send_task + counts["by_send_task"],
            reasons=tuple(dict.fromkeys((*progress.reasons, *reasons))),
        )
        report(progress)
    if progress.remaining:
        raise RuntimeError(
            f"{progress.remaining} of the job's rows have no receipt; run it again with resume"
        )
    unstage()
    if existing(spark, receipts, s.RECEIPTS) is None:
        # Nothing was sent to a path that is new. An audit finds that none is missing.
        append(none, receipts)
    if done is not None:
        _forget_failed(spark, receipts, job_id)
    return progress


def _check(
    spark: SparkSession,
    job_id: str,
    max_rate: float | None,
    publishers: int,
    slice_rows: int,
) -> None:
    if not job_id:
        raise ValueError("job_id must name the job, got an empty one")
    if max_rate is not None:
        check_number("max_rate", max_rate)
    for name, number in (("publishers", publishers), ("slice_rows", slice_rows)):
        check_whole(name, number)
    if str(spark.conf.get("spark.speculation", "false")).lower() == "true":
        raise RuntimeError(
            "spark.speculation is on: Spark would run slow tasks twice and publish their messages "
            "twice; set it to false for this job"
        )


def _done(spark: SparkSession, receipts: str, job_id: str, *, resume: bool) -> DataFrame | None:
    """Return what the receipts say of each key of the job; None if the job has none."""
    table = existing(spark, receipts, s.RECEIPTS)
    if table is None:
        return None
    of_job = table.where(F.col("job_id") == job_id)
    if of_job.limit(1).isEmpty():
        return None
    if not resume:
        raise RuntimeError(
            f"the job {job_id!r} has receipts in {receipts}: pass resume to publish what has none, "
            f"or take another job_id to publish everything under other task ids"
        )
    is_published = F.col("status") == s.PUBLISHED
    moved = F.when(F.col("action") == s.RESCHEDULE, F.col("published_at"))
    return (
        of_job.where(F.col("status").isin(s.PUBLISHED, s.RECORDED))
        .groupBy("key")
        .agg(
            F.bool_or(is_published).alias("was_published"),
            F.bool_or(F.col("action") == s.CANCEL).alias("was_cancelled"),
            F.max(F.when(is_published, F.unix_micros("due"))).alias("due_first"),
            F.max_by(F.unix_micros("due"), moved).alias("due_moved"),
        )
    )


def _compared(prepared: DataFrame, done: DataFrame | None, max_age: int) -> DataFrame:
    """Compare rows with the receipts of their keys: add ``already``, reasons and due times.

    :param max_age: how long the broker keeps amendments, in milliseconds.
    """
    if done is None:
        nothing = {name: F.lit(None).cast(kind) for name, kind in _DONE.items()}
        rows = prepared.withColumns(nothing)
    else:
        rows = prepared.join(done, "key", "left")
    now = time.time_ns() // 1000
    action, due = F.col("action"), F.col("due")
    is_cancel, is_move = action == s.CANCEL, action == s.RESCHEDULE
    first, moved = F.col("due_first"), F.col("due_moved")
    already = (
        F.when(is_cancel, F.col("was_cancelled"))
        .when(is_move, moved == due)
        .when(action == s.PUBLISH, F.col("was_published"))
    )
    # When the message arrives next: until it was first due, the last rescheduling counts.
    arrives = F.when(first > now, first).otherwise(F.greatest(first, moved))
    is_far = F.coalesce(arrives, due) > now + max_age * 1000
    found = {
        "the key has been cancelled in this job": ~is_cancel & F.col("was_cancelled"),
        "due earlier than before: a task can only be postponed": is_move & (due < arrives),
        "due later than amendments are kept, by amendments_max_age": is_move & is_far,
    }
    others = (F.when(condition, F.lit(reason)) for reason, condition in found.items())
    reasons = F.concat_ws("; ", "reason", *others)
    # The task of a cancellation may arrive at any of these times.
    known = F.when(due.between(FIRST, LAST), due), first, moved
    return rows.withColumns(
        {
            "already": F.coalesce(already, F.lit(False)),
            "reason": F.when(reasons != "", reasons),
            "due": F.when(is_cancel, F.least(*known)).otherwise(due),
            "eta": F.when(is_cancel, F.greatest(*known)).otherwise(F.col("eta")),
            "countdown": F.when(action == s.PUBLISH, F.col("countdown")),
        }
    ).drop(*_DONE)


def _reject(rejected: DataFrame, rejects: str | Place) -> None:
    """Store rejected rows; where the table can merge, they replace those of earlier runs.

    They are appended if the merge fails, perhaps because another job writes.
    """
    keys = ["job_id", "key", "task", "reason"]
    is_merged = False
    try:
        # A key may have been given twice, or none at all.
        is_merged = merge(rejected.dropDuplicates(keys), rejects, keys)
    except Exception as exc:  # noqa: BLE001 - Java's own errors come as Py4J's
        logger.warning(
            "rejects are appended to %s, since their merge failed: %s", rejects, _without_trace(exc)
        )
    if not is_merged:
        append(rejected, rejects)


def _forget_failed(spark: SparkSession, receipts: str, job_id: str) -> None:
    """Delete receipts of failures that a later receipt has replaced, where the table can.

    Receipts are not merged as they are written: reading them publishes, and some formats read what
    they merge twice; and a merge may fail because another job writes.
    """
    of_job = read(spark, receipts, s.RECEIPTS).where(F.col("job_id") == job_id)
    done = F.col("status").isin(s.PUBLISHED, s.RECORDED)
    if of_job.where(~done).limit(1).isEmpty():
        return
    found = of_job.groupBy("job_id", "key", "action").agg(
        F.max(done).alias("done"), F.max("published_at").alias("last")
    )
    condition = (
        "t.job_id = s.job_id AND t.key = s.key AND t.action <=> s.action "
        f"AND t.status NOT IN ('{s.PUBLISHED}', '{s.RECORDED}') "
        # A rescheduling that was recorded does not replace a later one that failed.
        f"AND (s.done AND NOT s.action <=> '{s.RESCHEDULE}' OR t.published_at < s.last)"
    )
    try:
        delete_matched(found, receipts, condition)
    except Exception as exc:  # noqa: BLE001 - as for rejects
        logger.warning(
            "the receipts of failures before this run are still in %s, beside those that replace "
            "them, which an audit understands: %s",
            receipts,
            _without_trace(exc),
        )


def _without_trace(exc: Exception) -> str:
    """Return the text of an error without Java's stack trace."""
    return str(exc).partition("\n\tat ")[0]


def _counted(marked: DataFrame) -> Progress:
    found = marked.groupBy("fate", "action").count().collect()
    counts: Counter[str] = Counter()
    for row in found:
        counts[row["fate"]] += row["count"]
    amended = {row["action"]: row["count"] for row in found if row["fate"] == "ready"}
    return Progress(
        to_cancel=amended.get(s.CANCEL, 0),
        to_reschedule=amended.get(s.RESCHEDULE, 0),
        remaining=counts.get("ready", 0),
        rejected=counts.get("rejected", 0),
        already=counts.get("already", 0),
        later=counts.get("later", 0),
    )


def _slices(ready: DataFrame, rows: int, slice_rows: int) -> Iterator[DataFrame]:
    """Yield slices by due time, the earliest first; rows with the same due time go by their id."""
    if not rows:
        return
    number = -(-rows // slice_rows)
    shares = [index / number for index in range(1, number)]
    # Spark does not accept an empty list of shares.
    found = ready.approxQuantile("place", shares, 0.1 / number) if shares else []
    bounds = sorted({int(at) for at in found})
    place = F.col("place")
    for low, high in zip([None, *bounds], [*bounds, None], strict=True):
        part = ready if low is None else ready.where(place >= low)
        yield part if high is None else part.where(place < high)


def _sent(part: DataFrame, job_id: str, target: Target, publishers: int) -> DataFrame:
    """Return receipts; reading them publishes. So one action reads them: the one that writes them.

    Another column has the reason why ``send_task`` made a message, if it did.
    """
    columns = [each.split()[0] for each in _SENT_COLUMNS.split(", ")]
    # By the id, so that a retried Spark task has the same rows.
    rows = part.select(*columns).repartition(publishers, "task_id")
    rows = rows.sortWithinPartitions(F.col("action") == s.PUBLISH, "due")

    def send(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        partition = context.partitionId() if context else 0
        attempt = context.attemptNumber() if context else 0
        each = (row for batch in batches for row in batch.to_pylist())
        for finished in Sender(target).send([each]):
            reasons = pa.array([each.reason for each in finished], pa.int32())
            found = receipts_of(finished, job_id, partition, attempt)
            yield pa.RecordBatch.from_arrays(
                [*found.columns, reasons], names=[*found.schema.names, _REASON]
            )

    return rows.mapInArrow(send, f"{s.RECEIPTS}, {_REASON} int")


def _outcomes() -> list[Column]:
    """Return what is counted of the receipts of a slice."""
    status, action = F.col("status"), F.col("action")
    amended = status == s.RECORDED
    return [
        F.count("*").alias("all"),
        _count(status == s.PUBLISHED).alias("published"),
        _count(amended & (action == s.CANCEL)).alias("cancelled"),
        _count(amended & (action == s.RESCHEDULE)).alias("rescheduled"),
        _count(action == s.CANCEL).alias("cancels"),
        _count(action == s.RESCHEDULE).alias("reschedules"),
    ]


def _stored(receipts: DataFrame, part: DataFrame, job_id: str) -> dict[str, int]:
    """Count the outcomes in the stored receipts of a slice; rows may have older ones, too."""
    stored = receipts.where(F.col("job_id") == job_id)
    row = ["key", "action"]
    last = F.max_by("status", "published_at").alias("status")
    latest = stored.join(part.select(*row), row, "left_semi").groupBy(*row).agg(last)
    return latest.agg(*_outcomes()).collect()[0].asDict()


def _count(condition: Column) -> Column:
    return F.count(F.when(condition, 1))


def receipts_of(finished: list[Sent], job_id: str, partition: int, attempt: int) -> pa.RecordBatch:
    """Return receipts as a batch for Spark."""
    when = pa.timestamp("us", "UTC")
    number = len(finished)
    return pa.RecordBatch.from_pydict(
        {
            "job_id": pa.array([job_id] * number, pa.string()),
            "key": pa.array([each.row.get("key") for each in finished], pa.string()),
            "task_id": pa.array([each.row.get("task_id") for each in finished], pa.string()),
            "task": pa.array([each.row.get("task") for each in finished], pa.string()),
            "queue": pa.array([each.queue for each in finished], pa.string()),
            "due": pa.array([each.due for each in finished], when),
            "published_at": pa.array([each.published_at for each in finished], when),
            "hops": pa.array([each.hops for each in finished], pa.int32()),
            "partition": pa.array([partition] * number, pa.int32()),
            "attempt": pa.array([attempt] * number, pa.int32()),
            "status": pa.array([each.status for each in finished], pa.string()),
            "detail": pa.array([each.detail for each in finished], pa.string()),
            "action": pa.array([each.action for each in finished], pa.string()),
        }
    )
