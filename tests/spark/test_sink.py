"""The same rows, written as to any other sink."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Connection
from pyarrow import fs
from pyspark.sql import functions as F
from pyspark.sql import types as t

from kombu_binary_delay import Ladder
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.prepare import prepare, task_id
from kombu_binary_delay.spark.send import Sender, Sent
from kombu_binary_delay.spark.versions import HAS_SOURCES, HAS_STREAM_SINKS

if not HAS_SOURCES:
    # See test_versions.py for what it says then.
    pytest.skip("PySpark 3.5 has no sinks in Python", allow_module_level=True)

from kombu_binary_delay.spark.sink import FORMAT, CelerySink

FAR = datetime.now(UTC) + timedelta(days=1)


@pytest.fixture
def rows(spark):
    spark.dataSource.register(CelerySink)
    return spark.range(40, numPartitions=2).select(
        F.concat(F.lit("k"), "id").alias("key"),
        F.lit("t").alias("task"),
        F.array("id").alias("args"),
        F.create_map(F.lit("x"), F.col("id")).alias("kwargs"),
        F.lit(FAR).alias("eta"),
    )


def test_rows_are_published_and_their_receipts_committed(spark, rows, vhost, tmp_path):
    receipts = str(tmp_path / "receipts")
    bad = rows.limit(1).withColumn("task", F.lit(None).cast("string"))
    options = {"job_id": "j", "broker": vhost.url, "receipts": receipts}
    rows.unionByName(bad).write.format(FORMAT).mode("append").options(**options).save()
    found = spark.read.schema(s.RECEIPTS).parquet(receipts).collect()
    published = {row.key: row.task_id for row in found if row.status == s.PUBLISHED}
    assert published == {f"k{n}": task_id("j", f"k{n}") for n in range(40)}
    [refused] = [row for row in found if row.status == s.REFUSED]
    assert (refused.key, refused.detail) == ("k0", "no task is named")
    assert list((tmp_path / "receipts").glob("_*")) == []


def test_what_was_read_is_published_while_spark_prepares_more(spark, vhost, tmp_path):
    df = spark.createDataFrame([("a",), ("b",)], "key string").selectExpr(
        "key", "'t' task", "-1.0D countdown"
    )
    arrived = []

    def batches():
        for batch in df.toArrow().to_batches(max_chunksize=1):
            yield batch
            with Connection(vhost.url) as connection:
                queue = connection.default_channel.queue_declare("celery", passive=True)
                arrived.append(queue.message_count)

    writer(df.schema, broker=vhost.url, receipts=str(tmp_path)).write(batches())
    assert arrived == [1, 2]


@pytest.mark.skipif(not HAS_STREAM_SINKS, reason="PySpark 4.0 has no sinks for Arrow streams")
def test_a_stream_is_published_as_it_comes(spark, rows, vhost, tmp_path):
    source, receipts = str(tmp_path / "source"), str(tmp_path / "receipts")

    def run():
        query = (
            spark.readStream.schema(rows.schema)
            .parquet(source)
            .writeStream.format(FORMAT)
            .options(job_id="j", broker=vhost.url, receipts=receipts)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return spark.read.schema(s.RECEIPTS).parquet(receipts).count()

    rows.limit(10).write.parquet(source)
    assert run() == 10
    rows.limit(5).withColumn("key", F.concat(F.lit("new-"), "key")).write.mode("append").parquet(
        source
    )
    assert run() == 15
    assert run() == 15


def test_rows_of_a_sink_cancel_and_reschedule_too(spark, vhost, tmp_path):
    names = "key string, ACTION string, task string, eta timestamp, countdown double"
    past, later = FAR - timedelta(days=2), FAR + timedelta(days=31)
    given = {
        ("cancel", None, None, None): (s.RECORDED, None),
        ("cancel", None, None, 9e7): (s.RECORDED, None),
        ("cancel", None, FAR, -9e10): (s.RECORDED, None),
        ("reschedule", None, FAR, None): (s.RECORDED, None),
        ("reschedule", None, None, 60.0): (s.REFUSED, "a task is rescheduled by eta alone"),
        ("reschedule", None, past, None): (s.REFUSED, "due in the past"),
        ("reschedule", None, later, None): (
            s.REFUSED,
            "due later than amendments are kept, by amendments_max_age",
        ),
        ("drop", "t", FAR, None): (
            s.REFUSED,
            "action must be one of publish, cancel, reschedule",
        ),
        (None, "t", FAR, None): (s.PUBLISHED, None),
    }
    rows = [(f"{number}", *row) for number, row in enumerate(given)]
    df = spark.createDataFrame(rows, names)
    there = writer(df.schema, broker=vhost.url, receipts=str(tmp_path))
    there.commit([there.write(iter(df.toArrow().to_batches()))])
    found = spark.read.schema(s.RECEIPTS).parquet(str(tmp_path)).collect()
    outcomes = {int(row.key): (row.status, row.detail) for row in found}
    assert outcomes == dict(enumerate(given.values()))
    # The countdown of a cancellation would begin again.
    assert {row.key: row.due for row in found}["1"] is None
    actions = {int(row.key): row.action for row in found}
    assert actions == dict(enumerate(row[0] or s.PUBLISH for row in given))


GIVEN = {"job_id": "j", "broker": "amqp://", "receipts": "/nowhere/receipts"}


def test_what_cannot_be_is_refused_before_anything_is_sent(rows):
    with pytest.raises(Exception, match="past must be one of"):
        rows.write.format(FORMAT).mode("append").options(**GIVEN, past="drop").save()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"job_id": ""}, "needs the option job_id"),
        ({"broker": ""}, "needs the option broker"),
        ({"receipts": ""}, "needs the option receipts"),
        ({"key": "id"}, "a column 'id' is needed"),
        ({"settings": '{"tik": 1}'}, "unknown setting 'tik'"),
        ({"settings": "radix=4"}, "settings must be a JSON object such as .* got 'radix=4'"),
        ({"settings": "null"}, "settings must be a JSON object such as .* got 'null'"),
        ({"max_rate": "fast"}, "max_rate must be above 0, .* got 'fast'"),
        ({"max_rate": "0"}, "max_rate must be above 0"),
        ({"max_rate": "inf"}, "max_rate must be .* got inf"),
        ({"receipts": "dbfs:/x"}, "'dbfs:/x': .* give a path, or a URI of file, s3"),
        ({"receipts": "/dev/null/x"}, "/dev/null"),
    ],
)
def test_options_that_cannot_be_are_refused(options, words):
    with pytest.raises(Exception, match=words):
        writer("key string, task string, eta timestamp", **options)


@pytest.fixture
def sent(monkeypatch):
    """What a sender is given, in place of a broker."""
    given: list[dict[str, Any]] = []

    def send(_, batches):
        for rows in batches:
            given.extend(rows)
        return []

    monkeypatch.setattr(Sender, "send", send)
    return given


def writer(schema, **options):
    if isinstance(schema, str):
        schema = t.StructType.fromDDL(schema)
    return CelerySink({**GIVEN, **options}).writer(schema, overwrite=False)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("task string, countdown double", "a column 'key' is needed"),
        ("key string, countdown double", "a column 'task' is needed"),
        ("key string, task string", "eta .* or countdown"),
        (
            "key boolean, task string, countdown int",
            "key must be .* got boolean; use cast",
        ),
        ("key double, task string, countdown int", "key must be a string or an integer"),
        ("key string, task int, countdown int", "task must be a string, got int"),
        ("key string, task string, eta string", "eta must be a timestamp, got string; use cast"),
        ("key string, task string, eta date", "eta must be a timestamp, got date"),
        ("key string, task string, eta timestamp_ntz", "eta must be .* got timestamp_ntz; use"),
        ("key string, task string, countdown string", "countdown must be a number of seconds"),
        ("key string, task string, countdown int, expires date", "expires must be a timestamp"),
        ("key string, task string, countdown int, priority string", "priority must be an integer"),
        ("key string, task string, countdown int, args int", "args must be JSON .* use to_json"),
        ("key string, task string, countdown int, args map<string,int>", "args must be JSON or an"),
        ("key string, task string, countdown int, kwargs array<int>", "kwargs must be JSON, a map"),
        (
            "key string, task string, countdown int, kwargs struct<a: array<date>>",
            "kwargs has a date in it, .* got struct<a:array<date>>; use to_json",
        ),
        (
            "key string, task string, countdown int, headers map<boolean, string>",
            "headers has a boolean in it",
        ),
        ("key string, task string, countdown int, args array<float>", "args has a float in it"),
    ],
)
def test_a_column_of_a_type_that_cannot_be_is_refused_with_the_remedy(columns, words):
    with pytest.raises(ValueError, match=words):
        writer(columns)


def test_the_same_rows_mean_the_same_as_to_publish(spark, tmp_path, sent):
    session = spark.conf.get("spark.sql.session.timeZone")
    nested = "map<string, map<int, array<struct<x: double, y: map<string, string>>>>>"
    values = (
        "array(1.5D, double('NaN'), -double('Infinity'), null) args",
        f"""cast(map('a', map(1, array(named_struct('x', 1e300D, 'y', map('ü', null)))),
        'b', null) as {nested}) kwargs""",
        """named_struct('d', 12345678901234567890123456789BD, 'e', 1.50BD, 'n', null, 't', true,
        's', array('"'), 'l', 9007199254740993L) headers""",
    )
    times = ("timestamp'1969-07-20 20:17:40.000001' eta", "timestamp'2030-01-31 12:00:00' expires")
    others = ("-5L key", "'t' task", "7 priority", "null queue", "cast('1.5' as decimal(3,1)) x")
    df = spark.range(1).selectExpr(*values, *times, *others)
    text = spark.range(1).selectExpr("'k' key", "'t' task", "1.5BD countdown", "'[1, 2]' ARGS")
    try:
        spark.conf.set("spark.sql.session.timeZone", "America/New_York")
        for given in (df, text):
            [row] = [
                each.asDict()
                for each in prepare(given, job_id="j", ladder=Ladder.default()).collect()
            ]
            there = writer(given.schema, receipts=str(tmp_path))
            there.write(iter(given.toArrow().to_batches()))
            found = sent.pop()
            for name in ("args", "kwargs", "headers"):
                assert json.loads(found[name] or "0") == json.loads(row[name] or "0"), name
                row[name] = found[name]
            assert found == {name: row[name] for name in found}
    finally:
        spark.conf.set("spark.sql.session.timeZone", session)


def test_a_row_that_cannot_be_sent_has_a_receipt_with_what_is_known_of_it(spark, tmp_path, sent):
    micros = round(FAR.timestamp() * 1_000_000)
    reasons = {
        "the key is null": (None, "t", FAR, None, None),
        "the key is not unique": ("good", "t", FAR, None, None),
        "no task is named": ("b", " ", FAR, None, None),
        "neither eta nor countdown": ("c", "t", None, None, None),
        "both eta and countdown": ("d", "t", FAR, 1.0, None),
        "countdown is not a number of seconds": ("e", "t", None, float("nan"), None),
        "due outside of the years 1900 to 9999": ("f", "t", None, -9e10, None),
        "expires outside of the years 1900 to 9999": ("g", "t", FAR, None, 10**18),
    }
    given = [("good", "t", FAR, None, None), *reasons.values()]
    df = spark.createDataFrame(
        given, "key string, task string, eta timestamp, countdown double, expires bigint"
    ).withColumn("expires", F.timestamp_micros("expires"))
    there = writer(df.schema, receipts=str(tmp_path))
    before = datetime.now(UTC)
    there.commit([there.write(iter(df.toArrow().to_batches()))])
    assert [row["key"] for row in sent] == ["good"]
    receipts = spark.read.schema(s.RECEIPTS).parquet(str(tmp_path))
    tried = receipts.where(F.col("published_at").between(before, datetime.now(UTC)))
    found = tried.withColumn("due", F.unix_micros("due")).collect()
    assert {row.status for row in found} == {s.REFUSED}
    assert {row.detail: (row.key, row.due) for row in found} == {
        reason: (row[0], micros if row[2] else None) for reason, row in reasons.items()
    }


def test_one_text_that_is_not_utf_8_is_the_reason_of_its_row_alone(spark, tmp_path, sent):
    columns = "'t' task, 60.0D countdown, map('a', 'b') kwargs"
    latin = "cast(unhex('6be9') as string)"
    rows = [
        f"'a' key, {columns}",
        f"{latin} key, {columns}",
        f"'c' key, {latin} task, 60.0D countdown, map('a', {latin}) kwargs",
        f"'d' key, {columns}",
    ]
    df = spark.sql(" union all ".join(f"select {row}" for row in rows)).coalesce(1)
    there = writer(df.schema, receipts=str(tmp_path))
    there.commit([there.write(iter(df.toArrow().to_batches()))])
    assert [(row["key"], row["kwargs"]) for row in sent] == [
        ("a", '{"a": "b"}'),
        ("d", '{"a": "b"}'),
    ]
    found = spark.read.schema(s.RECEIPTS).parquet(str(tmp_path)).toArrow().to_pylist()
    assert {(row["key"], row["task"], row["status"], row["detail"]) for row in found} == {
        ("k\ufffd", "t", s.REFUSED, "key is not UTF-8"),
        ("c", "k\ufffd", s.REFUSED, "task is not UTF-8; kwargs is not UTF-8"),
    }


def test_where_receipts_cannot_be_written_nothing_is_sent(rows, tmp_path, sent):
    there = writer(rows.schema, receipts=str(tmp_path / "receipts"))
    # As on an executor that does not see the driver's disk.
    (tmp_path / "receipts").rmdir()
    with pytest.raises(OSError, match="a folder that the driver and all executors see"):
        there.write(iter(rows.toArrow().to_batches()))
    assert sent == []


@pytest.mark.parametrize(
    "uri", ["s3://lake/receipts", "s3a://lake/receipts", "S3N://lake/receipts"]
)
def test_receipts_go_to_s3_by_whichever_of_its_names(rows, monkeypatch, uri):
    made: list[str] = []
    system = SimpleNamespace(create_dir=made.append)
    known = SimpleNamespace(from_uri=lambda uri: (system, uri.lower()))
    monkeypatch.setattr("pyarrow.fs.FileSystem", known)
    writer(rows.schema, receipts=uri)
    assert made == ["s3://lake/receipts"]


class Moving(fs.LocalFileSystem):
    """A disk that fails to move a file so often."""

    def __init__(self, fails):
        super().__init__()
        self.fails = fails

    def move(self, src, dest):
        if self.fails.get(src, 0):
            self.fails[src] -= 1
            raise OSError(f"{src} cannot be moved now")
        super().move(src, dest)


@pytest.mark.parametrize(("times", "moved"), [(1, 3), (2, 2)])
def test_a_commit_that_fails_half_way_leaves_nothing_hidden(rows, tmp_path, sent, times, moved):
    there = writer(rows.schema, receipts=str(tmp_path))
    written = [there.write(iter([])) for _ in range(3)]
    there._system = Moving({written[1].path: times})  # noqa: SLF001 - in place of a disk
    if moved == 3:
        there.commit(written)
    else:
        # As Spark does it.
        with pytest.raises(OSError, match="cannot be moved now"):
            there.commit(written)
        there.abort(written)
    assert [path.name[:5] for path in tmp_path.iterdir()] == ["part-"] * moved


def test_a_task_that_fails_leaves_no_receipts(rows, tmp_path, monkeypatch):
    def fails(_, batches):
        yield [Sent(next(next(batches)), 0, status=s.PUBLISHED)]
        raise OSError("the broker is away")

    monkeypatch.setattr(Sender, "send", fails)
    there = writer(rows.schema, receipts=str(tmp_path))
    with pytest.raises(OSError, match="the broker is away"):
        there.write(iter(rows.toArrow().to_batches()))
    assert list(tmp_path.iterdir()) == []
