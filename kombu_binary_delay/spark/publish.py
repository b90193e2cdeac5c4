"""Publish a DataFrame as delayed tasks, the earliest due time first, with a receipt for each.

Rows can also cancel or reschedule the tasks of the job: these amendments come first.

The rows are staged first: the rows that are published are those that were checked, even if the
DataFrame gives other rows when it is computed again. Then, slice by slice in the order of the due
times, a Spark job publishes on the executors and writes the receipts. A slice is some seconds of
work, by the pace of those before it. A retried Spark task leaves one receipt per message, and a
driver that dies loses the receipts of one slice at most.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, Observation, Row, SparkSession
from pyspark.sql import functions as F

from kombu_binary_delay.ladder.ladder import Ladder

from . import schema as s
from .checks import check_number, check_whole
from .columns import CANNOT, instant, readable
from .compiled import REASONS
from .prepare import FIRST, LAST, job_uuid, prepare
from .rows import COLUMNS, Rows
from .send import LOST, Sender, Target
from .staging import Staging
from .tables import Place, append, empty, existing, read

logger = logging.getLogger(__name__)

_REASON = "reason"
_TIME = pa.timestamp("us", "UTC")
#: After how many new objects Python looks for cyclic garbage while rows are sent.
_ALLOCATIONS = 100_000
#: How many rows a second each publisher is expected to send, before the pace is known: those of
#: ``send_task`` on a slow machine. And how many times as large as a slice the next one may be:
#: messages of another kind have another pace.
_FIRST_PACE, _GROWTH = 700, 4
#: By so many bits, Spark shifts the number of a row's part in its place.
_OF_PART = 33
#: How long to wait for a broker that has not confirmed anything yet, in seconds.
_AT_FIRST = 10.0
#: The most reasons of rejected rows that are counted.
_REASONS = 10
#: In place of the status of a receipt: the broker was lost, and the rest has not been sent.
_UNREACHABLE = "unreachable"

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
    :param rejections: the most frequent reasons for that, each with the number of rows.
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
    rejections: dict[str, int] = field(default_factory=dict)

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
    columns: Mapping[str, str] | None = None,
    app: str | None = None,
    settings: dict[str, Any] | None = None,
    rejects: str | None = None,
    resume: bool = False,
    dry_run: bool = False,
    max_rate: float | None = None,
    horizon: float | None = None,
    past: str = "send",
    publishers: int = 2,
    slice_seconds: float = 15.0,
    patience: float = 60.0,
    on_progress: Callable[[Progress], object] | None = None,
) -> Progress:
    """Publish one delayed Celery task per row, and write a receipt for each.

    Tasks arrive at least once, and never early by the publisher's clock. Duplicates have the same
    task id.

    :param df: see :func:`~kombu_binary_delay.spark.prepare.prepare` for its columns.
    :param job_id: the task ids are made from this and the key. A job runs once at a time: a second
        run waits until it knows whether the first has died, and then goes on, or raises an error.
    :param receipts: the place of a table of the schema ``RECEIPTS``, to which rows are appended:
        a path of Parquet, ``FORMAT:PATH``, or ``table:NAME`` for a table in a catalogue.
    :param broker: the broker's URL; None to use that of ``app``.
    :param columns: the names of the table's columns by ours, where they differ, such as
        ``{"key": "customer", "eta": "next_contact"}``. Rows can amend tasks only if ``action`` is
        among them.
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
    :param slice_seconds: for how long rows are published between two commits of receipts. So much
        work, by up to four times as many rows where the pace drops, is published again after a
        driver or an executor has died.
    :param patience: how long an executor waits for an unreachable broker, in seconds; at most 10
        before the broker has confirmed anything.
    :param on_progress: called on the driver after each slice.
    :raises ConnectionError: if the broker is unreachable for longer than the patience.
    :raises ValueError: for an invalid parameter or column.
    :raises RuntimeError: with speculative execution, which would publish twice; for a job that has
        receipts, without ``resume``; and if another run of the job is at work.
    """
    spark = df.sparkSession
    _check(spark, job_id, max_rate, publishers, slice_seconds)
    rate = None if max_rate is None else max_rate / publishers
    target = Target(broker, app, settings, rate, patience)
    ladder = target.ladder()
    options: dict[str, Any] = {"columns": columns, "past": past, "horizon": horizon}
    prepared = prepare(df, job_id=job_id, ladder=ladder, **options)

    def marked() -> tuple[DataFrame, bool]:
        done = _done(spark, receipts, job_id, resume=resume)
        rows = _compared(prepared, done, target.max_age())
        fate = (
            # A published row stays published, even if its due time has passed since.
            F.when(F.col("already"), "already")
            .when(F.col("reason").isNotNull(), "rejected")
            .when(F.col("later"), "later")
            .otherwise("ready")
        )
        return rows.withColumn("fate", fate), done is not None

    if dry_run:
        rows, _ = marked()
        counts = rows.groupBy("fate", "action").agg(F.count("*").alias("rows"))
        return _counted(rows, counts.collect())
    longest = patience + _GROWTH * slice_seconds
    staging = Staging(spark, Place.parse(receipts), job_uuid(job_id), longest)
    staging.claim()
    try:
        rows, is_resumed = marked()
        progress = _run(
            rows,
            _Run(job_id, target, receipts, rejects, publishers, slice_seconds, max_rate),
            staging,
            on_progress or (lambda _: None),
            is_new=not is_resumed,
        )
    except BaseException:
        # Spark itself may have failed.
        with suppress(Exception):
            staging.end()
        raise
    staging.drop()
    return progress


def _check(
    spark: SparkSession,
    job_id: str,
    max_rate: float | None,
    publishers: int,
    slice_seconds: float,
) -> None:
    if not job_id:
        raise ValueError("job_id must name the job, got an empty one")
    if max_rate is not None:
        check_number("max_rate", max_rate)
    check_number("slice_seconds", slice_seconds)
    check_whole("publishers", publishers)
    if str(spark.conf.get("spark.speculation", "false")).lower() == "true":
        raise RuntimeError(
            "spark.speculation is on: Spark would run slow tasks twice and publish their messages "
            "twice; set it to false for this job"
        )


@dataclass(frozen=True)
class _Run:
    """What a run of a job is given."""

    job_id: str
    target: Target
    receipts: str
    rejects: str | None
    publishers: int
    slice_seconds: float
    max_rate: float | None


def _run(
    marked: DataFrame,
    run: _Run,
    staging: Staging,
    report: Callable[[Progress], object],
    *,
    is_new: bool,
) -> Progress:
    spark, job_id = marked.sparkSession, run.job_id
    if is_new:
        # Before anything is sent: afterwards, there must be a place for the receipts.
        append(empty(spark, s.RECEIPTS), run.receipts)
    # Those that are ready come first in each part, so that their places follow each other. The
    # amendments come before all others, because the tasks that they are for may be due soon.
    order = (F.col("fate") != "ready", F.col("action") == s.PUBLISH, "due", "task_id")
    placed = marked.repartitionByRange(*order).sortWithinPartitions(*order)
    staged = staging.store(placed.withColumn("place", F.monotonically_increasing_id()))
    groups = staged.groupBy("fate", "action", F.shiftright("place", _OF_PART))
    figures = F.min("place").alias("first"), F.count("*").alias("rows")
    parts = groups.agg(*figures).collect()
    staging.check_stored(sum(row["rows"] for row in parts))
    progress = _counted(staged, parts)
    if progress.rejected:
        rejected = staged.where("fate = 'rejected'").select(
            F.lit(job_id).alias("job_id"),
            # Many readers refuse a whole table with a text that is not UTF-8.
            *(F.expr(readable(name)).alias(name) for name in ("key", "task", "reason")),
            instant(datetime.now(UTC)).alias("rejected_at"),
        )
        append(rejected, run.rejects or str(Place.parse(run.receipts).beside("rejects")))
    report(progress)
    begin = time.monotonic()
    for part in _slices(staged, parts, run):
        # Also before the first: to store the rows may take longer than the lease is valid.
        staging.renew()
        is_first = not progress.confirmed
        target = replace(run.target, patience=min(run.target.patience, _AT_FIRST))
        counts = _publish_slice(part, run, target if is_first else run.target)
        bits = counts["reasons"] or 0
        reasons = [text for place, text in enumerate(REASONS) if bits >> place & 1]
        confirmed = counts["published"] + counts["cancelled"] + counts["rescheduled"]
        progress = replace(
            progress,
            published=progress.published + counts["published"],
            cancelled=progress.cancelled + counts["cancelled"],
            rescheduled=progress.rescheduled + counts["rescheduled"],
            failed=progress.failed + counts["all"] - confirmed,
            remaining=progress.remaining - counts["all"],
            to_cancel=progress.to_cancel - counts["cancels"],
            to_reschedule=progress.to_reschedule - counts["reschedules"],
            seconds=time.monotonic() - begin,
            by_send_task=progress.by_send_task + counts["by_send_task"],
            reasons=tuple(dict.fromkeys((*progress.reasons, *reasons))),
        )
        report(progress)
        if counts["outage"]:
            raise ConnectionError(
                f"the broker cannot be reached: {counts['outage']}; {progress.remaining:,} of the "
                f"job's rows have no receipt: run it again with resume"
            )
    if progress.remaining:
        raise RuntimeError(
            f"{progress.remaining} of the job's rows have no receipt; run it again with resume"
        )
    return progress


def _publish_slice(part: DataFrame, run: _Run, target: Target) -> Mapping[str, Any]:
    """Publish rows, write their receipts, and count the outcomes."""
    seen = Observation()
    sent = _sent(part, run.job_id, target, run.publishers).observe(
        seen,
        *_outcomes(),
        F.expr(f"count({_REASON}) AS by_send_task"),
        F.expr(f"bit_or(shiftleft(1, {_REASON})) AS reasons"),
        F.expr(f"max(CASE WHEN status = '{_UNREACHABLE}' THEN detail END) AS outage"),
    )
    sent = sent.where(f"status <> '{_UNREACHABLE}'").drop(_REASON)
    if not Place.parse(run.receipts).is_files:
        # Some tables read them twice: from here, not from the publishers. Not so files: an
        # executor that is lost while the receipts are written would end the job.
        sent = sent.repartition(run.publishers)
    append(sent, run.receipts)
    counts = seen.get
    if not counts:
        # Over Spark Connect, a server that is busy ends the command without what was observed.
        receipts = read(part.sparkSession, run.receipts, s.RECEIPTS)
        counts = {"outage": None, **_stored(receipts, part, run.job_id)}
    return Counter(counts)


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
    refusals = {
        "the key has been cancelled in this job": ~is_cancel & F.col("was_cancelled"),
        "due earlier than before: a task can only be postponed": is_move & (due < arrives),
        "due later than amendments are kept, by amendments_max_age": is_move & is_far,
    }
    others = (F.when(condition, F.lit(reason)) for reason, condition in refusals.items())
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


def _counted(marked: DataFrame, groups: list[Row]) -> Progress:
    """Return what is to be done.

    :param groups: how many rows have each fate and action, also in several parts.
    """
    counts: Counter[str] = Counter()
    amended: Counter[str] = Counter()
    for row in groups:
        counts[row["fate"]] += row["rows"]
        if row["fate"] == "ready":
            amended[row["action"]] += row["rows"]
    return Progress(
        to_cancel=amended[s.CANCEL],
        to_reschedule=amended[s.RESCHEDULE],
        remaining=counts["ready"],
        rejected=counts["rejected"],
        already=counts["already"],
        later=counts["later"],
        rejections=_rejections(marked) if counts["rejected"] else {},
    )


def _rejections(marked: DataFrame) -> dict[str, int]:
    # The text of a row that cannot be read is its own.
    reason = F.regexp_replace("reason", f"({CANNOT}): .*", "$1")
    rows = marked.where("fate = 'rejected'").groupBy(reason.alias("reason")).count()
    most = rows.orderBy(F.desc("count"), "reason").limit(_REASONS).collect()
    return {row["reason"]: row["count"] for row in most}


def _slices(staged: DataFrame, parts: list[Row], run: _Run) -> Iterator[DataFrame]:
    """Yield slices by due time, the earliest first; rows with the same due time go by their id.

    Each takes about as long as it should, by the pace of the one before, which has been published
    when the next is asked for.
    """
    ready = staged.where("fate = 'ready'").select("key", *COLUMNS, "place")
    for kind in (False, True):
        of_parts: dict[int, tuple[int, int]] = {}
        for row in parts:
            if row["fate"] == "ready" and (row["action"] == s.PUBLISH) is kind:
                # In a part, cancellations and reschedulings are mixed, by their due times.
                part = row["first"] >> _OF_PART
                first, count = of_parts.get(part, (row["first"], 0))
                of_parts[part] = min(first, row["first"]), count + row["rows"]
        rest = sorted(of_parts.values())
        rows = max(1, int(_FIRST_PACE * run.slice_seconds)) * run.publishers
        while rest:
            if kind and run.max_rate is not None:
                rows = max(1, min(rows, int(run.max_rate * run.slice_seconds)))
            low, high, taken = _take(rest, rows)
            begun = time.monotonic()
            of_kind = f"(action = '{s.PUBLISH}') = {kind}"
            yield ready.where(f"{of_kind} AND place >= {low} AND place < {high}").drop("place")
            rows = _slice_rows(taken, time.monotonic() - begun, run.slice_seconds)


def _slice_rows(rows: int, seconds: float, wanted: float) -> int:
    """Return the rows of the next slice, by the rows and the seconds of the last one."""
    pace = rows / max(seconds, 0.001)
    return max(1, int(min(pace * wanted, rows * _GROWTH)))


def _take(rest: list[tuple[int, int]], rows: int) -> tuple[int, int, int]:
    """Take the first of the rows that are left.

    :param rest: the first place and the number of rows of each part; what is taken is removed.
    :returns: the first place, the one after the last, and how many rows there are.
    """
    low, taken, high = rest[0][0], 0, rest[0][0]
    while rest and taken < rows:
        first, count = rest[0]
        part = min(count, rows - taken)
        taken, high = taken + part, first + part
        if part == count:
            rest.pop(0)
        else:
            rest[0] = high, count - part
    return low, high, taken


def _sent(part: DataFrame, job_id: str, target: Target, publishers: int) -> DataFrame:
    """Return receipts; reading them publishes. So one action reads them: the one that writes them.

    Another column has the reason why ``send_task`` made a message, if it did.
    """
    # By the id, so that a retried Spark task has the same rows.
    rows = part.repartition(publishers, "task_id")
    rows = rows.sortWithinPartitions(F.expr(f"action = '{s.PUBLISH}'"), "due")

    def send(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        task = (context.partitionId(), context.attemptNumber()) if context else (0, 0)
        # Rows are no cyclic garbage, and to look for that took a quarter of the time.
        ladder, collected = target.ladder(), gc.get_threshold()
        gc.set_threshold(_ALLOCATIONS, *collected[1:])
        try:
            for batch, sent in Sender(target).send(batches):
                yield receipts_of(batch, sent, job_id, ladder, task)
        except LOST as exc:
            # No error of Spark's, which would try it again and again.
            yield _unreachable(exc)
        finally:
            gc.set_threshold(*collected)

    return rows.mapInArrow(send, f"{s.RECEIPTS}, {_REASON} int")


def _outcomes() -> list[Column]:
    """Return what is counted of the receipts of a slice."""
    conditions = {
        "all": f"status <> '{_UNREACHABLE}'",
        "published": f"status = '{s.PUBLISHED}'",
        "cancelled": f"status = '{s.RECORDED}' AND action = '{s.CANCEL}'",
        "rescheduled": f"status = '{s.RECORDED}' AND action = '{s.RESCHEDULE}'",
        "cancels": f"action = '{s.CANCEL}'",
        "reschedules": f"action = '{s.RESCHEDULE}'",
    }
    # As SQL: a column that Python makes of parts takes a call of the JVM for each of them.
    return [F.expr(f"count_if({is_it}) AS `{name}`") for name, is_it in conditions.items()]


def _stored(receipts: DataFrame, part: DataFrame, job_id: str) -> dict[str, int]:
    """Count the outcomes in the stored receipts of a slice; rows may have older ones, too."""
    stored = receipts.where(F.col("job_id") == job_id)
    row = ["key", "action"]
    last = F.max_by("status", "published_at").alias("status")
    latest = stored.join(part.select(*row), row, "left_semi").groupBy(*row).agg(last)
    return latest.agg(*_outcomes()).collect()[0].asDict()


def receipts_of(
    batch: pa.RecordBatch, sent: list[Rows], job_id: str, ladder: Ladder, task: tuple[int, int]
) -> pa.RecordBatch:
    """Return the receipts of a batch's rows, as far as they have an outcome, as a batch for Spark.

    The last column has the reason why ``send_task`` made a message, if it did.

    :param sent: the first rows of the batch.
    :param task: the partition and the attempt of Spark's task.
    """

    def column(name: str, kind: pa.DataType) -> pa.Array:
        return pa.array(list(chain.from_iterable(getattr(rows, name) for rows in sent)), kind)

    batch = batch.slice(0, sum(map(len, sent)))
    due = column("due", pa.int64())
    at = column("published_at", pa.int64())
    queue = column("queue", pa.string())
    status = column("status", pa.string())
    columns = {
        "job_id": pa.repeat(job_id, len(batch)),
        **{name: batch.column(name) for name in ("key", "task_id", "task")},
        "queue": queue,
        "due": due.cast(_TIME),
        "published_at": at.cast(_TIME),
        "hops": pc.if_else(queue.is_valid(), _hops(ladder, due, at), None),
        "partition": pa.repeat(pa.scalar(task[0], pa.int32()), len(batch)),
        "attempt": pa.repeat(pa.scalar(task[1], pa.int32()), len(batch)),
        "status": status,
        "detail": column("detail", pa.string()),
        "action": batch.column("action"),
        _REASON: column("reason", pa.int32()),
    }
    return pa.RecordBatch.from_pydict(columns).filter(status.is_valid())


def _unreachable(exc: BaseException) -> pa.RecordBatch:
    """Return what stands for the receipts that are missing since the broker was lost."""
    kinds = {"int": pa.int32(), "string": pa.string(), "timestamp_ltz": _TIME}
    columns = s.columns_of(f"{s.RECEIPTS}, {_REASON} int")
    schema = pa.schema([(name, kinds[kind]) for name, kind in columns.items()])
    row = {"status": _UNREACHABLE, "detail": str(exc)}
    return pa.RecordBatch.from_pylist([row], schema)


def _hops(ladder: Ladder, due: pa.Array, at: pa.Array) -> pa.Array:
    """Return in how many queues each message waits."""
    tick = ladder.tick * 1000
    delays = pc.max_element_wise(pc.subtract(due, at), 0, skip_nulls=False)
    rest, hops = pc.divide(pc.add(delays, tick - 1), tick), pa.scalar(0, pa.int32())
    for radix in reversed(ladder.radices):
        above = pc.divide(rest, radix)
        waits = pc.not_equal(rest, pc.multiply(above, radix))
        rest, hops = above, pc.add(hops, waits.cast(pa.int32()))
    return hops
