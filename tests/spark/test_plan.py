from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest

from kombu_binary_delay import Ladder
from kombu_binary_delay.ladder.ladder import hops
from kombu_binary_delay.spark.plan import Limits, backlog, check, plan, summarize

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def rows_of(planned):
    names = ("published", "due", "most_due", "waiting", "bytes", "hops", "beyond", "undated")
    at = {row.minute: tuple(row[name] for name in names) for row in planned.collect()}
    return [at[minute] for minute in sorted(at)]


def test_a_message_waits_from_its_publish_to_its_due_time(spark):
    df = spark.createDataFrame([(NOON, 600), (NOON, 600)], "published timestamp, countdown int")
    assert rows_of(plan(df)) == [(2, 0, 0, 2, 1000, 0, 0, 0), (0, 2, 2, 0, 0, 6, 0, 0)]
    # A rolling job publishes it five minutes before.
    planned = plan(df, horizon=300).orderBy("minute").collect()
    assert planned[1].minute - planned[0].minute == timedelta(minutes=5)


@pytest.mark.parametrize(
    "ladder", [Ladder.default(), Ladder.binary(), Ladder(125, (4,) * 15)], ids=str
)
def test_hops_are_those_of_the_ladder(spark, ladder):
    draw = random.Random(6)
    delays = [draw.randrange(1, 3 * 86_400_000) / 1000 for _ in range(200)]
    df = spark.createDataFrame(
        [(NOON, delay) for delay in delays], "published timestamp, countdown double"
    )
    summary = summarize(plan(df, ladder))
    expected = sum(hops(ladder.digits(delay * 1000)) for delay in delays)
    assert summary["hops_per_message"] * 200 == pytest.approx(expected)
    assert summary["messages"] == 200


def test_what_cannot_wait_is_counted_and_limits_are_compared(spark):
    ladder = Ladder.binary(levels=4, tick=1000)
    rows = [("5", "publish"), ("16", "publish"), ("soon", None), ("-1", None), ("5", "cancel")]
    df = spark.createDataFrame(rows, "after string, act string").withColumn("published", _noon())
    planned = plan(df, ladder, columns={"countdown": "after", "action": "act"})
    summary = summarize(planned)
    assert {name: summary[name] for name in ("beyond", "undated", "messages", "waiting")} == {
        "beyond": 1,
        "undated": 1,
        "messages": 2,
        "waiting": 0,
    }
    verdicts = check(summary, Limits(due_per_second=1))
    assert {name: verdict["passed"] for name, verdict in verdicts.items()} == {
        "due_per_second": True,
        "beyond": False,
        "undated": False,
    }
    with pytest.raises(ValueError, match="waiting must be a finite number >= 0, got -1"):
        Limits(waiting=-1)


def _noon():
    from pyspark.sql import functions as F  # noqa: PLC0415

    return F.lit(NOON)


def test_what_is_more_than_the_broker_carries_is_late():
    minutes = [
        {"minute": NOON + timedelta(minutes=at), "due": due, "most_due": 10}
        for at, due in ((0, 60_000), (1, 60_000), (3, 0))
    ]
    # Half of each minute is left over; a minute in which nothing is due catches up.
    assert backlog(minutes, carries=500) == [60.0, 120.0, 0.0]
    minutes[0]["most_due"] = 70_000
    assert backlog(minutes[:1], carries=5000)[0] == pytest.approx(9.02, abs=0.01)
