from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql import functions as F

from kombu_binary_delay import Ladder
from kombu_binary_delay.spark.columns import use
from kombu_binary_delay.spark.prepare import prepare, task_id

LADDER = Ladder.binary(levels=16, tick=1000)  # 65,535 s
SOON = datetime.now(UTC) + timedelta(seconds=36_000)
YEARS = "due outside of the years 2000 to 9999"
LONG_AGO = f"due longer ago than the ladder {LADDER.name} reaches"
COLUMNS = "key string, task string, eta timestamp, countdown double, args string, kwargs string"


def rows(spark, *given):
    return spark.createDataFrame([(*row, *[None] * (6 - len(row))) for row in given], COLUMNS)


def prepared(df, **options):
    columns = {"action": "action"} if "action" in df.columns else {}
    return prepare(df, **{"job_id": "job", "ladder": LADDER, "columns": columns, **options})


def test_the_task_id_is_the_uuid_of_job_and_key_whatever_the_key_is_made_of(spark):
    keys = ["a", "", "42", "ключ", "a\x00b", "'", "x" * 1000]
    df = rows(spark, *[(key, "t", SOON) for key in keys])
    ids = {row.key: row.task_id for row in prepared(df).collect()}
    assert ids == {key: task_id("job", key) for key in keys}
    assert task_id("job", "a") != task_id("other", "a")


#: Rows without their key, and why they are not published.
REASONS = {
    ("t", SOON): None,
    ("t", None, 10.0, "[1]", '{"x": 1}'): None,
    ("t", None, -10.0): None,
    (None, SOON): "no task is named",
    ("  ", SOON): "no task is named",
    ("t",): "neither eta nor countdown",
    ("t", SOON, 10.0): "both eta and countdown",
    ("t", None, float("nan")): "countdown is not a number of seconds",
    ("t", None, float("inf")): "countdown is not a number of seconds",
    ("t", None, -9e10): f"{YEARS}; {LONG_AGO}",
    ("t", None, -65_500.0): None,
    ("t", None, -65_600.0): LONG_AGO,
    # Seconds in a column of milliseconds.
    ("t", datetime.fromtimestamp(1_900_000, UTC)): f"{YEARS}; {LONG_AGO}",
    ("t", None, 65_536.0): f"longer than the ladder {LADDER.name}",
    ("t", SOON, None, "{}"): "args is not a JSON array",
    ("t", SOON, None, "[1"): "args is not a JSON array",
    ("t", SOON, None, "[]", "[]"): "kwargs is not a JSON object",
}


def test_what_is_wrong_with_a_row_is_said(spark):
    given = [(f"{number}", *row) for number, row in enumerate(REASONS)]
    given += [(None, "t", SOON), (None, None)]
    said = Counter((row.key, row.reason) for row in prepared(rows(spark, *given)).collect())
    expected = [(f"{number}", reason) for number, reason in enumerate(REASONS.values())]
    several = "the key is null; no task is named; neither eta nor countdown"
    assert said == Counter([*expected, (None, "the key is null"), (None, several)])


def test_what_is_due_beyond_the_horizon_is_for_later_and_a_countdown_never_comes_nearer(spark):
    too_long = f"longer than the ladder {LADDER.name}"
    anew = "countdown is longer than the horizon, in every run anew; give eta"
    far = SOON + timedelta(days=1)
    given = {
        ("t", None, 70_000.0): (False, too_long),
        ("t", None, 80_000.0): (False, too_long),
        ("t", None, 80_001.0): (True, anew),
        ("t", far): (True, None),
        (" ", far): (True, "no task is named"),
        ("t", SOON): (False, None),
        ("t",): (False, "neither eta nor countdown"),
    }
    df = rows(spark, *((f"{number}", *row) for number, row in enumerate(given)))
    judged = prepared(df, horizon=80_000).collect()
    verdicts = {int(row.key): (row.later, row.reason) for row in judged}
    assert verdicts == dict(enumerate(given.values()))


def test_an_expiry_that_no_datetime_can_say_is_a_reason(spark):
    df = rows(spark, ("a", "t", SOON)).withColumn("expires", F.timestamp_micros(F.lit(10**18)))
    [prepared_row] = prepared(df).collect()
    assert prepared_row.reason == "expires outside of the years 1900 to 9999"


def test_a_bad_cell_is_a_reason_and_ends_no_job(spark):
    names = "key string, task string, countdown string, priority string, queue string"
    given = {
        ("60", "5.0", "q" * 255, '{"tenant": "a"}'): None,
        ("abc", None, None, None): "countdown is not a number of seconds",
        ("30d", None, None, None): "countdown is not a number of seconds",
        ("1e3f", None, None, None): "countdown is not a number of seconds",
        ("1", "5d", None, None): "priority is not a whole number from 0 to 255",
        ("1", "high", None, None): "priority is not a whole number from 0 to 255",
        ("1", "256", None, None): "priority is not a whole number from 0 to 255",
        ("1", "-1", None, None): "priority is not a whole number from 0 to 255",
        ("1", "2.5", None, None): "priority is not a whole number from 0 to 255",
        ("1", None, "ü" * 128, None): "queue is longer than 255 bytes",
        ("1", None, None, "[1]"): "headers is not a JSON object",
        ("1", None, None, '{"id": "x"}'): 'headers has "id", which is set by the row',
        ("1", None, None, '{"eta": null}'): 'headers has "eta", which is set by the row',
    }
    rows = [(f"{number}", "t", *row) for number, row in enumerate(given)]
    prepared_rows = prepared(spark.createDataFrame(rows, f"{names}, headers string")).collect()
    reasons = {int(row.key): row.reason for row in prepared_rows}
    assert reasons == dict(enumerate(given.values()))
    assert [(row.countdown, row.priority) for row in prepared_rows if row.key == "0"] == [(60.0, 5)]


def test_text_that_is_not_utf_8_is_a_reason_whatever_the_row_does(spark):
    latin = "cast(unhex('6be9') as string)"
    given = {
        ("publish", "key"): "key is not UTF-8",
        ("publish", "task"): "task is not UTF-8",
        ("publish", "args"): "args is not UTF-8",
        ("publish", "kwargs"): "kwargs is not UTF-8; kwargs is not a JSON object",
        ("publish", "headers"): None,
        ("cancel", "queue"): "queue is not UTF-8",
        ("cancel", "none"): None,
    }
    good = {
        "task": "'caf\u00e9 \U0001f552 \ufffd'",
        "args": "'[\"\u00e9\"]'",
        "kwargs": "map('a', array('\u00e9', null))",
        "headers": "map('a', unhex('e9'))",
        "queue": "'q'",
        "countdown": "60.0D",
    }
    bad = {
        **dict.fromkeys(("key", "task", "queue"), latin),
        "args": f"concat('[\"', {latin}, '\"]')",
        "kwargs": f"map('a', array({latin}))",
    }
    rows = []
    for number, (action, name) in enumerate(given):
        cells = {**good, "key": f"'{number}'", "action": f"'{action}'"}
        cells |= {name: bad[name]} if name in bad else {}
        rows.append("select " + ", ".join(f"{cell} {column}" for column, cell in cells.items()))
    prepared_rows = prepared(spark.sql(" union all ".join(rows))).collect()
    assert sorted(str(row.reason) for row in prepared_rows) == sorted(map(str, given.values()))


@pytest.mark.usefixtures("local_times")
def test_text_is_read_as_a_time_if_it_has_a_date(spark):
    noon = datetime(2030, 1, 31, 12, tzinfo=UTC)
    is_not = "eta is not a time"
    given = {
        ("publish", "2030-01-31T12:00:00Z", None): (noon, None),
        ("publish", "2030-01-31 13:00:00+01:00", None): (noon, None),
        ("publish", "2030-01-31 12:00", noon.isoformat()): (noon, None),
        ("publish", "12:30", None): (None, is_not),
        ("publish", "2030", None): (None, is_not),
        ("publish", "2030-02-31", None): (None, is_not),
        ("publish", "", None): (None, is_not),
        ("reschedule", "tomorrow", None): (None, is_not),
        ("cancel", "tomorrow", None): (None, None),
        ("cancel", None, None): (None, None),
        ("publish", "2030-01-31", "soon"): (noon.replace(hour=0), "expires is not a time"),
    }
    rows = [(f"{number:02}", "t", *row) for number, row in enumerate(given)]
    names = "key string, task string, action string, eta string, expires string"
    df = spark.createDataFrame(rows, names)
    prepared_rows = prepared(df, ladder=Ladder.default()).orderBy("key").collect()
    assert [(row.due, row.reason) for row in prepared_rows] == [
        (due and round(due.timestamp() * 1_000_000), reason) for due, reason in given.values()
    ]


def test_an_amendment_needs_less_than_a_task_and_says_what_it_lacks(spark):
    names = "key string, action string, eta timestamp, countdown double, args string"
    past, far = SOON - timedelta(days=1), SOON + timedelta(days=1)
    given = {
        ("cancel", None, None, None): None,
        ("cancel", past, 5.0, "[1"): None,
        ("cancel", None, 5.0, None): None,
        ("reschedule", SOON, None, "[1"): None,
        ("reschedule", None, None, None): "a task is rescheduled by eta alone",
        ("reschedule", None, 60.0, None): "a task is rescheduled by eta alone",
        ("reschedule", past, None, None): "due in the past",
        ("reschedule", far, None, None): f"longer than the ladder {LADDER.name}",
        ("publish", SOON, None, None): "no task is named",
        (None, SOON, None, None): "no task is named",
        ("Cancel", None, None, None): "action must be one of publish, cancel, reschedule",
    }
    rows = [(f"{number}", *row) for number, row in enumerate(given)]
    rows += [("twice", "cancel", None, None, None), ("twice", "publish", SOON, None, None)]
    prepared_rows = prepared(spark.createDataFrame(rows, names), horizon=60).collect()
    reasons = {row.key: row.reason for row in prepared_rows if row.key != "twice"}
    assert reasons == {f"{number}": reason for number, reason in enumerate(given.values())}
    assert {row.key for row in prepared_rows if row.later} == {"8", "9"} | {"twice"}
    # The countdown of a cancellation would begin again.
    dues = {row.key: row.due for row in prepared_rows}
    assert (dues["1"], dues["2"]) == (round(past.timestamp() * 1_000_000), None)
    twice = sorted(row.reason for row in prepared_rows if row.key == "twice")
    assert twice == ["the key is not unique", "the key is not unique; no task is named"]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ("timestamp_micros(-9223372036854775808) eta", YEARS),
        ("timestamp_micros(9223372036854775807) eta", YEARS),
        ("date_from_unix_date(2147483647) eta", YEARS),
        ("date_from_unix_date(-2147483648) eta", YEARS),
        ("1 countdown, 1000000000000 priority", "priority is not a whole number from 0 to 255"),
        ("1 countdown, 2.5D priority", "priority is not a whole number from 0 to 255"),
    ],
)
def test_numbers_beyond_all_others_are_reasons(spark, columns, reason):
    [row] = prepared(spark.sql(f"select 'a' key, 't' task, {columns}")).collect()
    assert row.reason.startswith(reason)


def test_columns_are_found_in_whichever_case_and_with_dots_in_the_key(spark):
    df = spark.range(1).selectExpr(
        "7 `k.X`", "'t' TASK", "60 Countdown", "'[1]' ARGS", "'mail' Queue", "3 Priority"
    )
    [row] = prepared(df, columns={"key": "k.x"}).collect()
    assert row.reason is None
    cells = (row.key, row.task, row.countdown, row.args, row.queue, row.priority)
    assert cells == ("7", "t", 60.0, "[1]", "mail", 3)


def test_no_row_of_a_doubled_key_is_taken(spark):
    df = rows(spark, ("a", "t", SOON), ("b", "t", SOON), ("a", "t", SOON))
    reasons = sorted((row.key, row.reason) for row in prepared(df).where("key = 'a'").collect())
    assert reasons == [("a", "the key is not unique")] * 2
    assert prepared(df).where("reason is null").count() == 1


def test_a_row_that_cannot_be_read_has_that_as_its_only_reason(spark):
    # By a schema of the reader's own, it may have a part of its values.
    df = rows(spark, ("a", "t", SOON), ("a", "t", SOON))
    text = F.when(F.col("eta").isNotNull(), F.lit("a,t,?"))
    reasons = [row.reason for row in prepared(df.withColumn("_corrupt_record", text)).collect()]
    assert reasons == ["the row cannot be read: a,t,?"] * 2


def test_the_past_is_rejected_only_where_that_is_asked(spark):
    df = rows(spark, ("a", "t", SOON - timedelta(days=1)), ("b", "t", None, 0.0))
    assert prepared(df).where("reason is null").count() == 2
    reasons = {row.reason for row in prepared(df, past="reject").collect()}
    assert reasons == {"due in the past"}


def test_native_arrays_maps_and_structs_become_json_with_their_nulls(spark):
    df = spark.range(1).select(
        F.lit("a").alias("key"),
        F.lit("t").alias("task"),
        F.lit(1).alias("countdown"),
        F.array(F.lit(1), F.lit(None)).alias("args"),
        F.struct(F.lit("Ü").alias("name"), F.lit(None).cast("int").alias("age")).alias("kwargs"),
        F.create_map(F.lit("h"), F.lit("1")).alias("headers"),
    )
    [row] = prepared(df).collect()
    assert row.reason is None
    assert json.loads(row.args) == [1, None]
    assert json.loads(row.kwargs) == {"name": "Ü", "age": None}
    assert json.loads(row.headers) == {"h": "1"}


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("'a' task, 1 countdown", r"a column 'key' is needed, got \['task', 'countdown'\]"),
        ("'a' key, 1 countdown", "a column 'task' is needed"),
        ("'a' key, 't' task", "eta .* or countdown"),
        ("now() key, 't' task, 1 countdown", r'key must be .*timestamp; use cast\("string"\)'),
        ("'a' key, 't' task, 5 eta", "eta must be a timestamp, or text such as .*, got int"),
        (
            "'a' key, 't' task, interval 5 minutes countdown",
            "countdown must be a number of seconds",
        ),
        ("'a' key, 't' task, 1 countdown, 5 args", "args must be JSON, .* got int"),
        ("'a' key, 't' task, 1 countdown, 'a' Queue, 'b' queue", "'Queue', 'queue'.* case only"),
    ],
)
def test_columns_that_cannot_be_are_refused_at_the_call(spark, columns, words):
    df = spark.range(1).selectExpr(*columns.split(", "))
    with pytest.raises(ValueError, match=words):
        prepared(df)


def test_a_row_that_contradicts_itself_is_rejected(spark):
    names = (
        "key string, task string, eta timestamp, expires timestamp, queue string, exchange string"
    )
    hour = timedelta(hours=1)
    given = [
        ("a", "t", SOON, SOON - hour, None, None),
        ("b", "t", SOON, SOON + hour, None, None),
        ("c", "t", SOON, None, "mail", "news"),
        ("d", "t", SOON, None, "mail", None),
    ]
    reasons = {
        row.key: row.reason for row in prepared(spark.createDataFrame(given, names)).collect()
    }
    assert reasons == {
        "a": "expires before it is due",
        "b": None,
        "c": "both queue and exchange",
        "d": None,
    }


def test_columns_have_other_names_and_a_misspelling_is_noticed(spark, caplog):
    df = spark.range(1).selectExpr(
        "7 customer", "'t' task", "60 wait", "'mail' que", "'[1]' arguments", "'cancel' action"
    )
    chosen = use(df, {"key": "customer", "countdown": "wait"})
    assert chosen.used == {"key": "customer", "task": "task", "countdown": "wait"}
    assert chosen.ignored == ("que", "arguments", "action")
    assert chosen.misspelt == {"que": "queue", "arguments": "args"}
    assert str(chosen) == (
        "columns used: customer as key, task, wait as countdown; ignored: que, arguments, action; "
        "is que queue?; is arguments args?"
    )
    [row] = prepared(df, columns={"key": "customer", "countdown": "wait"}).collect()
    # An action of the user's own does nothing.
    assert (row.key, row.action, row.queue, row.reason) == ("7", "publish", None, None)
    assert "the column que is ignored: is it queue?" in caplog.text
    for columns, words in (
        ({"due": "wait"}, "'due' is no column of a row; known are key, task"),
        ({"eta": "next"}, "no column 'next' for eta"),
    ):
        with pytest.raises(ValueError, match=words):
            use(df, columns)


def test_nine_oclock_is_that_of_the_zone_in_the_text(spark):
    given = {
        "2027-03-13 09:00 America/New_York": "2027-03-13T14:00:00",
        "2027-03-15 09:00 America/New_York": "2027-03-15T13:00:00",
        # The hour from 2 to 3 does not exist on that day.
        "2027-03-14 02:30 America/New_York": "2027-03-14T07:30:00",
    }
    texts = [(text, "t", text) for text in given]
    df = spark.createDataFrame(texts, "key string, task string, eta string")
    judged = prepared(df, ladder=Ladder.default()).collect()
    dues = {row.key: datetime.fromtimestamp(row.due / 1e6, UTC) for row in judged}
    assert dues == {text: datetime.fromisoformat(f"{due}+00:00") for text, due in given.items()}
