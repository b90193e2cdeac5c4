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
from pyspark.sql.datasource import DataSource, DataSourceReader

from kombu_binary_delay import Ladder
from kombu_binary_delay.cli import binary_delay
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.journal import export_journal, read_journal
from kombu_binary_delay.spark.prepare import prepare
from kombu_binary_delay.spark.publish import publish
from kombu_binary_delay.spark.staging import Staging
from kombu_binary_delay.spark.tables import Place, append, existing, merge, overwrite, read

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).with_name("catalogue") / "MemoryCatalog.scala"
SOON = datetime.now(UTC) + timedelta(days=1)
#: As Spark gives it back: to the microsecond, and without its time zone.
DUE = SOON.replace(microsecond=678901, tzinfo=None)
ROWS = "key string, task string, eta timestamp, exchange string, routing_key string"
#: PySpark has an error of its own for some of Spark's, and gives the others as Java's.
SPARK_ERRORS = (PySparkException, Py4JJavaError)
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


#: Spark's own, and each of these, for which their classes are compiled or a database is started.
EVERY = ["spark", *(pytest.param(name, marks=pytest.mark.slow) for name in CATALOGUES)]


@pytest.fixture(scope="module")
def lake(spark):
    """A schema with tables, in Spark's own catalogue."""
    spark.sql("CREATE SCHEMA IF NOT EXISTS lake")
    return "lake"


@pytest.fixture(scope="module")
def catalogues(spark, tmp_path_factory):
    """All catalogues but Spark's own."""
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
    spark.sql("CREATE SCHEMA IF NOT EXISTS derby.lake")


@pytest.fixture
def schema(request, name):
    """A schema with tables, in the catalogue of this name."""
    if name == "spark":
        return request.getfixturevalue("lake")
    request.getfixturevalue("catalogues")
    return f"{name}.lake"


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
    assert [tuple(receipt) for receipt in read(spark, place, s.RECEIPTS).collect()] == [row, row]
    merge(rows, place, ["job_id", "key"])
    assert read(spark, place).count() == 1


@pytest.mark.parametrize("form", ["csv", "json"])
def test_what_keeps_no_types_is_read_and_not_written(spark, tmp_path, form):
    place = f"{form}:{tmp_path}/rows"
    rows = spark.createDataFrame([("a", 1.5)], "key string, countdown double")
    with pytest.raises(ValueError, match=f"is for input only: {form} keeps no types"):
        append(rows, place)
    rows.write.format(form).option("header", "true").save(f"{tmp_path}/rows")
    cells = read(spark, place).select("key", "countdown").collect()
    assert [tuple(row) for row in cells] == [("a", "1.5")]


def test_a_row_of_json_that_is_cut_off_is_not_missed_in_silence(spark, tmp_path):
    (tmp_path / "rows.json").write_text('{"key": "a", "task": "t", "countdown": 60}\n{"key": "b')
    rows = prepare(read(spark, f"json:{tmp_path}"), job_id="j", ladder=Ladder.default()).collect()
    assert 'the row cannot be read: {"key": "b' in [row.reason for row in rows]
    with pytest.raises(SPARK_ERRORS, match=r'(?s)rows\.json.*Malformed records .*\{"key": "b'):
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
        given = {name: value for name, value in zip(NAMES, row, strict=True) if value is not None}
        given |= {
            column: json.loads(given[column]) for column in ("args", "kwargs") if column in given
        }
        lines.append(json.dumps(given))
    return "\n".join(lines)


@pytest.mark.parametrize(("form", "text"), [("csv", to_csv), ("json", to_json)])
def test_values_in_text_files_are_taken_as_they_are_written(spark, tmp_path, form, text):
    (tmp_path / "rows").write_text(text((*row, "t", None) for row in WRITTEN))
    rows = read(spark, f"{form}:{tmp_path}/rows")
    prepared = prepare(rows, job_id="j", ladder=Ladder.default()).orderBy("key").collect()
    for row, (given, expected) in zip(prepared, WRITTEN.items(), strict=True):
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
    lines = ("key,task,queue,countdown,x", "a,t,,60,", "b,t,", "c,t,q,60,,", "d,t,q,60,more", "e,t")
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    rows = read(spark, f"csv:{tmp_path}/rows.csv")
    prepared = prepare(rows, job_id="j", ladder=Ladder.default()).collect()
    cut = [(None, f"the row cannot be read: {line}") for line in ("b,t,", "c,t,q,60,,", "e,t")]
    expected = [("a", None), ("d", None), *cut]
    assert Counter((row.key, row.reason) for row in prepared) == Counter(expected)
    # Spark must not leave out what says so, however little is asked for.
    assert {row.key for row in rows.select("key").collect()} == {"a", "d", None}
    with pytest.raises(SPARK_ERRORS, match=r"(?s)rows\.csv.*Malformed CSV record: b,t,"):
        read(spark, f"csv:{tmp_path}/rows.csv", "key string").collect()


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        (["key,task", "Key,TASK"], None),
        (["key,task", "task,key"], "CSV header does not conform"),
        (["key,task", "key,task,eta"], "Number of column in CSV header is not equal"),
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
        with pytest.raises(SPARK_ERRORS, match=rf"(?s){words}.*CSV file: \S+/[ab]\.csv"):
            rows()


def test_columns_of_csv_are_matched_by_name_where_a_schema_is_given(spark, tmp_path):
    (tmp_path / "rows.csv").write_text("retries,task_id,due\n2,007,2026-07-01T12:00:00Z\n")
    columns = "job_id string, task_id string, retries int, due timestamp"
    [row] = read(spark, f"csv:{tmp_path}/rows.csv", columns).collect()
    assert (row.job_id, row.task_id, row.retries) == (None, "007", 2)
    assert row.due.timestamp() == datetime(2026, 7, 1, 12, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("name", EVERY)
def test_a_table_in_a_catalogue_is_made_and_filled_and_replaced(spark, schema, name):
    place = f"table:{schema}.verdicts"
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
    if name in {"plain", "derby"}:
        return
    merge(new, place, ["task_id", "retries"])
    merged = [("a", 0, 1, DUE, 0.5), ("b", 0, 3, DUE, 0.1), ("c", 1, 3, DUE, 0.2)]
    # Plain files are overwritten.
    expected = merged if name == "merging" else merged[1:]
    assert sorted(map(tuple, read(spark, place).collect())) == expected
    with pytest.raises(ValueError, match="has no columns misdated"):
        append(new.withColumn("misdated", F.lit(1)), place)


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
    staging = Staging(spark, Place("parquet", str(tmp_path / "receipts")), uuid4(), 1.0)
    stored = staging.store(rows).count()
    with pytest.raises(ValueError, match=r"of 10 rows .*, 0 are there: name a place"):
        staging.check_stored(stored)


@pytest.mark.parametrize("name", [EVERY[0], EVERY[-1]])
def test_rows_that_another_application_appends_are_read(spark, schema, name):
    place = f"table:{schema}.followed"
    append(spark.range(3).withColumnRenamed("id", "n"), place)
    assert read(spark, place).count() == 3
    # Nobody tells this session of it.
    other = spark.newSession()
    for setting, value in CATALOGUES.get(name, {}).items():
        other.conf.set(f"spark.sql.catalog.{name}{setting}", value)
    append(other.range(2).withColumnRenamed("id", "n"), place)
    assert read(spark, place).count() == 5


@pytest.mark.parametrize("write", [append, overwrite])
@pytest.mark.parametrize("kind", ["parquet", "spark"])
def test_times_in_parquet_have_statistics_unless_the_session_wants_another_type(
    spark, lake, tmp_path, write, kind
):
    files, setting = "**/*.parquet", "spark.sql.parquet.outputTimestampType"
    place, folder = f"parquet:{tmp_path}/timed", tmp_path / "timed"
    if kind == "spark":
        place = f"table:lake.timed_{write.__name__}"
        warehouse = spark.conf.get("spark.sql.warehouse.dir").removeprefix("file:")
        folder = Path(warehouse, "lake.db", f"timed_{write.__name__}")
    rows = spark.createDataFrame([(DUE,)], "due timestamp").coalesce(1)

    def has_statistics():
        columns = [pq.read_metadata(file).row_group(0).column(0) for file in folder.glob(files)]
        return sorted(column.statistics.has_min_max for column in columns)

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


def test_jobs_that_append_to_one_folder_lose_nothing(spark, tmp_path):
    place = str(tmp_path / "shared")
    rows = spark.range(100, numPartitions=4)

    def job():
        for _ in range(5):
            append(rows, place)

    jobs = [threading.Thread(target=job) for _ in range(3)]
    for thread in jobs:
        thread.start()
    for thread in jobs:
        thread.join()
    assert read(spark, place).count() == 3 * 5 * 100


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
    existing_table = existing(spark, table, "id bigint")
    assert existing_table is not None
    assert existing_table.count() == 3
    assert "FileNotFoundException" not in logged.toString()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["merging", "derby"])
def test_the_pipeline_reads_and_writes_tables_in_a_catalogue(
    spark, tool, schema, name, vhost, tmp_path
):
    lake = f"table:{schema}"
    rows: list[tuple[object, ...]] = [(f"k{n}", "t", SOON, None, None) for n in range(30)]
    # Due already, so the message goes straight to its exchange.
    past = SOON - timedelta(days=1, hours=1)
    rows += [("returned", "t", past, "amq.topic", "lonely"), (None, "t", SOON, None, None)]
    append(spark.createDataFrame(rows, ROWS), f"{lake}.reminders")
    job = ["--job-id", "j", "--receipts", f"{lake}.receipts", "--broker", vhost.url]
    job += ["--settings", '{"journal": "stream", "radix": 2}']
    result = tool("publish", f"{lake}.reminders", *job)
    assert "30 published" in result.output, result.output
    assert "1 failed, 1 rejected" in result.output
    with vhost.connect() as connection:
        channel = connection.channel()
        channel.queue_declare("company")
        channel.queue_bind("company", "amq.topic", "lonely")
    result = tool("publish", f"{lake}.reminders", *job, "--resume")
    assert "1 published" in result.output, result.output
    receipts = read(spark, f"{lake}.receipts", s.RECEIPTS).collect()
    merges = name == "merging"
    statuses = Counter(row.status for row in receipts)
    assert statuses == {s.PUBLISHED: 31, s.RETURNED: 1}
    assert len({row.key for row in receipts}) == 31
    rejects = read(spark, f"{lake}.receipts_rejects", s.REJECTS).collect()
    assert [row.reason for row in rejects] == ["the key is null"] * 2
    names = {row.tableName for row in spark.sql(f"SHOW TABLES IN {schema}").collect()}
    assert not {table for table in names if "rows" in table or "lease" in table}
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
        kept = ["--verdicts", f"{lake}.audited"] if merges else []
        result = tool("audit", *given, "--output", tmp_path / output, *kept)
        assert result.exit_code == 3, result.output
    summary = json.loads((tmp_path / outputs[-1] / "summary.json").read_text())
    assert summary["verdicts"][s.STILL_WAITING] == 31
    if merges:
        assert read(spark, f"{lake}.audited", s.VERDICTS).count() == 31
        page = tmp_path / "page.html"
        assert tool("report", f"{lake}.audited", "--output", page).exit_code == 0
        assert "<h1>" in page.read_text()
    result = tool("plan", f"{lake}.reminders", "--output", f"{lake}.plan", "--limit", "waiting=99")
    assert result.exit_code == 0, result.output
    assert read(spark, f"{lake}.plan").count() > 0


def test_events_of_two_exports_to_a_table_are_read_once(spark, lake, vhost, monkeypatch):
    place = f"table:{lake}.exported"
    rows = spark.createDataFrame([("a", "t", 60.0)], "key string, task string, countdown double")
    given = {"settings": {"journal": "stream", "radix": 2}, "broker": vhost.url}
    publish(rows, job_id="j", receipts=f"table:{lake}.of_export", **given)
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
