"""From verdicts to the few hundred numbers that a report shows, whatever the number of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql import types as t

from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.audit import Thresholds, lateness, summarize
from kombu_binary_delay.spark.columns import has, kind_of, named, time_of, tried
from kombu_binary_delay.spark.plan import LADDER, QUEUE

BINS = 160
OFFENDERS = 25
GROUPS = 24
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
#: From one edge of the histogram to the next: four to a power of ten.
_EDGES = [10 ** (power / 4) for power in range(-12, 25)]
_DEPTHS = ("at", "queue", "waiting")

Figures = dict[str, Any]


def figures(
    verdicts: DataFrame,
    *,
    thresholds: Thresholds | None = None,
    plan: DataFrame | None = None,
    depths: DataFrame | None = None,
    jobs: Sequence[str] = (),
) -> Figures:
    """Reduce an audit to what is drawn.

    :param verdicts: of the schema ``VERDICTS``; best read from a table, for it is read often.
    :param plan: what :func:`~kombu_binary_delay.spark.plan.plan` gave, of one ladder.
    :param depths: what was seen on the broker: ``at timestamp, queue string, waiting bigint``.
    :param jobs: the names of the jobs that published the tasks, for the title.
    :returns: plain values, ready for JSON; times in seconds since the epoch.
    :raises ValueError: see :func:`checked_depths`.
    """
    depths = checked_depths(plan, depths)
    start, end, unknown = _span(verdicts)
    width = _width(end - start)
    start -= start % width
    found: Figures = {
        "jobs": list(jobs),
        "summary": summarize(verdicts, thresholds),
        "start": start,
        "end": end,
        "width": width,
        "groups": _groups(verdicts),
        "histogram": _histogram(verdicts),
        "offenders": _offenders(verdicts),
        "without_publish_time": unknown,
    }
    found |= _over_time(verdicts, start, end, width)
    found["planned"] = _planned(plan, start, end, width) if plan is not None else None
    found["seen"] = _seen(depths, start, end, width) if depths is not None else None
    return found


def checked_depths(plan: DataFrame | None, depths: DataFrame | None) -> DataFrame | None:
    """Return depths with the types that they are drawn with; None without them.

    They may be text, as in CSV files.

    :raises ValueError: for a missing column, a wrong type, or a row that cannot be read; or if no
        queue of the depths is in the plan, as the chart would show nothing of them.
    """
    if depths is None:
        return None
    depths = _read_depths(depths)
    if plan is not None:
        _check_queues(plan, depths)
    return depths


def _read_depths(given: DataFrame) -> DataFrame:
    missing = [name for name in _DEPTHS if not has(given, name)]
    if missing:
        raise ValueError(
            f"the depths need the columns {', '.join(_DEPTHS)}, and {', '.join(missing)} is "
            f"missing, got {given.columns}"
        )
    kind = kind_of(given, "waiting")
    if not isinstance(kind, (t.StringType, t.NumericType)):
        raise ValueError(
            f"the column waiting must be a whole number, got {kind.simpleString()}; use "
            f'cast("bigint")'
        )
    found = {
        "at": time_of(given, "at"),
        "queue": named(given, "queue").cast("string"),
        "waiting": tried(given, "waiting", "bigint"),
    }
    is_unread = found["at"].isNull() | found["queue"].isNull() | found["waiting"].isNull()
    row = given.where(is_unread).select(*(named(given, name).cast("string") for name in found))
    if bad := row.first():
        cells = ", ".join(f"{name} {cell!r}" for name, cell in zip(found, bad, strict=True))
        raise ValueError(
            f"a row of the depths cannot be read: {cells}; give at as a timestamp, or text such as "
            f"2030-01-31T12:00:00Z, and waiting as a whole number"
        )
    return given.select(*(column.alias(name) for name, column in found.items()))


def _check_queues(plan: DataFrame, depths: DataFrame) -> None:
    planned = plan.where(F.col("scope") == QUEUE).select("queue")
    known = planned.select(F.col("queue").alias("planned"))
    is_planned = F.col("queue") == F.col("planned")
    if not depths.join(known, is_planned, "left_semi").limit(1).isEmpty():
        return
    seen, wanted = (each.agg(F.min("queue")).collect()[0][0] for each in (depths, planned))
    if seen is not None and wanted is not None:
        raise ValueError(
            f"no queue of the depths is in the plan: they have such as {seen!r}, and the plan "
            f"{wanted!r}. A plan has the names of the default settings but for the ladder: name "
            f"the depths' queues so, or leave the depths out"
        )


def _seconds(column: Column | str) -> Column:
    return F.unix_micros(column) / 1_000_000


def _span(verdicts: DataFrame) -> tuple[float, float, int]:
    """From the first publish to the last arrival: what is due in years would hide all else.

    So would what was due long before it was sent. And how many have arrived that were sent nobody
    knows when.
    """
    unknown = F.col("published_at").isNull() & F.col("arrived_at").isNotNull()
    [row] = verdicts.agg(
        F.min(_seconds(F.coalesce(F.least("published_at", "arrived_at"), "due"))).alias("first"),
        F.max(_seconds("arrived_at")).alias("last"),
        F.max(_seconds("due")).alias("due"),
        F.count(F.when(unknown, 1)).alias("unknown"),
    ).collect()
    first, last = row["first"] or 0.0, row["last"] or row["due"] or 0.0
    return first, max(last, first + 1), row["unknown"]


def _width(span: float) -> float:
    for step in _STEPS:
        if span / step <= BINS:
            return step
    return -(-span // BINS // 86400) * 86400 + 86400


def _bin(column: str, start: float, width: float) -> Column:
    # A bigint: what is due in thousands of years has no room in an int.
    return F.floor((_seconds(column) - start) / width)


def _over_time(verdicts: DataFrame, start: float, end: float, width: float) -> Figures:
    number = int((end - start) // width) + 1
    within = F.col("bin").between(0, number - 1)
    late = (
        verdicts.where(F.col("lateness").isNotNull())
        .groupBy(_bin("arrived_at", start, width).alias("bin"))
        .agg(
            F.percentile_approx("lateness", [0.5, 0.99]).alias("at"),
            F.max("lateness").alias("worst"),
        )
        .where(within)
        .collect()
    )
    # What the broker does not have does not wait; what is cancelled waits until it is due.
    sent = F.when(F.col("verdict") != s.NOT_PUBLISHED, F.col("published_at"))
    cancelled = F.col("verdict") == s.TAKEN_BACK
    left = F.greatest(sent, F.when(cancelled, F.col("due")).otherwise(F.col("arrived_at")))
    times = {
        "published": F.col("published_at"),
        "due": F.when(~cancelled, F.col("due")),
        "arrived": F.col("arrived_at"),
        "sent": sent,
        # Of a task that was sent nobody knows when, nobody knows how long it has waited. Spark's
        # greatest() takes no notice of null.
        "left": F.when(sent.isNotNull() & (cancelled | F.col("arrived_at").isNotNull()), left),
    }
    moments = [F.struct(F.lit(name).alias("what"), at.alias("at")) for name, at in times.items()]
    counts = (
        verdicts.select(F.inline(F.array(*moments)))
        .where(F.col("at").isNotNull())
        .groupBy("what", _bin("at", start, width).alias("bin"))
        .count()
        .where(within)
        .collect()
    )
    counted = {name: [0] * number for name in times}
    for row in counts:
        counted[row["what"]][row["bin"]] = row["count"]
    waiting, held = [], 0
    for come, gone in zip(counted["sent"], counted["left"], strict=True):
        held += come - gone
        waiting.append(held)
    return {
        "late": sorted([row["bin"], *row["at"], row["worst"]] for row in late),
        "published": counted["published"],
        "due": counted["due"],
        "arrived": counted["arrived"],
        "waiting": waiting,
    }


def _groups(verdicts: DataFrame) -> list[dict[str, Any]]:
    largest = Window.partitionBy("grouping").orderBy(F.desc("tasks"), "value")
    groups = lateness(verdicts)
    ranked = groups.withColumn("rank", F.row_number().over(largest))
    rows = ranked.where(F.col("rank") <= GROUPS).collect()
    rows.sort(key=itemgetter("grouping", "rank"))
    return [{name: row[name] for name in groups.columns} for row in rows]


def _histogram(verdicts: DataFrame) -> list[list[float]]:
    # The edges are powers, so the place of a value is its logarithm.
    place = F.floor(F.log10(F.greatest("lateness", F.lit(_EDGES[0]))) * 4).cast("int") + 12
    place = F.least(F.greatest(place, F.lit(0)), F.lit(len(_EDGES) - 2))
    rows = (
        verdicts.where(F.col("lateness").isNotNull())
        .groupBy(place.alias("place"))
        .count()
        .collect()
    )
    return [
        [_EDGES[row["place"]], _EDGES[row["place"] + 1], row["count"]]
        for row in sorted(rows, key=itemgetter("place"))
    ]


def _offenders(verdicts: DataFrame) -> list[dict[str, Any]]:
    graver = [s.LOST_IN_THE_LADDER, s.LOST_AFTER_RELEASE, s.EARLY, s.DUPLICATE, s.NOT_PUBLISHED]
    order = F.coalesce(
        *(F.when(F.col("verdict") == name, F.lit(rank)) for rank, name in enumerate(graver)),
        F.lit(len(graver)),
    )
    rows = (
        verdicts.where(~F.col("verdict").isin(s.STILL_WAITING, s.TAKEN_BACK))
        .withColumn("rank", order)
        .orderBy("rank", F.desc_nulls_last("lateness"))
        .limit(OFFENDERS)
        .withColumn("due", _seconds("due"))
        .collect()
    )
    return [
        {
            "task_id": row["task_id"],
            "key": row["key"],
            "task": row["task"],
            "queue": row["queue"],
            "due": row["due"],
            "lateness": row["lateness"],
            "verdict": row["verdict"],
        }
        for row in rows
    ]


def _planned(plan: DataFrame, start: float, end: float, width: float) -> Figures:
    """Compute what each queue, and all of them, should hold at the end of each bin."""
    number = int((end - start) // width) + 1
    rows = (
        plan.where(F.col("scope").isin(QUEUE, LADDER))
        .withColumn("bin", F.greatest(_bin("minute", start, width), F.lit(-1)))
        .where(F.col("bin") < number)
        .groupBy("scope", "queue", "wait_ms", "bin")
        .agg(F.max_by("waiting", "minute").alias("waiting"))
        .collect()
    )
    levels: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (row["wait_ms"] or 0, row["queue"] or "", row["bin"])):
        level = levels.setdefault(
            row["queue"] or "", {"wait": row["wait_ms"], "held": [None] * number, "before": 0}
        )
        if row["bin"] < 0:
            level["before"] = row["waiting"]
        else:
            level["held"][row["bin"]] = row["waiting"]
    return {name: {"wait": each["wait"], "waiting": _filled(each)} for name, each in levels.items()}


def _filled(level: dict[str, Any]) -> list[int]:
    """Fill a minute without a row with the one before it."""
    filled, last = [], level["before"]
    for value in level["held"]:
        last = last if value is None else value
        filled.append(last)
    return filled


def _seen(depths: DataFrame, start: float, end: float, width: float) -> Figures:
    number = int((end - start) // width) + 1
    rows = (
        depths.groupBy("queue", _bin("at", start, width).alias("bin"))
        .agg(F.max("waiting").alias("waiting"))
        .where(F.col("bin").between(0, number - 1))
        .collect()
    )
    levels: Figures = {}
    for row in rows:
        levels.setdefault(row["queue"], [0] * number)[row["bin"]] = row["waiting"]
    return levels
