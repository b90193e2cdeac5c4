"""Every verdict planted among many tasks, in tables as jobs that were disturbed leave them.

PLANTED_TASKS=1000000 plants them among a million.
"""

from __future__ import annotations

import json
import os
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.audit import audit, summarize
from kombu_binary_delay.spark.journal import read_journal

if TYPE_CHECKING:
    from pathlib import Path

#: What happened, how many seconds after the due time of the receipt, by how many seconds its
#: message is due later than that, and a state.
Event = tuple[str, float, int, str | None]

TASKS = int(os.environ.get("PLANTED_TASKS", "4000"))
NOON = 1_577_880_000  # seconds since the epoch, years ago
DAY = 86_400
#: Each kind of task is one of so many; all others are ok.
SHARE = 100
#: Seconds after noon at which the last event is written, and a due time that is not over then.
END, WAITS = 2 * DAY, 3 * DAY


def seconds(column: str) -> Column:
    return F.timestamp_micros(((F.col(column) + NOON) * 1_000_000).cast("bigint"))


OK_EVENTS: list[Event] = [(s.RELEASED, 0.25, 0, None), (s.EXECUTED, 0.5, 0, "SUCCESS")]
LATER: list[Event] = [(s.RELEASED, 600.25, 600, None), (s.EXECUTED, 600.5, 600, "SUCCESS")]
POSTPONED: list[Event] = [(s.POSTPONED, 0.25, 0, None), (s.SCHEDULED, 0.25, 600, None)]
REPLACED: list[Event] = [(s.SCHEDULED, -1, 600, None), (s.CANCELLED, 0.25, 0, None)]
REVOKED: list[Event] = [(s.RELEASED, 0.25, 0, None), (s.EXECUTED, 0.5, 0, "REVOKED")]
IN_2999 = 31_000_000_000
#: For each kind: its verdict, its due time where that is a special one, the status of its receipt,
#: and what happened after it was scheduled.
KINDS: list[tuple[str, int | None, str, list[Event]]] = [
    (s.OK, None, s.PUBLISHED, OK_EVENTS),
    (s.OK, None, s.NACKED, OK_EVENTS),
    (s.OK, None, s.PUBLISHED, [(s.RELEASED, 0.125, 0, None), *OK_EVENTS]),
    (s.OK, None, s.PUBLISHED, [OK_EVENTS[0], OK_EVENTS[1], (s.RELEASED, IN_2999, 0, None)]),
    (s.EARLY, None, s.PUBLISHED, [(s.RELEASED, -0.125, 0, None), OK_EVENTS[1]]),
    (s.LATE, None, s.PUBLISHED, [(s.RELEASED, 5.5, 0, None), (s.EXECUTED, 6, 0, "SUCCESS")]),
    (s.DUPLICATE, None, s.PUBLISHED, [*OK_EVENTS, (s.EXECUTED, 0.75, 0, "SUCCESS")]),
    (s.LOST_IN_THE_LADDER, None, s.PUBLISHED, []),
    (s.LOST_IN_THE_LADDER, None, s.PUBLISHED, POSTPONED),
    (s.LOST_IN_THE_LADDER, None, s.PUBLISHED, REPLACED),
    (s.LOST_AFTER_RELEASE, None, s.PUBLISHED, [(s.RELEASED, 0.25, 0, None)]),
    (s.STILL_WAITING, WAITS, s.PUBLISHED, []),
    (s.STILL_WAITING, END - 1, s.PUBLISHED, []),
    (s.STILL_WAITING, None, s.PUBLISHED, [*POSTPONED[:1], (s.SCHEDULED, 0.25, WAITS, None)]),
    (s.NOT_PUBLISHED, None, s.NACKED, []),
    (s.NOT_PUBLISHED, None, s.RETURNED, []),
    (s.TAKEN_BACK, None, s.PUBLISHED, [(s.CANCELLED, 0.25, 0, None)]),
    (s.TAKEN_BACK, None, s.PUBLISHED, REVOKED),
    (s.TAKEN_BACK, None, s.PUBLISHED, [*REPLACED, (s.CANCELLED, 600.25, 600, None)]),
    (s.RAN_AFTER_CANCEL, None, s.PUBLISHED, OK_EVENTS),
    (s.RESCHEDULE_IGNORED, None, s.PUBLISHED, OK_EVENTS),
    (s.PUT_OFF, None, s.PUBLISHED, [*POSTPONED, *LATER]),
    (s.REPLACED, None, s.PUBLISHED, [*REPLACED, *LATER]),
    (s.UNDECIDED, None, s.PUBLISHED, POSTPONED[:1]),
    (
        s.UNDECIDED,
        None,
        s.PUBLISHED,
        [(s.RELEASED, IN_2999, 0, None), (s.EXECUTED, IN_2999, 0, None)],
    ),
]
#: The kinds that have a receipt of a cancellation, too.
CANCELLED = [n for n, kind in enumerate(KINDS) if kind[0] in (s.TAKEN_BACK, s.RAN_AFTER_CANCEL)]
#: And those of a rescheduling.
RESCHEDULED = [n for n, kind in enumerate(KINDS) if kind[0] == s.RESCHEDULE_IGNORED]


def tasks_of(spark: SparkSession) -> DataFrame:
    """Tasks of which three of four have one key prefix and queue, and are due at one moment."""
    spot = F.pmod(F.hash("id"), F.lit(SHARE))
    crowd = F.col("id") % 4 > 0
    special = of_kind("kind", [F.lit(kind[1]) for kind in KINDS])
    return (
        spark.range(TASKS)
        .withColumn("kind", F.when(spot < len(KINDS), spot).otherwise(0))
        .withColumn("due", F.coalesce(special, F.when(crowd, 1000).otherwise(F.col("id") % DAY)))
        .withColumn(
            "queue", F.when(crowd, "mail").otherwise(F.concat(F.lit("q"), F.col("id") % 50))
        )
        .withColumn("task_id", F.concat(F.lit("task-"), "id"))
        .withColumn("key", F.concat(F.when(crowd, "crowd/").otherwise("k/"), F.col("id")))
    )


def of_kind(column: str, values: list[Column]) -> Column:
    return F.coalesce(*(F.when(F.col(column) == n, value) for n, value in enumerate(values)))


def receipts_of(tasks: DataFrame) -> DataFrame:
    attempts = F.when(F.col("id") % 3 == 0, F.array(F.lit(0), F.lit(1))).otherwise(
        F.array(F.lit(0))
    )
    made = tasks.select(
        F.lit("job").alias("job_id"),
        "key",
        "task_id",
        F.lit("send").alias("task"),
        "queue",
        seconds("due").alias("due"),
        F.lit(3).alias("hops"),
        F.lit(0).alias("partition"),
        # Some parts of the table are of two attempts of one Spark task, the later with its time.
        F.explode(attempts).alias("attempt"),
        of_kind("kind", [F.lit(kind[2]) for kind in KINDS]).alias("status"),
        F.lit(None).cast("string").alias("detail"),
        F.lit(s.PUBLISH).alias("action"),
        "kind",
    ).withColumn("published_at", F.timestamp_seconds(F.lit(NOON - 60) + F.col("attempt")))
    # And some rows are there twice.
    twice = made.where(F.hash("task_id") % 7 == 0)
    recorded = made.withColumn("status", F.lit(s.RECORDED))
    cancelled = recorded.where(F.col("kind").isin(CANCELLED)).withColumn("action", F.lit(s.CANCEL))
    rescheduled = recorded.where(F.col("kind").isin(RESCHEDULED)).withColumns(
        {"action": F.lit(s.RESCHEDULE), "due": F.col("due") + F.expr("interval 10 minutes")}
    )
    return (
        made.unionByName(twice)
        .unionByName(cancelled)
        .unionByName(rescheduled)
        .select(*(column.split()[0] for column in s.RECEIPTS.split(", ")))
    )


def journal_of(tasks: DataFrame) -> DataFrame:
    def happened(events: list[Event]) -> Column:
        return F.array(
            *(
                F.struct(
                    F.lit(event).alias("event"),
                    F.lit(float(after)).alias("after"),
                    F.lit(moved).alias("moved"),
                    F.lit(state).cast("string").alias("state"),
                )
                for event, after, moved, state in events
            )
        )

    scheduled = tasks.select(
        *("id", "task_id", "queue"),
        F.lit(s.SCHEDULED).alias("event"),
        F.lit(-60.0).alias("at"),
        F.col("due").cast("bigint").alias("due"),
        F.lit(None).cast("string").alias("state"),
    )
    # Some kinds have no further event.
    arrays = of_kind("kind", [happened(kind[3] or [("", 0, 0, None)]) for kind in KINDS])
    others = (
        tasks.withColumn("what", F.explode(arrays))
        .where("what.event != ''")
        .select(
            *("id", "task_id", "queue", "what.event"),
            (F.col("due") + F.col("what.after")).alias("at"),
            (F.col("due") + F.col("what.moved")).cast("bigint").alias("due"),
            "what.state",
        )
    )
    made = scheduled.unionByName(others)
    # The last thing that happened, and some events that were written twice.
    last = (0, "last", "mail", s.RELEASED, float(END), END, None)
    return made.unionByName(made.where("id % 5 = 0")).unionByName(
        made.sparkSession.createDataFrame([last], made.schema)
    )


def half_written(table: Path) -> None:
    """Leave in a table what a job leaves that died while it wrote."""
    unfinished = table / "_temporary" / "0" / "part-00000.parquet"
    unfinished.parent.mkdir(parents=True)
    unfinished.write_bytes(b"PAR1 and no more")


def save_journal(events: DataFrame, folder: Path) -> list[str]:
    """Write most of it as a table, and some as the files of a worker that died as it wrote."""
    table, lines = folder / "journal", folder / "lines"
    is_line = F.col("id") % 50 == 2
    events.where(~is_line).select(
        *("event", "task_id", F.lit(0).alias("retries")),
        F.when(F.col("task_id") != "last", "send").alias("task"),
        *("queue", seconds("at").alias("at"), seconds("due").alias("due")),
        *(F.lit("l").alias("ladder"), F.lit(3).alias("hops"), "state"),
        F.lit(None).cast("bigint").alias("offset"),
    ).write.parquet(str(table))
    half_written(table)
    lines.mkdir()
    with (lines / "journal-1-1.jsonl").open("w", encoding="utf-8") as file:
        for row in events.where(is_line).toLocalIterator():
            event = {"event": row.event, "id": row.task_id, "task": "send", "key": row.queue}
            times = {name: round((row[name] + NOON) * 1_000_000) for name in ("at", "due")}
            more = {"state": row.state} if row.state else {}
            file.write(json.dumps({**event, **times, "hops": 3, **more}) + "\n")
        file.write('{"event":"executed","id":"task-1","task":"se')
    return [str(table), str(lines)]


def test_all_that_is_planted_is_found_and_nothing_else(spark, tmp_path):
    tasks = tasks_of(spark)
    receipts_of(tasks).write.parquet(str(tmp_path / "receipts"))
    half_written(tmp_path / "receipts")
    tables = [read_journal(spark, path) for path in save_journal(journal_of(tasks), tmp_path)]
    judged = audit(
        spark.read.schema(s.RECEIPTS).parquet(str(tmp_path / "receipts")),
        reduce(DataFrame.unionByName, tables),
    ).where("task_id != 'last'")
    judged.write.parquet(str(tmp_path / "verdicts"))
    verdicts = spark.read.parquet(str(tmp_path / "verdicts"))
    wanted = of_kind("kind", [F.lit(kind[0]) for kind in KINDS])
    pairs = (
        tasks.select("task_id", "kind", wanted.alias("wanted"))
        .join(verdicts, "task_id", "full")
        .groupBy("kind", "wanted", "verdict")
        .count()
        .collect()
    )
    wrong = [row for row in pairs if row.wanted != row.verdict]
    assert wrong == []
    assert sum(row["count"] for row in pairs) == TASKS
    # Each kind was there: nothing is proven by what was not planted.
    assert {row.kind for row in pairs} == set(range(len(KINDS)))
    assert {row.wanted for row in pairs} == set(s.VERDICT_NAMES)
    summary = summarize(verdicts)
    sizes = {kind: sum(row["count"] for row in pairs if row.kind == kind) for kind in range(99)}
    put_off = [n for n, kind in enumerate(KINDS) if any(s.POSTPONED in event for event in kind[3])]
    in_2999 = [n for n, kind in enumerate(KINDS) if any(IN_2999 in event for event in kind[3])]
    assert summary["postponed"] == sum(sizes[kind] for kind in put_off)
    assert summary["misdated"] == sum(sizes[kind] for kind in in_2999)
    assert not summary["passed"]
