"""Audit: one verdict per task, from the receipts of the publish and the journal of events.

Receipts and journal become one union of events and one ``groupBy``, which is faster than joins. A
verdict of "lost" needs evidence: a publish that no receipt denies, and a journal that continues for
longer than the message could still take. A single event is no evidence, because a clock may be
wrong. This module must not touch a broker.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from kombu_binary_delay.journal.events import ROUNDING

from . import schema as s
from .checks import check_limits, check_not_negative
from .columns import action_of, instant, messages

#: The percentiles of the lateness that are reported.
SHARES = (0.5, 0.9, 0.99, 0.999)
_PERCENTILES = ("p50", "p90", "p99", "p999")
_ACCURACY = 10_000
#: How an audit ends.
PASSED, FAILED, NOT_JUDGED_YET = "passed", "failed", "not judged yet"
#: The largest difference between the clocks of two machines, in microseconds, that is accepted.
_SKEW = 60_000_000
#: Celery's state of a task that the worker has discarded.
_REVOKED = "REVOKED"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: The number of groups of tasks in the journal; two groups must agree on a time.
_WITNESSES = 1024


@dataclass(frozen=True)
class Thresholds:
    """The limits of an audit; None sets no limit.

    :param early: tasks that arrived before they were due.
    :param lost: tasks lost, in the ladder or after release.
    :param duplicates: tasks that arrived more than once.
    :param late: tasks later than ``late_after``.
    :param unpublished: receipts that say the broker does not have the message.
    :param ran_after_cancel: tasks that ran though a receipt says that they were cancelled before.
    :param reschedule_ignored: tasks that ran before the time to which a receipt had moved them.
    :param unknown: tasks whose outcome the journal does not show.
    :param p99: the lateness in seconds that 99 of 100 tasks do not exceed.
    :param judged: the fewest tasks that must have a verdict other than "unknown" and "still
        waiting", which are no evidence; 0 allows an audit without such a verdict.
    :raises ValueError: for a threshold that is not a finite number >= 0.
    """

    early: float | None = 0
    lost: float | None = 0
    duplicates: float | None = None
    late: float | None = None
    unpublished: float | None = None
    ran_after_cancel: float | None = 0
    reschedule_ignored: float | None = 0
    unknown: float | None = None
    p99: float | None = None
    judged: float | None = 1

    def __post_init__(self) -> None:
        check_limits(asdict(self))


def audit(
    receipts: DataFrame | None,
    journal: DataFrame,
    *,
    late_after: float = 5.0,
    patience: float = 300.0,
    since: datetime | None = None,
    until: datetime | None = None,
) -> DataFrame:
    """Return one verdict per message: rows of :data:`~kombu_binary_delay.spark.schema.VERDICTS`.

    :param receipts: what was published, with the schema ``RECEIPTS``; None to use the journal
        alone.
    :param journal: the events, with the schema ``JOURNAL``.
    :param late_after: seconds after the due time from which a task is "late".
    :param patience: seconds after which a message that has not arrived, or whose task has not
        ended, counts as lost: more than the longest run, and the wait in a worker before it. A
        broker that lost a confirm in a crash sends the message again after 180 seconds.
    :param since: the time from which the journal is complete; see ``until``.
    :param until: the time up to which the journal is complete, for example because you have read
        the broker's stream to its end. By default, the latest time that an export has recorded, or
        that two clocks confirm: the time of an arrival that agrees with its due time, or a time
        that two tasks have reached.
    :raises ValueError: for a negative time.
    """
    for name, value in (("late_after", late_after), ("patience", patience)):
        check_not_negative(name, value)
    now = datetime.now(UTC)
    latest = now if until is None else max(now, until.astimezone(UTC))
    happened = _events_of_journal(journal)
    known_ends = {"journal_from": since, "journal_to": until}
    given = {name: instant(time) for name, time in known_ends.items() if time is not None}
    if len(given) < len(known_ends):
        ends = _span(_timed(happened, latest), patience)
    else:
        ends = journal.sparkSession.range(1).withColumnRenamed("id", "none")
    ends = ends.withColumns(given).select(*known_ends, "none")
    events = happened.where(F.col("task_id").isNotNull())
    if receipts is not None:
        events = events.unionByName(_events_of_receipts(receipts))
    # First, all events of a task are brought to one partition. Otherwise, Spark aggregates in
    # each partition first, and sorts for that, although a partition has one event of a message.
    events = _timed(events.repartition("task_id"), latest)
    # An equal join: before a cross join, Spark does not coalesce the many small partitions.
    known = _with_amendments(_tasks(events), receipts)
    known = known.join(F.broadcast(ends), F.least("released", F.lit(0)) == F.col("none"))
    for step in (_amended, _moved, _arrived):
        known = known.withColumns(step())
    verdict = _verdict(late_after, patience)
    return known.withColumn("verdict", verdict).select(*s.columns_of(s.VERDICTS))


def span(journal: DataFrame, patience: float = 300.0) -> tuple[datetime | None, datetime | None]:
    """Return from when to when a journal is complete, as :func:`audit` finds it; UTC."""
    now = datetime.now(UTC)
    ends = _span(_timed(_events_of_journal(journal), now), patience)
    micros = [F.unix_micros(F.col(end)) for end in ("journal_from", "journal_to")]
    [row] = ends.select(*micros).collect()
    first, last = (
        None if moment is None else _EPOCH + timedelta(microseconds=moment) for moment in row
    )
    return first, last


def lateness(verdicts: DataFrame) -> DataFrame:
    """Return the lateness percentiles: overall, and by hour (UTC), queue, task and number of hops.

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
    grouped = arrived.groupBy("group.grouping", "group.value").agg(
        F.count("*").alias("tasks"),
        F.percentile_approx("lateness", list(SHARES), _ACCURACY).alias("at"),
        F.max("lateness").alias("worst"),
    )
    shares = [F.col("at")[index].alias(name) for index, name in enumerate(_PERCENTILES)]
    return grouped.select("grouping", "value", "tasks", *shares, "worst")


def summarize(verdicts: DataFrame, thresholds: Thresholds | None = None) -> dict[str, Any]:
    """Return the content of ``summary.json``: the verdicts, counted and compared with thresholds.

    :returns: ``tasks``, ``verdicts`` (a count each), ``postponed`` (tasks, whatever their verdict),
        ``misdated`` (tasks with an event whose time cannot be right), ``lateness`` (seconds),
        ``thresholds`` (for each that is set: measured, allowed, passed), ``passed`` and
        ``outcome``: ``"passed"``, ``"failed"`` or, where no task is judged and some still wait,
        ``"not judged yet"``.
    """
    thresholds = thresholds or Thresholds()
    # One action: if the verdicts are not saved, each action computes them again.
    [overall] = verdicts.agg(
        *(F.count(F.when(F.col("verdict") == name, 1)).alias(name) for name in s.VERDICT_NAMES),
        F.count(F.when(F.col("postponed") > 0, 1)).alias("tasks postponed"),
        F.count(F.when(F.col("misdated") > 0, 1)).alias("tasks misdated"),
        F.percentile_approx("lateness", list(SHARES), _ACCURACY).alias("at"),
        F.min("lateness").alias("earliest"),
        F.max("lateness").alias("worst"),
    ).collect()
    counted = {name: overall[name] for name in s.VERDICT_NAMES}
    shares = overall["at"] or [None] * len(SHARES)
    late = dict(zip(_PERCENTILES, shares, strict=True))
    late |= {"earliest": overall["earliest"], "worst": overall["worst"]}
    measured = {
        "early": counted[s.EARLY],
        "lost": counted[s.LOST_IN_THE_LADDER] + counted[s.LOST_AFTER_RELEASE],
        "duplicates": counted[s.DUPLICATE],
        "late": counted[s.LATE],
        "unpublished": counted[s.NOT_PUBLISHED],
        "ran_after_cancel": counted[s.RAN_AFTER_CANCEL],
        "reschedule_ignored": counted[s.RESCHEDULE_IGNORED],
        "unknown": counted[s.UNDECIDED],
        "p99": late["p99"] or 0.0,
        "judged": sum(counted.values()) - counted[s.UNDECIDED] - counted[s.STILL_WAITING],
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
    passed = all(threshold["passed"] for threshold in held.values())
    # Tasks that still wait prove nothing, but may do so later.
    judges_none = measured["judged"] == 0 and counted[s.STILL_WAITING] > 0
    is_open = judges_none and not held.get("judged", {"passed": True})["passed"]
    return {
        "tasks": sum(counted.values()),
        "verdicts": counted,
        "postponed": overall["tasks postponed"],
        "misdated": overall["tasks misdated"],
        "lateness": late,
        "thresholds": held,
        "passed": passed,
        "outcome": NOT_JUDGED_YET if is_open else PASSED if passed else FAILED,
    }


# -- one shape for all events -----------------------------------------------------------------


#: The kinds of events. Numbers are cheaper than text to shuffle and to compare. A mark says until
#: when the journal is complete.
(
    _RECEIPT,
    _CONFIRMED,
    _DENIED,
    _SCHEDULED,
    _RELEASED,
    _RAN,
    _DISCARDED,
    _CANCELLED,
    _POSTPONED,
    _MARK,
    _OTHER,
) = range(11)
_RECEIPTS = (_RECEIPT, _CONFIRMED, _DENIED)
_ARRIVALS = (_RELEASED, _RAN, _DISCARDED)
_EXECUTIONS = (_RAN, _DISCARDED)


def _events_of_journal(journal: DataFrame) -> DataFrame:
    event = F.col("event")
    was_revoked = F.col("state").eqNullSafe(_REVOKED)
    kind = (
        F.when(event == s.SCHEDULED, _SCHEDULED)
        .when(event == s.RELEASED, _RELEASED)
        .when(event == s.EXECUTED, F.when(was_revoked, _DISCARDED).otherwise(_RAN))
        .when(event == s.CANCELLED, _CANCELLED)
        .when(event == s.POSTPONED, _POSTPONED)
        .when(event == s.COMPLETE, _MARK)
        .when(event.isNotNull(), _OTHER)
    )
    return journal.select(
        kind.cast("tinyint").alias("kind"),
        "task_id",
        F.coalesce("retries", F.lit(0)).alias("retries"),
        F.lit(None).cast("string").alias("key"),
        "task",
        "queue",
        F.col("at").alias("written"),
        "due",
        F.when(F.col("event") == s.SCHEDULED, F.col("hops")).alias("hops"),
        "state",
    ).where(F.col("task_id").isNotNull() | (F.col("event") == s.COMPLETE))


def _events_of_receipts(receipts: DataFrame) -> DataFrame:
    # The journal records a publish when the message is sent. Only a receipt shows whether the
    # broker accepted it.
    is_published = F.col("status") == s.PUBLISHED
    kind = F.when(is_published, _CONFIRMED).when(~is_published, _DENIED).otherwise(_RECEIPT)
    return (
        messages(receipts)
        .select(
            kind.cast("tinyint").alias("kind"),
            "task_id",
            F.lit(0).alias("retries"),
            "key",
            "task",
            "queue",
            F.col("published_at").alias("written"),
            "due",
            "hops",
            F.lit(None).cast("string").alias("state"),
        )
        # A row without an id was rejected: there never was a message.
        .where(F.col("task_id").isNotNull())
    )


def _with_amendments(tasks: DataFrame, receipts: DataFrame | None) -> DataFrame:
    """Add what receipts say of amendments: when a task was cancelled, and the times it moved to.

    A cancellation is of all retries, and a rescheduling of the first try.
    """
    moves = "array<struct<at: timestamp_ltz, due: timestamp_ltz>>"
    if receipts is None:
        nothing = {"cancelled_at": "timestamp_ltz", "moves": moves}
        return tasks.withColumns({name: F.lit(None).cast(kind) for name, kind in nothing.items()})
    action = action_of(receipts)
    is_move = (action == s.RESCHEDULE) & F.col("due").isNotNull()
    move = F.struct(F.col("published_at").alias("at"), "due")
    amended = (
        receipts.where((action != s.PUBLISH) & (F.col("status") == s.RECORDED))
        .groupBy("task_id")
        .agg(
            F.min(F.when(action == s.CANCEL, F.col("published_at"))).alias("cancelled_at"),
            F.sort_array(F.collect_list(F.when(is_move, move))).alias("all_moves"),
        )
    )
    # They are few, so a join costs less than further events.
    known = tasks.join(amended, "task_id", "left")
    of_first_try = F.when(F.col("retries") == 0, F.col("all_moves"))
    return known.withColumn("moves", of_first_try).drop("all_moves")


def _timed(events: DataFrame, latest: datetime) -> DataFrame:
    """Add columns derived from an event's time; null if it is in the future: a clock is wrong."""
    is_past = F.unix_micros("written") <= F.unix_micros(instant(latest)) + _SKEW
    at = F.when(is_past, F.col("written"))
    is_publish = F.col("kind").isin(*_RECEIPTS, _SCHEDULED)
    return events.withColumns(
        {
            "at": F.when(~F.col("kind").isin(*_RECEIPTS), at),
            "published_at": F.when(is_publish, at),
            "in_the_future": ~is_past,
        }
    )


def _span(happened: DataFrame, patience: float) -> DataFrame:
    """Return the first and last time of the journal in one row. One clock alone moves neither end.

    An arrival has two clocks: it is not before its due time, and not long after it. A time that
    only one clock has given needs a second task that agrees.
    """
    is_mark = F.col("kind").eqNullSafe(_MARK)
    told = F.when(~is_mark, F.unix_micros("at"))
    due = F.when(F.col("kind") != _SCHEDULED, F.unix_micros("due"))
    alone = F.when(due.isNull(), told)
    wait = round(patience * 1_000_000)
    # An execution is written when it has ended, with the time when it began.
    prompt = ~F.col("kind").isin(*_EXECUTIONS)
    arrived = told.isNotNull() & due.isNotNull()
    ends = happened.groupBy(F.pmod(F.hash("task_id"), F.lit(_WITNESSES))).agg(
        F.min(F.when(arrived & prompt, F.greatest(told, due))).alias("sure_from"),
        F.max(F.when(arrived, F.least(told, due + wait))).alias("sure_to"),
        F.min(F.when(prompt, alone)).alias("told_from"),
        F.max(alone).alias("told_to"),
        F.max(F.when(is_mark, F.unix_micros("at"))).alias("marked"),
    )
    second_first = F.get(F.sort_array(F.collect_list("told_from")), F.lit(1))
    second_last = F.get(F.sort_array(F.collect_list("told_to"), asc=False), F.lit(1))
    return ends.agg(
        F.timestamp_micros(F.least(F.min("sure_from"), second_first)).alias("journal_from"),
        F.timestamp_micros(F.greatest(F.max("sure_to"), second_last, F.max("marked"))).alias(
            "journal_to"
        ),
        # Always 0. Spark must not know that, because it makes a cross join of two literals.
        F.least(F.count("*"), F.lit(0)).alias("none"),
    )


def _tasks(events: DataFrame) -> DataFrame:
    """Return one row per message, with all that its events say."""
    kind = F.col("kind")
    arrival = kind.isin(*_ARRIVALS)
    executed = kind.isin(*_EXECUTIONS)
    counted = kind == _CONFIRMED
    released_at = F.when(kind == _RELEASED, F.col("at"))
    # What the broker did not take counts only where there is nothing else.
    sent = F.when(kind != _DENIED, F.col("published_at"))
    due_last = F.coalesce(F.max_by("due", sent), F.max_by("due", "published_at"))
    return events.groupBy("task_id", "retries").agg(
        F.max("key").alias("key"),
        F.max("task").alias("task"),
        F.max("queue").alias("queue"),
        # A duplicate that was sent later may be due later. The first due time counts, of the
        # messages that the broker accepted according to a receipt or an arrival.
        F.coalesce(F.min(_due(counted | arrival)), F.min("due")).alias("due_first"),
        F.coalesce(F.max(_due(kind != _DENIED)), F.max("due")).alias("due_greatest"),
        due_last.alias("due_last"),
        F.min(_due(arrival)).alias("due_arrived"),
        F.min(_due(executed)).alias("due_executed"),
        F.min(_due(kind == _RELEASED)).alias("due_released"),
        F.max_by("due", released_at).alias("due_released_last"),
        F.collect_set(_due(kind == _CANCELLED)).alias("dues_cancelled"),
        F.min(_due(kind == _POSTPONED)).alias("due_postponed"),
        F.max(_due(kind == _POSTPONED)).alias("due_postponed_last"),
        # To the microsecond: a difference of doubles would not be exact.
        F.min(F.when(arrival, F.unix_micros("at") - F.unix_micros("due"))).alias("soonest"),
        F.min("published_at").alias("published_at"),
        F.coalesce(F.max(sent), F.max("published_at")).alias("published_last"),
        F.max("hops").alias("hops"),
        # A receipt is made before the message is sent, so the journal is more exact.
        F.max(F.when(kind == _SCHEDULED, F.col("hops") > 0)).alias("entered"),
        F.max(F.when(kind.isin(_CONFIRMED, _DENIED), counted)).alias("confirmed"),
        _count(kind == _SCHEDULED).alias("scheduled"),
        _count(kind == _RELEASED).alias("released"),
        _count(executed).alias("executed"),
        _count(kind == _CANCELLED).alias("cancelled"),
        _count(kind == _POSTPONED).alias("postponed"),
        _count(kind == _RAN).alias("ran"),
        _differ(kind == _SCHEDULED).alias("scheduled_again"),
        _differ(kind == _RELEASED).alias("released_again"),
        _differ(kind == _RAN).alias("ran_again"),
        F.min(released_at).alias("released_at"),
        F.max(released_at).alias("released_last"),
        F.min(F.when(kind == _RAN, F.col("at"))).alias("ran_at"),
        F.min(F.when(kind == _DISCARDED, F.col("at"))).alias("discarded_at"),
        F.max("state").alias("state"),
        _count(F.col("in_the_future")).alias("in_the_future"),
    )


def _count(which: Column) -> Column:
    return F.count(F.when(which, 1)).cast("int")


def _due(which: Column) -> Column:
    return F.when(which, F.col("due"))


def _differ(which: Column) -> Column:
    """Return whether an event happened twice; an event that was recorded twice has one time."""
    times = F.when(which, F.col("written"))
    return F.coalesce(F.min(times) != F.max(times), F.lit(False))


def _hour(column: str) -> Column:
    """Return the hour of a time as text, in UTC, whatever the session's time zone."""
    epoch = F.lit("1970-01-01").cast("timestamp_ntz")
    time = epoch + F.make_dt_interval(secs=F.unix_seconds(F.col(column)))
    return F.concat(time.cast("string").substr(1, 13), F.lit(":00"))


def _group(name: str, value: Column) -> Column:
    return F.struct(F.lit(name).alias("grouping"), value.alias("value"))


# -- the verdict ------------------------------------------------------------------------------


def _amended() -> dict[str, Column]:
    """Return columns for cancelled, replaced and postponed, and for the due time that then counts.

    One id may have several messages, each with a different due time. The due time shows which of
    them was dropped or postponed.
    """
    postponed = F.col("postponed") > 0
    # What was published last can still arrive, unless it is itself what was postponed: then a clock
    # has hidden the message that followed it, or nobody knows of that.
    is_old = _is_postponed("due_last") | _same(F.col("due_last"), F.col("due_postponed_last"))
    last = F.when(~F.coalesce(is_old, F.lit(False)), F.col("due_last"))
    last = F.coalesce(last, F.col("due_greatest"))
    # A worker may have received a task and died; the redelivered message can be dropped, or
    # postponed. The release of the second is taken back with it.
    is_released = (F.col("released") > 0) & ~_is_postponed("due_released_last")
    came = (F.col("executed") > 0) | (is_released & F.col("task").isNull())
    dropped = F.col("cancelled") > 0
    # By its due time, not by counts: one message may be dropped twice.
    is_dropped = F.exists("dues_cancelled", lambda due: _same(last, due))
    all_dropped = F.coalesce(is_dropped, F.lit(True)) | (F.size("dues_cancelled") == 0)
    several = ~_same(F.col("due_first"), F.col("due_greatest")) | F.col("scheduled_again")
    replaced = dropped & F.coalesce(several, F.lit(False)) & (came | ~all_dropped)
    due_released = F.when(is_released, F.col("due_released_last"))
    one_due = _same(F.col("due_released"), F.col("due_released_last"))
    return {
        "is_released": is_released,
        # Released before it was postponed, and after that.
        "released_later": postponed & is_released & ~F.coalesce(one_due, F.lit(True)),
        "taken_back": dropped & ~came & ~replaced,
        "replaced": replaced,
        # Postponed, but no event says until when.
        "due_unknown": postponed
        & ~came
        & F.coalesce(_same(last, F.col("due_postponed_last")), F.lit(True)),
        "due": F.when(postponed, F.coalesce("due_executed", due_released, last))
        .when(replaced, F.coalesce("due_arrived", last))
        .otherwise(F.col("due_first")),
        # A message published after its due time cannot have arrived before it; and of several
        # messages, the last one published can still arrive.
        "expected": F.greatest(last, "published_last"),
    }


def _moved() -> dict[str, Column]:
    """Return columns for the time to which a task was rescheduled before it came.

    A task that a consumer got before the rescheduling was recorded runs as it was.
    """
    released_last = F.when(F.col("is_released"), F.col("released_last"))
    came = F.coalesce("ran_at", "discarded_at", released_last)
    before = F.filter("moves", lambda move: came.isNull() | (move["at"] < came))
    moved_to = F.when(F.size(before) > 0, F.element_at(before, -1)["due"])
    # To the microsecond, the ladder rounds to milliseconds.
    is_soon = F.unix_micros(moved_to) - F.unix_micros(came) > ROUNDING
    is_soon = F.coalesce(is_soon, F.lit(False))
    return {
        # One that was cancelled, too, is dropped at its first time.
        "reschedule_ignored": is_soon & _has_run(),
        "due": F.when(is_soon, F.col("due")).otherwise(F.coalesce(moved_to, "due")),
        "expected": F.greatest("expected", moved_to),
    }


def _arrived() -> dict[str, Column]:
    """Return columns for the arrival and its lateness."""
    released_at = F.when(~F.col("released_later"), _credible("released_at"))
    released_at = F.coalesce(released_at, _credible("released_last"))
    released_at = F.when(F.col("is_released"), released_at)
    ran_at, discarded_at = _credible("ran_at"), _credible("discarded_at")
    # Of a copy that a worker has discarded, the release is not that of the one that ran.
    is_after_another = F.coalesce(discarded_at < ran_at, F.lit(False))
    first = F.when(is_after_another, ran_at).otherwise(F.least(released_at, ran_at, discarded_at))
    wrong = [_is_wrong("released_at"), _is_wrong("ran_at") | _is_wrong("discarded_at")]
    # A copy must not arrive before its due time, even if that is after an older copy's due time.
    # Nothing else is early, but where only one clock is right, by that one.
    soonest = F.when(~wrong[0] & ~wrong[1], F.col("soonest"))
    late = F.unix_micros(first) - F.unix_micros("due")
    late = F.when((late < 0) & (soonest >= 0), F.lit(0)).otherwise(late)
    return {
        "arrived_at": first,
        "lateness": F.when(soonest < 0, soonest).otherwise(late) / 1_000_000,
        # What was delivered again has its patience again.
        "released_by": F.coalesce(_credible("released_last"), F.col("expected")),
        "misdated": F.col("in_the_future") + wrong[0].cast("int") + wrong[1].cast("int"),
    }


def _is_wrong(time: str) -> Column:
    """Return whether a message seems to arrive before it is published: of two clocks, one errs."""
    sooner = F.unix_micros("published_at") - F.unix_micros(time) > _SKEW
    return F.coalesce(sooner, F.lit(False))


def _credible(time: str) -> Column:
    """Return the time of an arrival; null if a clock is wrong."""
    return F.when(~_is_wrong(time), F.col(time))


def _is_postponed(due: str) -> Column:
    """Return whether the message with this due time was postponed; each time, it is due later."""
    between = F.col(due).between(F.col("due_postponed"), F.col("due_postponed_last"))
    return F.coalesce(between, F.lit(False))


def _same(one: Column, other: Column) -> Column:
    """Return whether two due times belong to one message."""
    return F.abs(F.unix_micros(one) - F.unix_micros(other)) < ROUNDING


def _verdict(late_after: float, patience: float) -> Column:
    executed, ran = F.col("executed"), F.col("ran")
    nothing_came = ~F.col("is_released") & (executed == 0)
    # A Celery worker records the execution. A consumer that uses Kombu alone has no task name, and
    # records only that it received the message.
    unexecuted = (executed == 0) & F.col("task").isNotNull()
    released_again = F.col("released_again") & ~F.col("released_later")
    again = F.when(executed > 0, F.col("ran_again")).otherwise(released_again)
    # A message that is due when it is sent goes directly to its destination.
    entered = F.coalesce(F.col("entered"), F.col("hops") > 0, F.lit(True))
    lost = nothing_came & _passed("expected", patience)
    return (
        F.when(F.col("lateness") < 0, s.EARLY)
        .when(F.col("taken_back") | _dropped_after_cancel(), s.TAKEN_BACK)
        .when(_ran_after_cancel(), s.RAN_AFTER_CANCEL)
        .when(F.col("reschedule_ignored") & ~F.col("replaced"), s.RESCHEDULE_IGNORED)
        .when(nothing_came & ~F.coalesce("confirmed", F.lit(True)), s.NOT_PUBLISHED)
        .when(nothing_came & (_too_little_journal() | F.col("due_unknown")), s.UNDECIDED)
        .when(lost & entered, s.LOST_IN_THE_LADDER)
        .when(lost, s.LOST_AFTER_RELEASE)
        .when(nothing_came, s.STILL_WAITING)
        .when(unexecuted & _passed("released_by", patience), s.LOST_AFTER_RELEASE)
        .when(unexecuted, s.STILL_WAITING)
        .when(again, s.DUPLICATE)
        .when(F.col("lateness").isNull(), s.UNDECIDED)
        .when(F.col("lateness") > late_after, s.LATE)
        # It arrived, and the worker has discarded it.
        .when((executed > 0) & (ran == 0), s.TAKEN_BACK)
        .when(F.col("postponed") > 0, s.PUT_OFF)
        .when(F.col("replaced"), s.REPLACED)
        .otherwise(s.OK)
    )


def _has_run() -> Column:
    """Return whether a task ran, or a consumer without Celery got a message and did not drop it."""
    nameless = (F.col("executed") == 0) & F.col("task").isNull() & (F.col("cancelled") == 0)
    return (F.col("ran") > 0) | (nameless & F.col("is_released"))


def _after_cancel() -> Column:
    """Return whether a task came after a receipt says it was cancelled."""
    after = F.col("arrived_at") > F.col("cancelled_at")
    return ~F.col("replaced") & F.coalesce(after, F.lit(False))


def _ran_after_cancel() -> Column:
    return _has_run() & _after_cancel()


def _dropped_after_cancel() -> Column:
    """Return whether a worker has discarded a task of which a receipt says it was cancelled."""
    return (F.col("executed") > 0) & (F.col("ran") == 0) & _after_cancel()


def _too_little_journal() -> Column:
    """Return whether the journal is missing, or may have begun after the message."""
    start = F.col("journal_from")
    begins_late = (F.col("scheduled") == 0) & (start.isNull() | (start > F.col("expected")))
    return F.col("due").isNull() | begins_late


def _passed(column: str, patience: float) -> Column:
    """Return whether the journal continues for longer than ``patience`` seconds after this time."""
    gone = F.unix_micros("journal_to") - F.unix_micros(F.col(column))
    return gone > round(patience * 1_000_000)
