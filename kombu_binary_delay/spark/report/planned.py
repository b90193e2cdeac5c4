"""From a plan to the few hundred numbers that its report shows, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from kombu_binary_delay.spark.columns import (
    due_micros,
    has,
    messages,
    named,
    published_micros,
)
from kombu_binary_delay.spark.plan import LADDER, QUEUE, Limits, summarize

from .measured import ONE_QUEUE, SUSTAINED

BINS = 160
DESTINATIONS = 16
#: The most steps of time in which the lateness is computed.
_MOST = 20_000
_WIDTHS = (1, 2, 5, 10, 15, 30, 60, 120, 240, 480, 720, 1440, 2880, 7200, 10080, 20160, 43200)

Figures = dict[str, Any]


def plan_figures(
    df: DataFrame,
    planned: DataFrame,
    *,
    limits: Mapping[str, float] | None = None,
    every: int = 60,
    name: str = "",
) -> Figures:
    """Reduce a plan to what is drawn.

    :param df: the rows that were planned. ``queue``, or ``exchange`` and ``routing_key``, are their
        destinations, if they have such columns. With ``countdown``, they need the ``published``
        that they were planned with; without it, the countdowns begin now.
    :param planned: what :func:`~kombu_binary_delay.spark.plan.plan` gave; best read from a table,
        for it is read often.
    :param limits: of the broker, by the names of :class:`~kombu_binary_delay.spark.plan.Limits`.
    :param every: the length of a "minute" in seconds, the same as for the plan.
    :param name: of the rows, for the title.
    :returns: plain values, ready for JSON; times in seconds since the epoch.
    :raises ValueError: for an invalid limit.
    """
    limits = limits or {}
    Limits(**limits)
    carries = limits.get("hops_per_second")
    found: Figures = {
        "name": name,
        "every": every,
        "limits": dict(limits),
        "carries": SUSTAINED if carries is None else carries,
        "measured": carries is None,
    }
    summaries = [row.asDict() for row in summarize(planned, every=every).collect()]
    found["ladders"] = sorted(summaries, key=lambda each: (each["hops"], str(each["ladder"])))
    for each in found["ladders"]:
        each["waiting_at"] = each["waiting_at"] and each["waiting_at"].timestamp()
    start, end = _span(planned, every)
    width = every * next((n for n in _WIDTHS if (end - start) / every / n <= BINS), 86400)
    start -= start % width
    found |= {"start": start, "end": max(end, start + width), "width": width}
    number = int((found["end"] - start) // width) + 1
    found |= _coming(df, start, width, number)
    found["busiest"] = _busiest(planned, every)
    # A minute, unless there are too many.
    step = every if (found["end"] - start) / every <= _MOST else width
    found["work"] = _work(planned, found, step, number)
    return found


def _seconds(column: str) -> Column:
    return F.unix_micros(column) / 1_000_000


def _span(planned: DataFrame, every: int) -> tuple[float, float]:
    [row] = (
        planned.where(F.col("scope").isin(QUEUE, LADDER))
        .agg(F.min(_seconds("minute")).alias("first"), F.max(_seconds("minute")).alias("last"))
        .collect()
    )
    first = row["first"] or 0.0
    return first, (row["last"] or first) + every


def _coming(df: DataFrame, start: float, width: float, number: int) -> Figures:
    """Count what is due by destination and bin, and find the largest second of each bin."""
    df = messages(df)
    second = F.floor(due_micros(df, published_micros(df)) / 1_000_000)
    by_second = (
        df.select(_destination(df).alias("destination"), second.alias("second"))
        .where(F.col("second").isNotNull())
        .groupBy("destination", "second")
        .count()
        .withColumn("bin", F.floor((F.col("second") - start) / width))
        .where(F.col("bin").between(0, number - 1))
    )
    rows = by_second.groupBy("destination", "bin").agg(F.sum("count").alias("count"))
    totals = {
        row["destination"]: row["count"]
        for row in rows.groupBy("destination")
        .agg(F.sum("count").alias("count"))
        .orderBy(F.desc("count"), "destination")
        .limit(DESTINATIONS)
        .collect()
    }
    shown = F.when(F.col("destination").isin(*totals), F.col("destination"))
    due: dict[str, list[int]] = {name: [0] * number for name in totals}
    others = [0] * number
    for row in (
        rows.groupBy(shown.alias("shown"), "bin").agg(F.sum("count").alias("count")).collect()
    ):
        due.get(row["shown"], others)[row["bin"]] += row["count"]
    seconds = by_second.groupBy("bin", "second").agg(F.sum("count").alias("count"))
    largest = seconds.groupBy("bin").agg(F.max(F.struct("count", "second")).alias("most")).collect()
    herd = [[0, 0.0] for _ in range(number)]
    for row in largest:
        herd[row["bin"]] = [row["most"]["count"], float(row["most"]["second"])]
    return {"due": due, "others": others, "herd": herd}


def _destination(df: DataFrame) -> Column:
    """Return where each row goes, as an audit's receipts name it."""
    null = F.lit(None).cast("string")
    queue, exchange, key = (
        named(df, name).cast("string") if has(df, name) else null
        for name in ("queue", "exchange", "routing_key")
    )
    # The default exchange has no name.
    exchange = F.when(exchange != "", exchange)
    place = F.when(exchange.isNotNull() | key.isNotNull(), F.concat_ws("/", exchange, key))
    return F.coalesce(queue, place, F.lit("the task's own"))


def _busiest(planned: DataFrame, every: int) -> Figures:
    """Find, for each ladder, the level queue that passes on the most in a minute."""
    queues = planned.where(F.col("scope") == QUEUE)
    rows = queues.groupBy("ladder").agg(F.max(F.struct("left", "queue", "minute")).alias("most"))
    return {
        row["ladder"]: {
            "rate": row["most"]["left"] / every,
            "queue": row["most"]["queue"],
            "at": row["most"]["minute"].timestamp(),
        }
        for row in rows.collect()
    }


def _work(planned: DataFrame, found: Figures, step: float, number: int) -> Figures:
    """Compute, for each ladder, the hops a second and the lateness in each bin.

    A broker that gets more to do than it can carry does the rest afterwards: what is left over,
    divided by what it carries, is how late it is. And of a second in which more is due than one
    queue passes on, the last is late by itself.
    """
    start, width, carries = found["start"], found["width"], found["carries"]
    rows = (
        planned.where(F.col("scope") == QUEUE)
        .groupBy("ladder", F.floor((_seconds("minute") - start) / step).alias("step"))
        .agg(F.sum("left").alias("hops"))
        .collect()
    )
    steps = int(number * width / step)
    hops = {each["ladder"]: [0] * steps for each in found["ladders"]}
    for row in rows:
        hops[row["ladder"]][min(row["step"], steps - 1)] += row["hops"]
    alone = [max(0.0, count / ONE_QUEUE - 1) for count, _ in found["herd"]]
    work: Figures = {}
    for ladder, counts in hops.items():
        rate, late, behind, slow = [0.0] * number, list(alone), 0.0, 0
        for place, count in enumerate(counts):
            at = int(place * step // width)
            behind = max(0.0, behind + count - carries * step)
            slow += behind > 0
            rate[at] = max(rate[at], count / step)
            late[at] = max(late[at], behind / carries)
        work[ladder] = {
            "rate": rate,
            "late": late,
            "overloaded": slow * step,
            "behind": behind / carries,
        }
    return work
