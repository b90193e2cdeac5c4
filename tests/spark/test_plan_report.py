"""The report of a plan: its figures, its page, and the settings that it recommends."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql import functions as F

from kombu_binary_delay import Ladder
from kombu_binary_delay.ladder.ladder import hops
from kombu_binary_delay.spark.plan import plan
from kombu_binary_delay.spark.report import measured, svg
from kombu_binary_delay.spark.report.plan_page import plan_page, settings
from kombu_binary_delay.spark.report.planned import _coming, plan_figures

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
DEFAULT, BINARY = Ladder.default(), Ladder.binary()


def test_delays_of_whole_seconds_up_to_eight_wait_once_so_their_rate_is_that_of_one_wait():
    assert {hops(DEFAULT.digits(each * 1000)) for each in range(1, 9)} == {1}


@pytest.fixture(scope="module")
def whole(spark):
    """20,000 tasks over an hour, and 20,000 in one second of it, to several destinations."""
    ids = spark.range(40_000)
    at_once = F.col("id") >= 20_000
    after = F.when(at_once, F.lit(2400.0)).otherwise(600 + F.col("id") % 3600)
    rows = ids.select(
        F.timestamp_micros(((F.lit(NOON.timestamp()) + after) * 1_000_000).cast("bigint")).alias(
            "eta"
        ),
        F.lit(NOON).alias("published"),
        F.when(at_once, "mail <b>")
        .when(F.col("id") % 4 > 0, F.concat(F.lit("q"), F.col("id") % 4))
        .alias("queue"),
        F.lit("shop").alias("exchange"),
        F.lit("eu").alias("routing_key"),
    )
    planned = plan(rows, [DEFAULT, BINARY]).cache()
    limits = {"waiting": 30_000, "queues": 100}
    return plan_figures(rows, planned, limits=limits, name="r.parquet")


def test_the_figures_add_up_to_the_tasks_of_each_destination(whole):
    totals = {name: sum(each) for name, each in whole["due"].items()}
    assert totals == {"mail <b>": 20_000, **dict.fromkeys(("shop/eu", "q1", "q2", "q3"), 5_000)}
    place = int((NOON.timestamp() + 2400 - whole["start"]) // whole["width"])
    count, second = max(whole["herd"])
    assert whole["herd"][place] == [count, second]
    assert second == NOON.timestamp() + 2400
    assert 20_005 <= count <= 20_006
    assert {each["ladder"] for each in whole["ladders"]} == {DEFAULT.name, BINARY.name}


def test_the_page_says_when_and_what_it_costs_and_what_to_set(whole):
    text = plan_page({**whole, "chosen": DEFAULT.name})
    assert not re.search(r"(src|href)=|@import|url\(|<script|https?://", text)
    assert "mail <b>" not in text
    assert "mail &lt;b&gt;" in text
    assert '<span class="verdict bad">exceeds the limits</span>' in text
    assert f"Exceeds: waiting of {DEFAULT.name}, waiting of {BINARY.name}." in text
    assert "dead_letter_worker_consumer_prefetch: 128" in text
    assert "20,00" in text
    option = '<span class="option">--limit hops_per_second=NUMBER</span>'
    assert f"No limit was given with {option}." in text


def test_a_destination_may_have_the_name_under_which_the_rest_is_shown(spark):
    queue = "if(id < 3, 'others', concat('q', id)) queue"
    rows = spark.range(20).selectExpr(queue, f"timestamp_seconds({NOON.timestamp():.0f}) eta")
    found = _coming(rows, NOON.timestamp(), 60, 1)
    assert (found["due"]["others"], len(found["due"]), found["others"]) == ([3], 16, [2])
    text = plan_page({**figures(load=[1.0], carries=9), **found})
    assert re.findall(r">others</td><td class=n>(\d+)<", text) == ["3", "2"]


def figures(*, load, carries, herd=0, busiest=100.0, ladders=(DEFAULT.name,), peaks=(1000.0,)):
    """Figures of a load in hops a second, a minute each."""
    each = {
        "messages": 9,
        "hops": 9,
        "hops_per_message": 1.0,
        "waiting": 9,
        "queue_waiting": 9,
        "queues": 9,
        "published_per_second": 1.0,
        "bytes": 9,
        "at_once": 0,
        "beyond": 0,
        "undated": 0,
    }
    number = len(load)
    return {
        "name": "",
        "every": 60,
        "limits": {},
        "carries": carries,
        "measured": False,
        "start": NOON.timestamp(),
        "end": NOON.timestamp() + 60 * number,
        "width": 60,
        "chosen": ladders[-1],
        "ladders": [
            {**each, "ladder": name, "hops_per_second": peak}
            for name, peak in zip(ladders, peaks, strict=True)
        ],
        "due": {"q": [1] * number},
        "others": [0] * number,
        "herd": [[herd, NOON.timestamp()]] + [[0, 0.0]] * (number - 1),
        "busiest": {
            name: {"rate": busiest, "queue": "kbd.v2", "at": NOON.timestamp()} for name in ladders
        },
        "work": {
            name: {"rate": load, "late": [0.0] * number, "overloaded": over, "behind": 0.0}
            for name in ladders
            for over in [60 if max(load) > carries else 0]
        },
    }


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"load": [900.0], "carries": 1000}, []),
        ({"load": [900.0], "carries": 1000, "herd": 4000}, []),
        (
            {"load": [900.0], "carries": 1000, "herd": 20_000},
            ["dead_letter_worker_consumer_prefetch: 128"],
        ),
        ({"load": [900.0], "carries": 9000, "busiest": 2.5 * measured.ONE_QUEUE}, ["lanes: 3"]),
        (
            {
                "load": [1500.0],
                "carries": 1000,
                "ladders": (DEFAULT.name, BINARY.name),
                "peaks": (900.0, 1500.0),
            },
            ["no radix, for the default ladder", "a longer time, or more brokers"],
        ),
        (
            {
                "load": [900.0],
                "carries": 1000,
                "ladders": (DEFAULT.name, BINARY.name),
                "peaks": (600.0, 900.0),
            },
            [],
        ),
    ],
)
def test_settings_are_recommended_where_the_figures_ask_for_them(given, names):
    found = figures(**given)
    assert [name for name, _ in settings(found)] == names
    text = plan_page(found)
    assert ("The figures ask for none" in text) == (not names)
    for name in names:
        assert f"<code>{name}</code>" in text


def test_what_is_more_than_the_broker_carries_is_late_until_it_has_caught_up(spark):
    # 60 hops a second in the first minute, and one that carries 25: behind for 140 s in all.
    due = [NOON + timedelta(seconds=60 + 0.016 * each) for each in range(3600)]
    rows = spark.createDataFrame([(each,) for each in due], "eta timestamp").withColumn(
        "published", F.col("eta") - F.expr("interval 1 second")
    )
    last = spark.createDataFrame([(NOON + timedelta(seconds=601),)], "eta timestamp").withColumn(
        "published", F.col("eta") - F.expr("interval 1 second")
    )
    rows = rows.unionByName(last)
    planned = plan(rows, Ladder.default()).cache()
    found = plan_figures(rows, planned, limits={"hops_per_second": 25})
    work = found["work"][DEFAULT.name]
    assert max(work["rate"]) == pytest.approx(60, rel=0.02)
    assert max(work["late"]) == pytest.approx((60 - 25) * 60 / 25, rel=0.05)
    assert work["overloaded"] == 120
    assert work["behind"] == 0
    assert "hops a second, was given with --limit" in plan_page(found)


def test_amendments_are_no_tasks_that_come(spark):
    rows = [(NOON, None), (NOON, "publish"), (NOON, "cancel"), (NOON, "reschedule")]
    df = spark.createDataFrame(rows, "eta timestamp, Action string").withColumn(
        "published", F.lit(NOON - timedelta(hours=1))
    )
    found = plan_figures(df, plan(df, DEFAULT).cache())
    assert [each["messages"] for each in found["ladders"]] == [2]
    assert {name: sum(each) for name, each in found["due"].items()} == {"the task's own": 2}
    assert max(found["herd"]) == [2, NOON.timestamp()]


@pytest.mark.parametrize("value", [0, float("inf")])
def test_a_broker_that_carries_nothing_or_everything_is_refused(spark, value):
    rows = spark.createDataFrame([], "eta timestamp")
    with pytest.raises(ValueError, match="hops_per_second must be a finite number above 0"):
        plan_figures(rows, rows, limits={"hops_per_second": value})


def test_lines_without_a_point_are_drawn_all_the_same():
    drawn = svg.lines([("nothing", [])], svg.Axis(0, 1, 0, 10), svg.number, svg.number)
    assert drawn.startswith("<svg")


def test_a_plan_of_nothing_is_a_page_all_the_same(spark):
    rows = spark.createDataFrame([], "eta timestamp")
    assert "No tasks" in plan_page(plan_figures(rows, plan(rows, DEFAULT)))
