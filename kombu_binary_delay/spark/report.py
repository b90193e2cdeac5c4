"""From verdicts, or a plan, to one HTML file: without a script, and nothing is fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from jinja2 import Environment, PackageLoader
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from . import schema as s
from .audit import FAILED, PASSED, Thresholds, lateness, summarize
from .charts import COLOURS, bars, lines
from .plan import Limits as PlanLimits
from .plan import backlog, check, figures

BINS = 160
OFFENDERS = 25
GROUPS = 24
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
#: From one edge of the histogram to the next: four to a power of ten.
_EDGES = [10 ** (power / 4) for power in range(-12, 25)]
#: The tone of a verdict that a task has, and what it means for a reader without documentation.
VERDICTS = {
    s.OK: ("good", "arrived once, and in time"),
    s.EARLY: ("bad", "arrived before it was due"),
    s.LATE: ("so-so", "arrived later after its due time than the audit allows"),
    s.DUPLICATE: ("so-so", "arrived more than once"),
    s.LOST_IN_THE_LADDER: ("bad", "published, and never came out of the ladder"),
    s.LOST_AFTER_RELEASE: ("bad", "came out of the ladder, and was not executed"),
    s.STILL_WAITING: ("", "not due yet, or so short a time ago that it may still come"),
    s.NOT_PUBLISHED: ("bad", "refused by the broker, so it was never delayed"),
    s.TAKEN_BACK: ("", "cancelled, and not executed"),
    s.PUT_OFF: ("good", "postponed while it waited, and arrived once, in time by its new due time"),
    s.REPLACED: ("good", "another took its place, and arrived once, in time by its own due time"),
    s.RAN_AFTER_CANCEL: ("bad", "arrived after the receipt of its cancellation, and ran"),
    s.RESCHEDULE_IGNORED: ("bad", "ran before the time to which a receipt had moved it"),
    s.UNDECIDED: ("so-so", "the journal does not go far enough to say"),
}


def audit_page(
    verdicts: DataFrame, thresholds: Thresholds | None = None, jobs: Sequence[str] = ()
) -> tuple[str, dict[str, Any]]:
    """Draw an audit; return the page, and the summary of the verdicts.

    :param verdicts: of the schema ``VERDICTS``; best read from a table, for it is read often.
    :param jobs: the names of the jobs that published the tasks, for the title.
    """
    summary = summarize(verdicts, thresholds)
    start, end = _span(verdicts)
    days = -(-(end - start) // BINS // 86400) * 86400 + 86400
    width = next((step for step in _STEPS if (end - start) / step <= BINS), days)
    start -= start % width
    late, counts = _over_time(verdicts, start, end, width)
    charts = []
    if late:
        note = (
            f"From due to arrival, of the tasks that arrived in each {seconds(width)}. What was "
            f"postponed is due at its new time."
        )
        charts.append(("Lateness over time", note, lines(late, log=True)))
    if counts:
        note = f"Tasks in each {seconds(width)}: where due and arrived part, something was held up."
        flows = {name: points for name, points in counts.items() if name != _WAITING}
        charts.append(("Arrivals against plan", note, lines(flows, steps=True)))
        note = "Tasks that the broker has and that have not arrived yet, at each moment."
        charts.append(("Waiting", note, lines({_WAITING: counts[_WAITING]})))
    histogram = _histogram(verdicts)
    if histogram:
        note = "Tasks by their lateness, on a logarithmic scale."
        charts.append(("How late", note, bars(histogram)))
    page = _render(
        "audit.html",
        title=f"Delayed tasks of {', '.join(jobs)}" if jobs else "Delayed tasks",
        summary=summary,
        tone={PASSED: "good", FAILED: "bad"}.get(summary["outcome"], "so-so"),
        verdicts=VERDICTS,
        start=start,
        end=end,
        charts=charts,
        groups=_groups(verdicts),
        offenders=_offenders(verdicts),
    )
    return page, summary


def plan_page(plan: DataFrame, limits: PlanLimits, carries: float, name: str = "") -> str:
    """Draw a plan.

    :param plan: of the schema ``PLAN``; best read from a table.
    :param carries: messages per second that the broker delivers.
    :param name: of the rows, for the title.
    """
    minutes = plan.orderBy("minute").collect()
    summary = figures(minutes, carries)
    rows = [row.asDict() for row in minutes]
    for row, late in zip(rows, backlog(rows, carries), strict=True):
        row["late"] = late
    of_bin = max(1, -(-len(rows) // BINS))
    bins = [rows[at : at + of_bin] for at in range(0, len(rows), of_bin)]

    def points(name: str, scale: float = 1.0) -> list[tuple[float, float]]:
        return [
            (part[0]["minute"].timestamp(), max(row[name] for row in part) * scale) for part in bins
        ]

    due = {"due, mean of a minute": points("due", 1 / 60), "due in one second": points("most_due")}
    due["the broker carries"] = [(at, carries) for at, _ in points("due")]
    charts = [
        ("Due in a second", "The greatest of each time.", lines(due, steps=True)),
        ("Waiting", "Messages on the ladder.", lines({"waiting": points("waiting")})),
    ]
    if summary["late"]:
        note = "What is more than the broker carries waits: an estimate, for one queue."
        charts.append(("How late", note, lines({"seconds": points("late")}, steps=True)))
    judged = check(summary, limits)
    is_kept = all(limit["passed"] for limit in judged.values())
    return _render(
        "plan.html",
        title=f"Plan of {name}" if name else "Plan",
        summary=summary,
        limits=judged,
        outcome=("within the limits", "good") if is_kept else ("exceeds a limit", "bad"),
        charts=charts,
    )


def seconds(value: float | None) -> str:
    """Write a time with the unit that suits it."""
    if value is None:
        return "none"
    sign, value = ("-" if value < 0 else ""), abs(value)
    if value < 1:
        return f"{sign}{value * 1000:.3g} ms"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if value >= 2 * size:
            return f"{sign}{value / size:.3g} {unit}"
    return f"{sign}{value:.3g} s"


def moment(at: float | None) -> str:
    """Write a time, given in seconds since the epoch, with its date, in UTC."""
    return "" if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"


def _render(template: str, **values: Any) -> str:
    environment = Environment(loader=PackageLoader("kombu_binary_delay.spark"), autoescape=True)
    environment.filters |= {"seconds": seconds, "moment": moment}
    environment.globals["colours"] = COLOURS
    return environment.get_template(template).render(**values)


_WAITING = "waiting"


def _epoch(column: Column | str) -> Column:
    return F.unix_micros(column) / 1_000_000


def _span(verdicts: DataFrame) -> tuple[float, float]:
    """From the first publish to the last arrival: what is due in years would hide all else."""
    [row] = verdicts.agg(
        F.min(_epoch(F.coalesce(F.least("published_at", "arrived_at"), "due"))).alias("first"),
        F.max(_epoch("arrived_at")).alias("last"),
        F.max(_epoch("due")).alias("due"),
    ).collect()
    first = row["first"] or 0.0
    return first, max(row["last"] or row["due"] or 0.0, first + 1)


_Points = list[tuple[float, float]]


def _over_time(
    verdicts: DataFrame, start: float, end: float, width: float
) -> tuple[dict[str, _Points], dict[str, _Points]]:
    """Return points by name: of the lateness, and of the counts of tasks."""
    number = int((end - start) // width) + 1
    within = F.col("bin").between(0, number - 1)

    def place(column: str) -> Column:
        # A bigint: what is due in thousands of years has no room in an int.
        return F.floor((_epoch(column) - start) / width).alias("bin")

    shares = {"p50": 0.5, "p99": 0.99, "worst": 1.0}
    of_bins = (
        verdicts.where(F.col("lateness").isNotNull())
        .groupBy(place("arrived_at"))
        .agg(*(F.percentile_approx("lateness", at).alias(name) for name, at in shares.items()))
        .where(within)
        .orderBy("bin")
        .collect()
    )
    late = {
        name: [(start + (row["bin"] + 0.5) * width, max(row[name], 0.001)) for row in of_bins]
        for name in ("worst", "p99", "p50")
    }
    # What the broker does not have does not wait; what is cancelled waits until it is due.
    sent = F.when(F.col("verdict") != s.NOT_PUBLISHED, F.col("published_at"))
    is_cancelled = F.col("verdict") == s.TAKEN_BACK
    left = F.when(is_cancelled, F.col("due")).otherwise(F.col("arrived_at"))
    times = {
        "due": F.when(~is_cancelled, F.col("due")),
        "arrived": F.col("arrived_at"),
        "published": F.col("published_at"),
        "sent": sent,
        # Of a task that was sent nobody knows when, nobody knows how long it has waited.
        "left": F.when(sent.isNotNull() & left.isNotNull(), F.greatest(sent, left)),
    }
    moments = [F.struct(F.lit(name).alias("what"), at.alias("at")) for name, at in times.items()]
    counts = (
        verdicts.select(F.inline(F.array(*moments)))
        .where(F.col("at").isNotNull())
        .groupBy("what", place("at"))
        .count()
        .where(within)
        .collect()
    )
    counted = {name: [0] * number for name in times}
    for row in counts:
        counted[row["what"]][row["bin"]] = row["count"]
    flows: dict[str, _Points] = {
        name: [(start + at * width, count) for at, count in enumerate(counted[name])]
        for name in ("arrived", "due", "published")
        if any(counted[name])
    }
    waiting, held = [], 0
    for at, (come, gone) in enumerate(zip(counted["sent"], counted["left"], strict=True)):
        held += come - gone
        waiting.append((start + (at + 1) * width, float(held)))
    return (late if of_bins else {}), ({**flows, _WAITING: waiting} if flows else {})


def _groups(verdicts: DataFrame) -> dict[str, list[Mapping[str, Any]]]:
    largest = Window.partitionBy("grouping").orderBy(F.desc("tasks"), "value")
    ranked = lateness(verdicts).withColumn("rank", F.row_number().over(largest))
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(ranked.where(F.col("rank") <= GROUPS).collect(), key=itemgetter("rank")):
        groups.setdefault(row["grouping"], []).append(row.asDict())
    for grouping in ("hops", "hour"):
        # What has an order of its own is shown in that.
        groups.get(grouping, []).sort(key=lambda row: (len(str(row["value"])), str(row["value"])))
    return {name: groups[name] for name in ("queue", "task", "hops", "hour") if name in groups}


def _histogram(verdicts: DataFrame) -> list[tuple[float, float, int]]:
    # The edges are powers, so the place of a value is its logarithm.
    place = F.floor(F.log10(F.greatest("lateness", F.lit(_EDGES[0]))) * 4).cast("int") + 12
    place = F.least(F.greatest(place, F.lit(0)), F.lit(len(_EDGES) - 2))
    late = verdicts.where(F.col("lateness").isNotNull())
    rows = late.groupBy(place.alias("place")).count().orderBy("place").collect()
    return [(_EDGES[row["place"]], _EDGES[row["place"] + 1], row["count"]) for row in rows]


def _offenders(verdicts: DataFrame) -> list[Mapping[str, Any]]:
    graver = [
        s.LOST_IN_THE_LADDER,
        s.LOST_AFTER_RELEASE,
        s.EARLY,
        s.RAN_AFTER_CANCEL,
        s.RESCHEDULE_IGNORED,
        s.DUPLICATE,
        s.NOT_PUBLISHED,
    ]
    order = F.coalesce(
        *(F.when(F.col("verdict") == name, F.lit(rank)) for rank, name in enumerate(graver)),
        F.lit(len(graver)),
    )
    rows = (
        verdicts.where(~F.col("verdict").isin(s.STILL_WAITING, s.TAKEN_BACK))
        .withColumn("rank", order)
        .orderBy("rank", F.desc_nulls_last("lateness"))
        .limit(OFFENDERS)
        .withColumn("due", _epoch("due"))
        .collect()
    )
    return [row.asDict() for row in rows]
