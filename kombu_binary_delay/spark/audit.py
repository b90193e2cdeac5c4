"""Proof: one verdict a task, from what was published and what really happened.

Receipts and journal are one union of events and one ``groupBy``, which beats joins. A verdict of
"lost" needs evidence: a publish that no receipt denies, and a journal that goes on for longer than
a message could still take. It must not touch a broker.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from . import schema as s
from .checks import check_not_negative

#: The percentiles of the lateness that are reported.
SHARES = (0.5, 0.9, 0.99, 0.999)
_PERCENTILES = ("p50", "p90", "p99", "p999")
_ACCURACY = 10_000


@dataclass(frozen=True)
class Thresholds:
    """What an audit allows; None allows anything.

    :param early: tasks that came before they were due.
    :param lost: tasks lost, in the ladder or after release.
    :param duplicates: tasks that came more than once.
    :param late: tasks later than ``late_after``.
    :param unpublished: receipts that say the broker does not have the message.
    :param unknown: tasks whose fate the journal does not show.
    :param p99: the lateness in seconds that 99 of 100 tasks do not exceed.
    :param judged: how many tasks at least must have a verdict other than "unknown"; 0 allows an
        audit that judges nothing.
    """

    early: float | None = 0
    lost: float | None = 0
    duplicates: float | None = None
    late: float | None = None
    unpublished: float | None = None
    unknown: float | None = None
    p99: float | None = None
    judged: float | None = 1


def audit(
    receipts: DataFrame | None,
    journal: DataFrame,
    *,
    late_after: float = 5.0,
    patience: float = 300.0,
    until: datetime | None = None,
) -> DataFrame:
    """Give one verdict a message: rows of :data:`~kombu_binary_delay.spark.schema.VERDICTS`.

    :param receipts: what was published, of the schema ``RECEIPTS``; None to judge by the journal
        alone.
    :param journal: what happened, of the schema ``JOURNAL``.
    :param late_after: seconds after the due time from which a task is "late".
    :param patience: seconds after which a message that has not come counts as lost, rather than on
        its way. A broker that lost a confirm in a crash sends again after 180.
    :param until: up to when the journal is complete; by default the time of its last event. Where
        everything has arrived, nothing is written any more, so say it if you know better.
    :raises ValueError: for a negative time.
    """
    for name, value in (("late_after", late_after), ("patience", patience)):
        check_not_negative(name, value)
    events = _events_of_journal(journal)
    if receipts is not None:
        events = events.unionByName(_events_of_receipts(receipts))
    arrival = F.col("event").isin(s.RELEASED, s.EXECUTED)
    tasks = events.groupBy("task_id", "retries").agg(
        F.max("key").alias("key"),
        F.max("task").alias("task"),
        F.max("queue").alias("queue"),
        # A duplicate that was sent later may be due later: what counts is the first promise, of
        # those that the broker took, as a receipt or an arrival says.
        # Of one that was postponed, the last.
        F.when(F.max(F.col("event") == s.POSTPONED), F.max("due"))
        .otherwise(
            F.coalesce(F.min(F.when(F.col("confirmed") | arrival, F.col("due"))), F.min("due"))
        )
        .alias("due"),
        # To the microsecond: a difference of doubles would be a little off.
        F.min(F.when(arrival, F.unix_micros("at") - F.unix_micros("due"))).alias("soonest"),
        F.min("published_at").alias("published_at"),
        F.max("published_at").alias("published_last"),
        F.max("hops").alias("hops"),
        F.max("entered").alias("entered"),
        F.max("confirmed").alias("confirmed"),
        _count(s.SCHEDULED).alias("scheduled"),
        _count(s.RELEASED).alias("released"),
        _count(s.EXECUTED).alias("executed"),
        _count(s.CANCELLED).alias("cancelled"),
        F.min(F.when(F.col("event") == s.RELEASED, F.col("at"))).alias("released_at"),
        F.min(F.when(F.col("event") == s.EXECUTED, F.col("at"))).alias("executed_at"),
        F.max("state").alias("state"),
    )
    span = journal.agg(F.min("at").alias("journal_from"), F.max("at").alias("journal_to"))
    if until is not None:
        span = span.withColumn("journal_to", F.greatest("journal_to", F.lit(until)))
    arrived = F.least("released_at", "executed_at")
    # No copy may come before its own due time, though it be after that of an older one.
    early = F.when(F.col("soonest") < 0, F.col("soonest"))
    late = F.unix_micros(arrived) - F.unix_micros("due")
    lateness = F.coalesce(early, late) / 1_000_000
    # What was published after its due time cannot have come before.
    expected = F.greatest("due", "published_last")
    known = tasks.crossJoin(F.broadcast(span)).withColumns(
        {"arrived_at": arrived, "lateness": lateness, "expected": expected}
    )
    verdict = _verdict(late_after, patience)
    columns = [each.split()[0] for each in s.VERDICTS.split(", ")]
    return known.withColumn("verdict", verdict).select(*columns)


def lateness(verdicts: DataFrame) -> DataFrame:
    """Return the lateness percentiles in all, and by hour (UTC), queue, task and number of hops.

    :returns: ``grouping, value, tasks, p50, p90, p99, p999, worst``, the last five in seconds.
    """
    arrived = verdicts.where(F.col("lateness").isNotNull()).select(
        "lateness",
        F.explode(
            F.array(
                _group("all", F.lit("all")),
                _group("hour", _hour("due")),
                _group("queue", F.col("queue")),
                _group("task", F.col("task")),
                _group("hops", F.col("hops").cast("string")),
            )
        ).alias("group"),
    )
    found = arrived.groupBy("group.grouping", "group.value").agg(
        F.count("*").alias("tasks"),
        F.percentile_approx("lateness", list(SHARES), _ACCURACY).alias("at"),
        F.max("lateness").alias("worst"),
    )
    shares = [F.col("at")[index].alias(name) for index, name in enumerate(_PERCENTILES)]
    return found.select("grouping", "value", "tasks", *shares, "worst")


def summarize(verdicts: DataFrame, thresholds: Thresholds | None = None) -> dict[str, Any]:
    """Count the verdicts, and hold them against thresholds: what ``summary.json`` says.

    :returns: ``tasks``, ``verdicts`` (a count each), ``lateness`` (seconds), ``thresholds`` (for
        each that is set: measured, allowed, passed) and ``passed``.
    """
    thresholds = thresholds or Thresholds()
    counted = dict.fromkeys(s.VERDICT_NAMES, 0)
    counted.update(
        {row["verdict"]: row["count"] for row in verdicts.groupBy("verdict").count().collect()}
    )
    [overall] = verdicts.agg(
        F.percentile_approx("lateness", list(SHARES), _ACCURACY).alias("at"),
        F.min("lateness").alias("earliest"),
        F.max("lateness").alias("worst"),
    ).collect()
    shares = overall["at"] or [None] * len(SHARES)
    late = dict(zip(_PERCENTILES, shares, strict=True))
    late |= {"earliest": overall["earliest"], "worst": overall["worst"]}
    measured = {
        "early": counted[s.EARLY],
        "lost": counted[s.LOST_IN_THE_LADDER] + counted[s.LOST_AFTER_RELEASE],
        "duplicates": counted[s.DUPLICATE],
        "late": counted[s.LATE],
        "unpublished": counted[s.NOT_PUBLISHED],
        "unknown": counted[s.UNDECIDED],
        "p99": late["p99"] or 0.0,
        "judged": sum(counted.values()) - counted[s.UNDECIDED],
    }
    held = {
        name: {
            "measured": measured[name],
            "allowed": allowed,
            "passed": allowed <= measured[name] if name == "judged" else measured[name] <= allowed,
        }
        for name, allowed in asdict(thresholds).items()
        if allowed is not None
    }
    return {
        "tasks": sum(counted.values()),
        "verdicts": counted,
        "lateness": late,
        "thresholds": held,
        "passed": all(each["passed"] for each in held.values()),
    }


# -- one shape for all events -----------------------------------------------------------------


def _events_of_journal(journal: DataFrame) -> DataFrame:
    scheduled = F.col("event") == s.SCHEDULED
    return journal.select(
        "event",
        "task_id",
        F.coalesce("retries", F.lit(0)).alias("retries"),
        F.lit(None).cast("string").alias("key"),
        "task",
        "queue",
        "at",
        "due",
        F.when(scheduled, F.col("at")).alias("published_at"),
        F.when(scheduled, F.col("hops")).alias("hops"),
        F.when(scheduled, F.col("hops") > 0).alias("entered"),
        # To the journal a message is published when it is sent; whether the broker took it, only
        # a receipt can show.
        F.lit(None).cast("boolean").alias("confirmed"),
        "state",
    ).where(F.col("task_id").isNotNull())


def _events_of_receipts(receipts: DataFrame) -> DataFrame:
    return receipts.select(
        F.lit("receipt").alias("event"),
        "task_id",
        F.lit(0).alias("retries"),
        "key",
        "task",
        "queue",
        F.lit(None).cast("timestamp").alias("at"),
        "due",
        "published_at",
        "hops",
        # It is made out before the message is sent, so the journal knows better.
        F.lit(None).cast("boolean").alias("entered"),
        (F.col("status") == s.PUBLISHED).alias("confirmed"),
        F.lit(None).cast("string").alias("state"),
        # A row that had no id was refused: there never was a message.
    ).where(F.col("task_id").isNotNull())


def _count(event: str) -> Column:
    return F.sum(F.when(F.col("event") == event, 1).otherwise(0)).cast("int")


def _hour(column: str) -> Column:
    """Write the hour of a time, in UTC whatever the zone of the session."""
    epoch = F.lit("1970-01-01").cast("timestamp_ntz")
    time = epoch + F.make_dt_interval(secs=F.unix_seconds(F.col(column)))
    return F.concat(time.cast("string").substr(1, 13), F.lit(":00"))


def _group(name: str, value: Column) -> Column:
    return F.struct(F.lit(name).alias("grouping"), value.alias("value"))


# -- the verdict ------------------------------------------------------------------------------


def _verdict(late_after: float, patience: float) -> Column:
    released, executed = F.col("released"), F.col("executed")
    nothing_came = (released == 0) & (executed == 0)
    # Celery's worker says when it has executed; who consumes with Kombu alone has no task name,
    # and says no more than that it got the message.
    unexecuted = (executed == 0) & F.col("task").isNotNull()
    # What is due when it is sent goes straight to its destination.
    entered = F.coalesce(F.col("entered"), F.col("hops") > 0, F.lit(True))
    lost = nothing_came & _passed("expected", patience)
    return (
        F.when(F.col("lateness") < 0, s.EARLY)
        .when(nothing_came & (F.col("cancelled") > 0), s.TAKEN_BACK)
        .when(nothing_came & ~F.coalesce("confirmed", F.lit(True)), s.NOT_PUBLISHED)
        .when(nothing_came & _too_little_journal(), s.UNDECIDED)
        .when(lost & entered, s.LOST_IN_THE_LADDER)
        .when(lost, s.LOST_AFTER_RELEASE)
        .when(nothing_came, s.STILL_WAITING)
        .when(unexecuted & _passed("released_at", patience), s.LOST_AFTER_RELEASE)
        .when(unexecuted, s.STILL_WAITING)
        .when(F.when(executed > 0, executed).otherwise(released) > 1, s.DUPLICATE)
        .when(F.col("due").isNull(), s.UNDECIDED)
        .when(F.col("lateness") > late_after, s.LATE)
        .otherwise(s.OK)
    )


def _too_little_journal() -> Column:
    """Whether the journal does not show it: it is missing, or may have begun after the message."""
    start = F.col("journal_from")
    return F.col("due").isNull() | start.isNull() | (start > F.col("expected"))


def _passed(column: str, patience: float) -> Column:
    """Whether the journal goes on for longer than the patience after this time."""
    gone = F.unix_micros("journal_to") - F.unix_micros(F.col(column))
    return gone > round(patience * 1_000_000)


__all__ = ["SHARES", "Thresholds", "audit", "lateness", "summarize"]
