from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.testing import assertDataFrameEqual

from kombu_binary_delay import Ladder, Topology
from kombu_binary_delay.ladder.address import Destination, format_address
from kombu_binary_delay.ladder.simulate import walk
from kombu_binary_delay.spark.plan import (
    AT_ONCE,
    BEYOND,
    LADDER,
    PLAN_SCHEMA,
    QUEUE,
    UNDATED,
    Limits,
    Variant,
    check,
    plan,
    summarize,
)

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
BINARY = Ladder.binary()
RADIX_4 = Ladder(125, (4,) * 15)
PER_DELAY = Variant(Ladder.binary(tick=1000), queue_per_delay=True)
VARIANTS = [Variant(BINARY), Variant(RADIX_4), PER_DELAY]
DAY = 86400
SEED = 6


def reminders(spark, count, longest=3 * DAY):
    draw = random.Random(SEED)
    rows = [
        (NOON + timedelta(seconds=draw.uniform(0, DAY)), draw.uniform(0.001, longest))
        for _ in range(count)
    ]
    return rows, spark.createDataFrame(rows, "published timestamp, countdown double")


def ticks(ladder, countdown):
    return -(-round(countdown * 1_000_000 + 0.49999) // (ladder.tick * 1000))


def in_and_out(row):
    return row.entered, row.left


def minutes(plan, *scopes):
    return [row for row in plan.collect() if row.scope in scopes]


def test_a_delay_of_ten_seconds_waits_eight_and_two(spark):
    df = spark.createDataFrame([(NOON, 10)], "published timestamp, countdown int")
    ladder = Ladder.binary(levels=4, tick=1000)
    name = Topology(ladder).level_name
    eight, two = (3, 1, f"{name(3)}.1", 8000), (1, 1, f"{name(1)}.1", 2000)
    at = [NOON + timedelta(seconds=second) for second in (0, 8, 10)]
    expected = [
        (ladder.name, QUEUE, *eight, at[0], 1, 0, 1, 1, 500, 500),
        (ladder.name, QUEUE, *eight, at[1], 0, 1, 0, 1, 0, 500),
        (ladder.name, QUEUE, *two, at[1], 1, 0, 1, 1, 500, 500),
        (ladder.name, QUEUE, *two, at[2], 0, 1, 0, 1, 0, 500),
        (ladder.name, LADDER, None, None, None, None, at[0], 1, 0, 1, 1, 500, 500),
        (ladder.name, LADDER, None, None, None, None, at[2], 0, 1, 0, 1, 0, 500),
    ]
    planned = plan(df, ladder, every=1)
    assertDataFrameEqual(planned, spark.createDataFrame(expected, PLAN_SCHEMA))


def hops(variant, countdown):
    if variant.queue_per_delay:
        return 1
    ladder = variant.ladder
    return sum("1" in digit for digit in ladder.digits(ticks(ladder, countdown) * ladder.tick))


def test_what_enters_leaves_again_and_is_the_number_of_digits_above_zero(spark):
    rows, df = reminders(spark, 600)
    planned = plan(df, VARIANTS).cache()
    planned_rows = minutes(planned, QUEUE, LADDER)
    summaries = {row.ladder: row for row in summarize(planned).collect()}
    assert set(summaries) == {variant.name for variant in VARIANTS}
    for variant in VARIANTS:
        digits = [hops(variant, seconds) for _, seconds in rows]
        everything = [row for row in planned_rows if row.ladder == variant.name]
        in_queues = [row for row in everything if row.scope == QUEUE]
        entered, left = (sum(counts) for counts in zip(*map(in_and_out, in_queues), strict=True))
        assert entered == left == sum(digits), variant.name
        assert min(row.waiting for row in everything) == 0
        assert min(row.waiting_bytes for row in everything) == 0
        assert all(row.most >= row.waiting for row in everything)
        last = {row.queue: row for row in sorted(everything, key=lambda row: row.minute)}
        assert {(row.waiting, row.waiting_bytes) for row in last.values()} == {(0, 0)}
        summary = summaries[variant.name]
        assert (summary.messages, summary.hops) == (len(rows), sum(digits)), variant.name
    planned.unpersist()


@pytest.mark.parametrize("ladder", [BINARY, RADIX_4], ids=lambda ladder: ladder.name)
def test_a_plan_agrees_with_the_walk_through_the_topology(spark, ladder):
    rows, df = reminders(spark, 40, longest=30 * DAY)
    topology = Topology(ladder)
    part = topology.whole + topology.to_queue("mail")
    entered: Counter[object] = Counter()
    left: Counter[object] = Counter()
    for published, seconds in rows:
        digits = ladder.digits(ticks(ladder, seconds) * ladder.tick)
        way = walk(
            part, topology.entry_exchange(digits), format_address(digits, Destination("", "mail"))
        )
        at = published
        for wait in way.waits:
            entered[wait.queue, at.replace(second=0, microsecond=0)] += 1
            at += timedelta(milliseconds=wait.milliseconds)
            left[wait.queue, at.replace(second=0, microsecond=0)] += 1
    found = minutes(plan(df, ladder), QUEUE)
    key = lambda row: (row.queue, row.minute.replace(tzinfo=UTC))  # noqa: E731
    assert {key(row): row.entered for row in found if row.entered} == entered
    assert {key(row): row.left for row in found if row.left} == left


@pytest.mark.parametrize(
    ("longest", "count", "most_above"), [(3, 8000, 1.2), (40, 1500, 1.4), (400, 1500, 1.4)]
)
def test_the_greatest_number_waiting_is_little_more_than_the_truth(
    spark, longest, count, most_above
):
    # A short load: most of it comes and goes within a minute or a few.
    draw = random.Random(SEED)
    rows = [
        (NOON + timedelta(seconds=draw.uniform(0, 90)), draw.uniform(0.001, longest), size)
        for size in range(1, count)
    ]
    df = spark.createDataFrame(rows, "published timestamp, countdown double, bytes int")
    moves = []
    for published, seconds, size in rows:
        wait = timedelta(milliseconds=ticks(RADIX_4, seconds) * RADIX_4.tick)
        moves += [(published, 1, size), (published + wait, -1, -size)]
    most = most_bytes = waiting = held = 0
    for _, one, size in sorted(moves):
        waiting, held = waiting + one, held + size
        most, most_bytes = max(most, waiting), max(most_bytes, held)
    [summary] = summarize(plan(df.repartition(2), RADIX_4)).collect()
    assert most <= summary.waiting <= most_above * most
    assert most_bytes <= summary.bytes <= most_above * most_bytes


def test_ladders_are_compared_side_by_side_with_and_without_a_horizon(spark):
    _, df = reminders(spark, 300)
    variants: list[Ladder | Variant] = [BINARY, RADIX_4, Variant(BINARY, horizon=3600)]
    ties = "waiting_at", "deepest_queue"
    rows = summarize(plan(df, variants)).drop(*ties).collect()
    together = {row.ladder: row for row in rows}
    assert len(together) == len(rows) == len(variants)
    for each in variants[1:]:
        [apart] = summarize(plan(df, each)).drop(*ties).collect()
        assertDataFrameEqual([together[each.name]], [apart])
    binary, radix_4, rolling = (together[each.name].asDict() for each in variants)
    assert radix_4["hops"] < binary["hops"]
    assert rolling["waiting"] < binary["waiting"] / 10
    assert rolling["messages"] == binary["messages"] == 300


def test_a_delay_with_a_queue_of_its_own_waits_in_one_place(spark):
    df = spark.createDataFrame([(NOON, 90.0)] * 2, "published timestamp, countdown double")
    [queue] = {row.queue for row in minutes(plan(df, PER_DELAY), QUEUE)}
    assert queue == Topology(PER_DELAY.ladder).direct_queue(tuple("1011010")).queues[0].name


def test_what_never_enters_the_ladder_is_counted_by_its_reason(spark):
    hour = NOON + timedelta(hours=1)
    rows = [(NOON, hour), (NOON, NOON), (hour, NOON), (NOON, None), (NOON, NOON.replace(year=2100))]
    df = spark.createDataFrame(rows, "published timestamp, eta timestamp")
    counts: Counter[str] = Counter()
    for row in plan(df, Variant(BINARY, horizon=1e12)).collect():
        if row.scope != QUEUE:
            counts[row.scope] += row.entered
    assert counts == {LADDER: 1, AT_ONCE: 2, UNDATED: 1, BEYOND: 1}


@pytest.mark.parametrize("countdown", [60.0, 1.0], ids=["for a minute", "within a minute"])
def test_the_bytes_of_each_message_are_added_up(spark, countdown):
    rows = [(NOON, countdown, 100), (NOON, countdown, 900), (NOON, countdown, None)]
    df = spark.createDataFrame(rows, "published timestamp, countdown double, bytes int")
    [summary] = summarize(plan(df, BINARY, message_bytes=7)).collect()
    assert (summary.bytes, summary.waiting) == (1007, 3)


def test_a_countdown_from_nobody_says_when_is_from_now(spark):
    rows = [(None, 60.0), (None, None)]
    df = spark.createDataFrame(rows, "published timestamp, countdown double")
    [summary] = summarize(plan(df, BINARY)).collect()
    assert (summary.messages, summary.undated) == (1, 1)


def test_text_such_as_files_have_is_planned_by_what_it_says(spark):
    noon, later = NOON.isoformat(), (NOON + timedelta(minutes=1)).isoformat()
    rows = [
        (noon, None, "60", "100"),
        (noon, later, None, None),
        (noon, None, "30d", None),
        (noon, "12:30", None, None),
        ("soon", later, None, None),
        # As for a publish, which rejects them.
        (noon, later, "60", None),
        (noon, "12:30", "60", None),
    ]
    names = "published string, eta string, countdown string, bytes string"
    [summary] = summarize(plan(spark.createDataFrame(rows, names), BINARY)).collect()
    assert (summary.messages, summary.undated, summary.bytes) == (2, 5, 600)


def test_limits_pass_or_fail_one_by_one(spark):
    rows = [(NOON, 3600.0)] * 120
    df = spark.createDataFrame(rows, "published timestamp, countdown double")
    summary = summarize(plan(df, BINARY))
    limits = Limits(waiting=120, queue_waiting=119, published_per_second=2, bytes=59_999)
    verdicts = {row.limit: (row.planned, row.passed) for row in check(summary, limits).collect()}
    assert verdicts == {
        "waiting": (120, True),
        "queue_waiting": (120, False),
        "published_per_second": (2, True),
        "bytes": (60_000, False),
        "beyond": (0, True),
        "undated": (0, True),
    }


@pytest.mark.parametrize(
    ("ladders", "options", "words"),
    [
        ([], {}, "each once"),
        ([BINARY, BINARY], {}, "each once"),
        (Variant(BINARY, horizon=0), {}, "horizon must be above 0, .* got 0"),
        (Variant(BINARY, horizon=float("inf")), {}, "horizon must be .* got inf"),
        (BINARY, {"every": 0}, "every must be a whole number of at least 1 s, got 0"),
        (BINARY, {"every": 2.5}, "every must be a whole number of at least 1 s, got 2.5"),
        (BINARY, {"message_bytes": -1}, "message_bytes must be .* least 0, got -1"),
    ],
)
def test_what_cannot_be_planned_is_refused_at_the_call(spark, ladders, options, words):
    _, df = reminders(spark, 1)
    with pytest.raises(ValueError, match=words):
        plan(df, ladders, **options)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True])
def test_a_limit_that_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match=f"waiting must be a finite number >= 0, got {value}"):
        Limits(waiting=value)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("1 id", r"eta \(timestamp\) or countdown .*\['id'\]"),
        ("1 published, 60 countdown", "published must be a timestamp, .* got int; use timestamp_s"),
        ("1L eta", "eta must be a timestamp, or text such as .*, got bigint; use timestamp_s"),
    ],
)
def test_rows_are_refused_by_the_columns_they_have(spark, columns, words):
    with pytest.raises(ValueError, match=words):
        plan(spark.sql(f"select {columns}"), BINARY)


def test_no_limit_at_all_is_refused(spark):
    with pytest.raises(ValueError, match="waiting, queue_waiting"):
        check(spark.range(1), Limits(beyond=None, undated=None))
