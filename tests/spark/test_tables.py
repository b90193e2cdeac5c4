"""Tables by path and by name, in catalogues of several kinds: Spark's own, a database, and one that
does what Spark asks of a table format, as Delta Lake and Iceberg do.
"""

from __future__ import annotations

import csv
import io
import json
import math
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.types import TimestampType

from kombu_binary_delay import Ladder
from kombu_binary_delay.cli import binary_delay
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.journal import export_journal, read_journal
from kombu_binary_delay.spark.prepare import prepare
from kombu_binary_delay.spark.publish import _forget_failed, _reject, publish
from kombu_binary_delay.spark.tables import (
    _SHARED,
    Place,
    append,
    existing,
    merge,
    overwrite,
    read,
    stage,
)
from kombu_binary_delay.spark.versions import (
    HAS_SOURCES,
    HAS_STREAM_SINKS,
    DataSource,
    DataSourceReader,
)

SOURCE = Path(__file__).with_name("catalogue") / "MemoryCatalog.scala"
SOON = datetime.now(UTC) + timedelta(days=1)
#: As Spark gives it back: to the microsecond, and without its time zone.
DUE = SOON.replace(microsecond=678901, tzinfo=None)
ROWS = "key string, task string, eta timestamp, exchange string, routing_key string"
MEMORY = {"": "tests.MemoryCatalog"}
#: What Spark is told of each catalogue. Derby, a database in Java, comes with Spark.
CATALOGUES = {
    "merging": {**MEMORY, ".sorts": "key"},
    "plain": {**MEMORY, ".merges": "false"},
    "derby": {
        "": "org.apache.spark.sql.execution.datasources.v2.jdbc.JDBCTableCatalog",
        ".url": "jdbc:derby:memory:lake;create=true",
        ".driver": "org.apache.derby.jdbc.EmbeddedDriver",
        # Derby cannot compare the type that Spark makes of strings, so Spark has to.
        ".pushDownPredicate": "false",
        ".pushDownAggregate": "false",
    },
}


@pytest.fixture(scope="module")
def lakes(spark, tmp_path_factory):
    """The schemas with tables: of each catalogue, and of Spark's own."""
    classes = tmp_path_factory.mktemp("classes")
    context = spark.sparkContext
    jvm = context._jvm  # noqa: SLF001 - there is no other way to Java
    # The compiler is among Spark's own jars.
    words = ["-usejavacp", "-d", str(classes), str(SOURCE)]
    argv = context._gateway.new_array(jvm.java.lang.String, len(words))  # noqa: SLF001 - the same
    for at, word in enumerate(words):
        argv[at] = word
    assert jvm.scala.tools.nsc.Main.process(argv)
    # Tasks load classes from there as well.
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    loader.addURL(jvm.java.io.File(f"{classes}/").toURI().toURL())
    jvm.java.lang.System.setProperty("derby.stream.error.file", str(classes / "derby.log"))
    for name, settings in CATALOGUES.items():
        for setting, value in settings.items():
            spark.conf.set(f"spark.sql.catalog.{name}{setting}", value)
    for schema in ("derby.lake", "lake"):
        spark.sql(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    return {"spark": "lake", **{name: f"{name}.lake" for name in CATALOGUES}}


@pytest.fixture
def tool(spark):
    def tool(*arguments):
        return CliRunner().invoke(binary_delay, ["spark", *map(str, arguments)])

    return tool


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("/lake/receipts", ("parquet", "/lake/receipts")),
        ("s3a://lake/receipts", ("parquet", "s3a://lake/receipts")),
        ("hdfs:///lake", ("parquet", "hdfs:///lake")),
        ("dbfs:/lake", ("parquet", "dbfs:/lake")),
        ("C:\\lake", ("parquet", "C:\\lake")),
        ("parquet:delta:x", ("parquet", "delta:x")),
        ("./delta:x", ("parquet", "./delta:x")),
        ("delta:s3://lake/receipts", ("delta", "s3://lake/receipts")),
        ("Iceberg:/lake", ("iceberg", "/lake")),
        ("table:main.lake.receipts", ("table", "main.lake.receipts")),
    ],
)
def test_a_text_says_where_a_table_is(text, place):
    assert Place.parse(text) == Place(*place)


def test_a_place_that_names_nothing_is_refused():
    with pytest.raises(ValueError, match="'delta:' names no table"):
        Place.parse("delta:")


@pytest.mark.parametrize(
    ("text", "beside"),
    [
        ("/lake/receipts/", "parquet:/lake/receipts-rejects"),
        ("delta:/lake/receipts", "delta:/lake/receipts-rejects"),
        ("table:lake.receipts", "table:lake.receipts_rejects"),
        ("table:lake.`my receipts`", "table:lake.`my receipts_rejects`"),
    ],
)
def test_a_table_beside_another_is_in_the_same_place(text, beside):
    assert str(Place.parse(text).beside("rejects")) == beside


class Reader(DataSourceReader):
    def __init__(self, path):
        self.path = path

    def read(self, partition):
        yield ("a", self.path)


class Fake(DataSource):
    """A format that is not among Spark's jars, under the name of one that people have."""

    @classmethod
    def name(cls):
        return "hudi"

    def schema(self):
        return "key string, path string"

    def reader(self, schema):
        return Reader(self.options["path"])


@pytest.mark.skipif(not HAS_SOURCES, reason="PySpark 3.5 has no sources in Python")
def test_a_format_is_a_word_that_goes_to_spark(spark):
    spark.dataSource.register(Fake)
    [row] = read(spark, "hudi:/lake/x", "key string, path string, more int").collect()
    assert tuple(row) == ("a", "/lake/x", None)


@pytest.mark.parametrize("form", ["parquet", "orc"])
def test_a_table_of_files_keeps_what_was_written(spark, tmp_path, form):
    place = f"{form}:{tmp_path}/receipts"
    assert existing(spark, place, s.RECEIPTS) is None
    row = ("j", "k", "i", "t", "q", DUE, DUE, 1, 0, 0, s.PUBLISHED, None, None)
    rows = spark.createDataFrame([row], s.RECEIPTS)
    append(rows, place)
    append(rows, place)
    assert [tuple(each) for each in read(spark, place, s.RECEIPTS).collect()] == [row, row]
    assert merge(rows, place, ["job_id", "key"]) is False
    assert read(spark, place).count() == 2


@pytest.mark.parametrize("form", ["csv", "json"])
def test_what_keeps_no_types_is_read_and_not_written(spark, tmp_path, form):
    place = f"{form}:{tmp_path}/rows"
    rows = spark.createDataFrame([("a", 1.5)], "key string, countdown double")
    with pytest.raises(ValueError, match=f"is for input only: {form} keeps no types"):
        append(rows, place)
    rows.write.format(form).option("header", "true").save(f"{tmp_path}/rows")
    found = read(spark, place).select("key", "countdown").collect()
    assert [tuple(row) for row in found] == [("a", "1.5")]


def test_a_row_of_json_that_is_cut_off_is_not_missed_in_silence(spark, tmp_path):
    (tmp_path / "rows.json").write_text('{"key": "a"}\n{"key": "b')
    with pytest.raises((PySparkException, Py4JJavaError), match=r"rows\.json|Malformed"):
        read(spark, f"json:{tmp_path}", "key string").collect()


#: Rows of one file, and what is published of each, or why it is not.
WRITTEN = {
    ("007", '[1, "a, \\"b\\"", "\\\\"]', '{"a": 1}', "0042", "60", None): (60.0, None, None),
    ("b", None, '{"b": 2}', None, None, "2030-01-31T12:00:00Z"): (None, 1_896_091_200, None),
    ("c", None, None, None, "30d", None): (
        math.nan,
        None,
        "countdown is not a number of seconds",
    ),
    ("d", None, None, None, None, "31.01.2030"): (None, None, "eta is not a time"),
}
NAMES = ("Key", "args", "kwargs", "queue", "countdown", "eta", "task", "expires")


def to_csv(rows):
    text = io.StringIO()
    csv.writer(text).writerows([NAMES, *rows])
    return text.getvalue()


def to_json(rows):
    """Arguments as JSON itself, and no names of what a row has not."""
    lines = []
    for row in rows:
        given = {name: each for name, each in zip(NAMES, row, strict=True) if each is not None}
        given |= {each: json.loads(given[each]) for each in ("args", "kwargs") if each in given}
        lines.append(json.dumps(given))
    return "\n".join(lines)


@pytest.mark.parametrize(("form", "text"), [("csv", to_csv), ("json", to_json)])
def test_values_in_text_files_are_taken_as_they_are_written(spark, tmp_path, form, text):
    (tmp_path / "rows").write_text(text((*row, "t", None) for row in WRITTEN))
    rows = read(spark, f"{form}:{tmp_path}/rows")
    found = prepare(rows, job_id="j", ladder=Ladder.default()).orderBy("key").collect()
    for row, (given, expected) in zip(found, WRITTEN.items(), strict=True):
        countdown, eta, reason = expected
        key, args, kwargs, queue, *_ = given
        assert (row.key, row.queue, row.reason) == (key, queue, reason)
        # PySpark 3.5 leaves out the blanks of JSON.
        for found_text, text_of_it in ((row.args, args), (row.kwargs, kwargs)):
            assert (found_text and json.loads(found_text)) == (
                text_of_it and json.loads(text_of_it)
            )
        assert str(row.countdown) == str(countdown)
        if reason is None:
            assert (row.eta, row.expires) == (eta and eta * 1_000_000, None)


def test_a_csv_file_without_rows_is_read_as_none(spark, tmp_path):
    (tmp_path / "rows.csv").write_text("key,task,action,eta,expires\n")
    rows = read(spark, f"csv:{tmp_path}/rows.csv")
    assert prepare(rows, job_id="j", ladder=Ladder.default()).count() == 0


def test_a_csv_row_of_too_few_or_too_many_cells_is_rejected_with_its_text(spark, tmp_path):
    lines = ("key,task,queue,countdown,", "a,t,,60,", "b,t,", "c,t,q,60,,", "d,t,q,60,more", "e,t")
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    rows = read(spark, f"csv:{tmp_path}/rows.csv")
    found = prepare(rows, job_id="j", ladder=Ladder.default()).collect()
    cut = [(None, f"the row cannot be read: {line}") for line in ("b,t,", "c,t,q,60,,", "e,t")]
    expected = [("a", None), ("d", None), *cut]
    assert Counter((row.key, row.reason) for row in found) == Counter(expected)
    # Spark must not leave out what says so, however little is asked for.
    assert {row.key for row in rows.select("key").collect()} == {"a", "d", None}
    with pytest.raises((PySparkException, Py4JJavaError), match="Malformed records are detected"):
        read(spark, f"csv:{tmp_path}/rows.csv", "key string").collect()


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        (["key,task", "Key,TASK"], None),
        (["key,task", "task,key"], "CSV header does not conform"),
        (["key,task", "key,task,eta"], "Number of column in CSV header is not equal"),
        (["key,task,", "key,task,"], "has several files, and their column 3 has no name: name it"),
    ],
)
def test_the_csv_files_of_a_folder_have_the_same_header_line(spark, tmp_path, headers, words):
    for name, header in zip("ab", headers, strict=True):
        cells = ["x"] * (header.count(",") + 1)
        (tmp_path / f"{name}.csv").write_text(f"{header}\n{','.join(cells)}\n")

    def rows():
        return [tuple(row) for row in read(spark, f"csv:{tmp_path}").select("key").collect()]

    if words is None:
        assert rows() == [("x",)] * 2
    else:
        with pytest.raises((PySparkException, Py4JJavaError, ValueError), match=f"(?s){words}"):
            rows()


def test_columns_of_csv_are_matched_by_name_where_a_schema_is_given(spark, tmp_path):
    (tmp_path / "rows.csv").write_text("retries,task_id,due\n2,007,2026-07-01T12:00:00Z\n")
    columns = "job_id string, task_id string, retries int, due timestamp"
    [row] = read(spark, f"csv:{tmp_path}/rows.csv", columns).collect()
    assert (row.job_id, row.task_id, row.retries) == (None, "007", 2)
    assert row.due.timestamp() == datetime(2026, 7, 1, 12, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("name", ["spark", *CATALOGUES])
def test_a_table_in_a_catalogue_is_made_and_filled_and_replaced(spark, lakes, name):
    place = f"table:{lakes[name]}.verdicts"
    columns = "task_id string, retries int, `partition` int, due timestamp, lateness double"
    assert existing(spark, place, "task_id string") is None
    old = spark.createDataFrame([("a", 0, 1, DUE, 0.5), ("b", 0, 1, DUE, None)], columns)
    append(old, place)
    # Their order may differ; a table may have more columns.
    append(
        old.where("task_id = 'b'").select("retries", "task_id", F.lit(2).alias("PARTITION")), place
    )
    rows = sorted((row.task_id, row.retries, row.partition) for row in read(spark, place).collect())
    assert rows == [("a", 0, 1), ("b", 0, 1), ("b", 0, 2)]
    overwrite(old, place)
    new = spark.createDataFrame([("b", 0, 3, DUE, 0.1), ("c", 1, 3, DUE, 0.2)], columns)
    can = merge(new, place, ["task_id", "retries"])
    assert can is (name == "merging")
    merged = [("a", 0, 1, DUE, 0.5), ("b", 0, 3, DUE, 0.1), ("c", 1, 3, DUE, 0.2)]
    expected = merged if can else [tuple(row) for row in old.collect()]
    assert sorted(map(tuple, read(spark, place).collect())) == expected
    with pytest.raises(ValueError, match="has no columns misdated: add them"):
        append(new.withColumn("misdated", F.lit(1)), place)


def interrupted(batches):
    """Yield some rows, and fail in the last task, when no other is writing."""
    for batch in batches:
        yield batch
        if batch["id"][0].as_py() >= 75:
            raise OSError("interrupted")


@pytest.mark.skipif(not HAS_STREAM_SINKS, reason="before PySpark 4.1, only Delta Lake does it")
def test_another_column_of_a_table_has_what_the_table_makes_of_it(spark, lakes):
    # As a generated one: a null is an error, and no value is none.
    name = f"{lakes['merging']}.by_tenant"
    spark.sql(f"CREATE TABLE {name} (Tenant string NOT NULL DEFAULT 'ours', Id bigint)")
    for write in (append, overwrite, append):
        write(spark.range(1), f"table:{name}")
    assert [tuple(row) for row in read(spark, f"table:{name}").collect()] == [("ours", 0)] * 2


def test_a_column_of_receipts_that_takes_no_null_is_refused_where_some_have_none(spark, lakes):
    name = f"{lakes['plain']}.strict"
    spark.sql(f"CREATE TABLE {name} (job_id string NOT NULL, Detail string NOT NULL)")
    with pytest.raises(ValueError, match="takes no null in detail, where some rows have one"):
        publish(
            spark.createDataFrame([("k", "t", SOON)], "key string, task string, eta timestamp"),
            job_id="j",
            receipts=f"table:{name}",
            broker="amqp://127.0.0.1:1",
        )


def test_rows_that_are_staged_where_the_driver_does_not_see_them_are_missed(
    spark, tmp_path, monkeypatch
):
    """As on executors of other hosts, each of which writes to a disk of its own."""
    rows = spark.range(10)
    writer = type(rows.write)
    write = writer.parquet

    def elsewhere(self, path):
        write(self, path)
        for file in Path(path).glob("part-*"):
            file.unlink()

    monkeypatch.setattr(writer, "parquet", elsewhere)
    with pytest.raises(ValueError, match=r"of 10 rows .*, 0 are there: name a place"):
        stage(rows, str(tmp_path / "receipts"), uuid4())


def test_another_column_that_must_have_a_value_is_refused_before_a_row_is_computed(spark, lakes):
    name = f"{lakes['plain']}.by_tenant"
    spark.sql(f"CREATE TABLE {name} (id bigint, tenant string NOT NULL)")
    rows = spark.range(100)
    rows = rows.mapInArrow(interrupted, rows.schema)
    for write in (append, overwrite):
        with pytest.raises(ValueError, match="not ours and take no null, tenant, and this Spark"):
            write(rows, f"table:{name}")


@pytest.mark.parametrize("name", ["spark", "derby"])
def test_rows_that_another_application_appends_are_read(spark, lakes, name):
    place = f"table:{lakes[name]}.followed"
    append(spark.range(3).withColumnRenamed("id", "n"), place)
    assert read(spark, place).count() == 3
    # Nobody tells this session of it.
    other = spark.newSession()
    for setting, value in CATALOGUES.get(name, {}).items():
        other.conf.set(f"spark.sql.catalog.{name}{setting}", value)
    append(other.range(2).withColumnRenamed("id", "n"), place)
    assert read(spark, place).count() == 5


@pytest.mark.parametrize("kind", ["parquet", "merging", "plain"])
def test_rows_stay_until_those_that_replace_them_are_stored(spark, lakes, tmp_path, kind):
    place = f"table:{lakes[kind]}.kept" if kind in lakes else f"{kind}:{tmp_path}/kept"
    old, new = (spark.range(rows, numPartitions=4) for rows in (3, 100))
    overwrite(old, place)
    # In PySpark 3.5, it comes as the gateway has it.
    with pytest.raises((PySparkException, Py4JJavaError), match="interrupted"):
        overwrite(new.mapInArrow(interrupted, new.schema), place)
    assert read(spark, place).count() == 3
    # Rows may be replaced by others that are made of them.
    overwrite(new.unionByName(read(spark, place)), place)
    assert read(spark, place).count() == 103
    assert {each.name for each in tmp_path.iterdir()} <= {"kept"}


@pytest.mark.parametrize("write", [append, overwrite])
@pytest.mark.parametrize("kind", ["parquet", "spark"])
def test_times_in_parquet_have_statistics_unless_the_session_wants_another_type(
    spark, lakes, tmp_path, write, kind
):
    files, setting = "*.parquet", "spark.sql.parquet.outputTimestampType"
    place, folder = f"parquet:{tmp_path}/timed", tmp_path / "timed"
    if kind == "spark":
        place = f"table:lake.timed_{write.__name__}"
        warehouse = spark.conf.get("spark.sql.warehouse.dir").removeprefix("file:")
        folder = Path(warehouse, "lake.db", f"timed_{write.__name__}")
    rows = spark.createDataFrame([(DUE,)], "due timestamp").coalesce(1)

    def has_statistics():
        found = [pq.read_metadata(file).row_group(0).column(0) for file in folder.glob(files)]
        return sorted(each.statistics.has_min_max for each in found)

    write(rows, place)
    assert has_statistics() == [True]
    assert spark.conf.get(setting, None) is None
    spark.conf.set(setting, "INT96")
    try:
        write(rows, place)
        assert spark.conf.get(setting) == "INT96"
    finally:
        spark.conf.unset(setting)
    assert has_statistics() == ([False, True] if write is append else [False])
    assert {row.due for row in read(spark, place).collect()} == {DUE}


def test_partitions_without_new_rows_are_replaced_as_well(spark, lakes):
    place, mode = "table:lake.parts", "spark.sql.sources.partitionOverwriteMode"
    options = ", ".join(f"'{name}' = '{value}'" for name, value in _SHARED.items())
    columns = "(n bigint, part string) USING parquet"
    spark.sql(f"CREATE TABLE lake.parts {columns} OPTIONS ({options}) PARTITIONED BY (part)")
    rows = spark.range(3).select(F.col("id").alias("n"), F.col("id").cast("string").alias("part"))
    overwrite(rows, place)
    spark.conf.set(mode, "dynamic")
    try:
        overwrite(rows.where("n = 1"), place)
        assert spark.conf.get(mode) == "dynamic"
    finally:
        spark.conf.unset(mode)
    assert [tuple(row) for row in read(spark, place).collect()] == [(1, "1")]


def test_jobs_that_append_to_one_table_of_sparks_catalogue_lose_nothing(spark, lakes):
    place = "table:lake.shared"
    rows = spark.range(100, numPartitions=4)

    def job():
        for _ in range(5):
            append(rows, place)

    jobs = [threading.Thread(target=job) for _ in range(3)]
    for each in jobs:
        each.start()
    for each in jobs:
        each.join()
    assert read(spark, place).count() == 3 * 5 * 100


def test_a_table_whose_jobs_would_hurt_each_other_is_refused_with_the_remedy(spark, lakes):
    spark.sql("CREATE TABLE lake.theirs (id bigint) USING parquet")
    rows = spark.range(10)
    with pytest.raises(ValueError, match=r"at the same time .* run once: ALTER") as refused:
        append(rows, "table:lake.theirs")
    spark.sql(str(refused.value).partition("run once: ")[2])
    append(rows, "table:lake.theirs")
    assert read(spark, "table:lake.theirs").count() == 10


@pytest.fixture
def logged(spark):
    """What Spark logs meanwhile, from warnings on."""
    jvm = spark.sparkContext._jvm  # noqa: SLF001 - there is no other way to its log
    log, text = jvm.org.apache.logging.log4j, jvm.java.io.StringWriter()
    create = log.core.appender.WriterAppender.createAppender
    appender = create(None, None, text, "logged", False, True)
    appender.start()
    root = log.LogManager.getRootLogger()
    root.addAppender(appender)
    spark.sparkContext.setLogLevel("WARN")
    yield text
    spark.sparkContext.setLogLevel("ERROR")
    root.removeAppender(appender)


def test_a_table_that_is_missing_is_no_traceback_in_sparks_log(spark, logged, tmp_path):
    table = Place("parquet", f"{tmp_path}/new")
    assert existing(spark, table, "id bigint") is None
    append(spark.range(3), table)
    found = existing(spark, table, "id bigint")
    assert found is not None
    assert found.count() == 3
    assert "FileNotFoundException" not in logged.toString()


@pytest.mark.usefixtures("local_times")
@pytest.mark.parametrize(("name", "shuffled"), [("spark", 0), ("merging", 1)])
def test_receipts_are_shuffled_only_for_tables_that_may_compute_them_twice(
    spark, lakes, name, shuffled, vhost, monkeypatch
):
    plans = []

    def seen(df, place):
        plan = df._jdf.queryExecution().logical()  # noqa: SLF001 - there is no other way to it
        plans.append(plan.toString())
        append(df, place)

    monkeypatch.setattr("kombu_binary_delay.spark.publish.append", seen)
    row = spark.createDataFrame([("k", "t", SOON, None, None)], ROWS)
    receipts = f"table:{lakes[name]}.shuffled"
    assert publish(row, job_id="j", receipts=receipts, broker=vhost.url).published == 1
    [plan] = plans
    # An executor that is lost while they are written takes what it has shuffled with it. The
    # messages are then sent again, with other receipts, for which Spark ends the job.
    assert plan.partition("MapInArrow")[0].count("Repartition") == shuffled
    # The table that it made has times as they are, whatever the session calls a timestamp.
    assert read(spark, receipts).schema["due"].dataType == TimestampType()


@pytest.mark.parametrize("name", ["merging", "derby"])
def test_the_pipeline_reads_and_writes_tables_in_a_catalogue(
    spark, tool, lakes, name, vhost, tmp_path
):
    lake = f"table:{lakes[name]}"
    rows: list[tuple[object, ...]] = [(f"k{n}", "t", SOON, None, None) for n in range(30)]
    # Due already, so the message goes straight to its exchange.
    past = SOON - timedelta(days=1, hours=1)
    rows += [("returned", "t", past, "amq.topic", "lonely"), (None, "t", SOON, None, None)]
    append(spark.createDataFrame(rows, ROWS), f"{lake}.reminders")
    job = ["--job-id", "j", "--receipts", f"{lake}.receipts", "--broker", vhost.url]
    job += ["--settings", '{"journal": "stream"}']
    result = tool("publish", f"{lake}.reminders", *job)
    assert "30 published" in result.output, result.output
    assert "1 failed, 0 remaining, 1 rejected" in result.output
    with vhost.connect() as connection:
        channel = connection.channel()
        channel.queue_declare("company")
        channel.queue_bind("company", "amq.topic", "lonely")
    result = tool("publish", f"{lake}.reminders", *job, "--resume")
    assert "1 published" in result.output, result.output
    receipts = read(spark, f"{lake}.receipts", s.RECEIPTS).collect()
    merges = name == "merging"
    # Where the table can, the receipt of the failure is replaced.
    statuses = Counter(row.status for row in receipts)
    assert statuses == {s.PUBLISHED: 31, **({} if merges else {s.RETURNED: 1})}
    assert len({row.key for row in receipts}) == 31
    rejects = read(spark, f"{lake}.receipts_rejects", s.REJECTS).collect()
    assert [row.reason for row in rejects] == ["the key is null"] * (1 if merges else 2)
    names = {row.tableName for row in spark.sql(f"SHOW TABLES IN {lakes[name]}").collect()}
    assert not {each for each in names if "staged" in each}
    # Each message was sent once, though the table sorts its rows.
    result = tool("journal-export", "--broker", vhost.url, "--output", f"{lake}.journal")
    assert result.exit_code == 0, result.output
    events = read_journal(spark, f"{lake}.journal").where(f"event = '{s.SCHEDULED}'")
    assert events.count() == 31 + 1
    assert {row.task_id for row in events.collect()} == {row.task_id for row in receipts}
    given = ["--receipts", f"{lake}.receipts", "--journal", f"{lake}.journal"]
    # How verdicts are replaced is shown of each catalogue above.
    outputs = ("first", "second") if merges else ("first",)
    for output in outputs:
        result = tool(
            "audit", *given, "--output", tmp_path / output, "--verdicts", f"{lake}.audited"
        )
        assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / outputs[-1] / "summary.json").read_text())
    assert summary["verdicts"][s.STILL_WAITING] == 31
    assert read(spark, f"{lake}.audited", s.VERDICTS).count() == 31
    page = tmp_path / "page.html"
    assert tool("report", f"{lake}.audited", "--output", page).exit_code == 0
    assert "<h1>" in page.read_text()
    result = tool("plan", f"{lake}.reminders", "--output", f"{lake}.plan", "--limit", "waiting=99")
    assert result.exit_code == 0, result.output
    assert read(spark, f"{lake}.plan").count() > 0


def test_only_failures_that_something_has_replaced_are_deleted(spark, lakes):
    place, day = f"table:{lakes['merging']}.tried", timedelta(days=1)
    rows = [
        ("again", s.PUBLISH, s.RETURNED, SOON),
        ("again", s.PUBLISH, s.PUBLISHED, SOON + day),
        ("worse", s.RESCHEDULE, s.RECORDED, SOON),
        ("worse", s.RESCHEDULE, s.REFUSED, SOON + day),
        ("twice", s.RESCHEDULE, s.REFUSED, SOON),
        ("twice", s.RESCHEDULE, s.NACKED, SOON + day),
        ("better", s.RESCHEDULE, s.REFUSED, SOON),
        ("better", s.RESCHEDULE, s.RECORDED, SOON + day),
    ]
    receipts = [
        ("j", key, key, "t", "mail", SOON, at, 1, 0, 0, status, None, action)
        for key, action, status, at in rows
    ]
    append(spark.createDataFrame(receipts, s.RECEIPTS), place)

    _forget_failed(spark, place, "j")

    left = read(spark, place, s.RECEIPTS).select("key", "status").collect()
    assert Counter(map(tuple, left)) == {
        ("again", s.PUBLISHED): 1,
        ("worse", s.RECORDED): 1,
        ("worse", s.REFUSED): 1,
        ("twice", s.NACKED): 1,
        ("better", s.RECORDED): 1,
    }


def test_a_job_goes_on_though_its_merges_lose_against_another_job(spark, lakes, caplog):
    rejects, receipts = (f"table:{lakes['merging']}.contested_{each}" for each in ("r", "t"))
    for run in range(2):
        _reject(spark.createDataFrame([("j", "k", "t", "bad", SOON)], s.REJECTS), rejects)
        status = (s.RETURNED, s.PUBLISHED)[run]
        receipt = ("j", "k", "k", "t", "mail", SOON, SOON, 1, 0, 0, status, None, s.PUBLISH)
        append(spark.createDataFrame([receipt], s.RECEIPTS), receipts)
    _forget_failed(spark, receipts, "j")

    assert [read(spark, each).count() for each in (rejects, receipts)] == [2, 2]
    assert [each.getMessage().count("another job has written") for each in caplog.records] == [
        1
    ] * 3


def test_events_of_two_exports_to_a_table_are_read_once(spark, lakes, vhost, monkeypatch):
    place = f"table:{lakes['spark']}.exported"
    rows = spark.createDataFrame([("a", "t", 60.0)], "key string, task string, countdown double")
    given = {"settings": {"journal": "stream"}, "broker": vhost.url}
    publish(rows, job_id="j", receipts=f"table:{lakes['spark']}.of_export", **given)
    export_journal(spark, vhost.url, place)
    export_journal(spark, vhost.url, place)
    # Each export also says until when the table is complete.
    is_event = "offset is not null"
    assert read(spark, place).where(is_event).count() == 1
    # As if they had run at the same time.
    monkeypatch.setattr("kombu_binary_delay.spark.journal._last", lambda *_: {})
    export_journal(spark, vhost.url, place)
    assert read(spark, place).where(is_event).count() == 2
    assert read_journal(spark, place).where(is_event).count() == 1
