"""The journal, as it was written by real connections, read as a table."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import amqp
import pyarrow as pa
import pytest
from click.testing import CliRunner
from kombu import Connection, Queue
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from kombu_binary_delay.cli import binary_delay
from kombu_binary_delay.spark import journal
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.audit import audit
from kombu_binary_delay.spark.journal import (
    FORMAT,
    JournalSource,
    _Stream,
    export_journal,
    read_journal,
)
from kombu_binary_delay.spark.send import Sender, Target
from kombu_binary_delay.wire import streams
from kombu_binary_delay.wire.mechanism import TRANSPORT
from tests.waits import PATIENCE, despite_a_slow_start, wait_until

STREAM = "kbd.v2.journal"


@contextmanager
def written(vhost, count, journal="stream"):
    """Wait in the end until so many events more are there: they are written without confirms."""
    before = vhost.waiting(STREAM).get(STREAM, 0)
    yield
    if journal == "stream":
        wait_until(lambda: vhost.waiting(STREAM).get(STREAM, 0) >= before + count)


@pytest.fixture
def write(vhost):
    def write(ids, journal="stream", countdown=1.0):
        # On the ladder with the fewest queues.
        target = Target(vhost.url, settings={"journal": journal, "radix": 2})
        app = target.application()
        app.conf.broker_transport = TRANSPORT
        with written(vhost, len(ids), journal), target.connection() as connection:
            producer = connection.Producer()
            for id_ in ids:
                app.send_task("t", task_id=id_, countdown=countdown, producer=producer)

    return write


def consume(vhost, count, journal="stream"):
    options = {"binary_delay": {"journal": journal}}
    with (
        written(vhost, count, journal),
        Connection(
            vhost.url, transport="kombu_binary_delay:Transport", transport_options=options
        ) as connection,
    ):
        queue = Queue("celery")(connection.default_channel)
        deadline = time.monotonic() + PATIENCE
        while count and time.monotonic() < deadline:
            if queue.get(no_ack=True) is not None:
                count -= 1
        assert count == 0


def test_what_a_batch_has_sent_is_few_messages_of_the_stream_and_each_of_its_events_is_read_once(
    spark, vhost, write, tmp_path, monkeypatch
):
    path = str(tmp_path / "journal")
    rows = [{"task": "t", "task_id": f"{n}", "countdown": 3600.0} for n in range(250)]
    target = Target(vhost.url, settings={"journal": "stream", "radix": 2})
    list(Sender(target).send([pa.RecordBatch.from_pylist(rows)]))
    export_journal(spark, vhost.url, path)
    write(["later"], countdown=3600.0)
    export_journal(spark, vhost.url, path)
    with monkeypatch.context() as at_once:
        at_once.setattr(journal, "_last", lambda *_: {"start": "1"})
        export_journal(spark, vhost.url, path)
    for where in (path, vhost.url):
        events = read_journal(spark, where).where(F.col("event") == s.SCHEDULED).collect()
        assert sorted(row.task_id for row in events) == sorted([*map(str, range(250)), "later"])
        assert len({row.offset for row in events}) < 10


@pytest.mark.usefixtures("local_times")
def test_the_stream_is_read_with_all_its_events(spark, vhost, write):
    write([f"{n}" for n in range(50)])
    consume(vhost, 50)
    journal = read_journal(spark, vhost.url)
    rows = journal.collect()
    assert Counter(row.event for row in rows) == {s.SCHEDULED: 50, s.RELEASED: 50}
    assert sorted(row.offset for row in rows) == list(range(100))
    assert {(row.task, row.queue, row.retries) for row in rows} == {("t", "celery", 0)}
    at = {(row.event, row.task_id): row for row in rows}
    for n in range(50):
        scheduled, released = at[s.SCHEDULED, f"{n}"], at[s.RELEASED, f"{n}"]
        assert scheduled.at <= released.at
        assert scheduled.due == released.due <= released.at


def test_what_is_due_when_sent_is_told_of_so_that_an_audit_can_judge_it(spark, vhost, write):
    write(["one", "two"], countdown=-0.5)
    consume(vhost, 1)
    # No worker executes it: without the name of a task, the audit does not expect that.
    journal = read_journal(spark, vhost.url).withColumn("task", F.lit(None).cast("string"))
    later = datetime.now(UTC) + timedelta(hours=1)
    whenever = 3600.0  # how late it is depends on the machine
    rows = audit(None, journal, late_after=whenever).collect()
    assert {row.task_id: row.verdict for row in rows} == {"one": s.OK, "two": s.STILL_WAITING}
    assert {row.hops for row in rows} == {0}
    rows = audit(None, journal, until=later, late_after=whenever).collect()
    assert {row.task_id: row.verdict for row in rows} == {"one": s.OK, "two": s.LOST_AFTER_RELEASE}


def test_a_stream_nobody_has_written_to_is_empty(spark, vhost):
    assert read_journal(spark, vhost.url).count() == 0


def exported(spark, path):
    """Return the offsets of the events of a table, and how many exports it is of."""
    rows = read_journal(spark, str(path)).collect()
    events = [row for row in rows if row.event != s.COMPLETE]
    return sorted(row.offset for row in events), len(rows) - len(events)


def test_an_export_adds_what_is_new_and_nothing_twice(spark, vhost, write, tmp_path):
    path = str(tmp_path / "journal")
    write([f"a{n}" for n in range(10)], countdown=3600.0)
    export_journal(spark, vhost.url, path)
    write([f"b{n}" for n in range(15)], countdown=3600.0)
    export_journal(spark, vhost.url, path)
    export_journal(spark, vhost.url, path)
    assert exported(spark, path) == ([*range(25)], 3)


def test_an_export_says_until_when_the_journal_is_complete(spark, vhost, write, tmp_path):
    path = str(tmp_path / "journal")
    # A broker that lost it: nothing tells of the time since.
    write(["gone"], countdown=0.5)
    patience = 1.0
    time.sleep(0.5 + patience)
    export_journal(spark, vhost.url, path)
    [row] = audit(None, read_journal(spark, path), patience=patience).collect()
    assert row.verdict == s.LOST_IN_THE_LADDER


def test_exports_at_once_leave_each_others_files_and_are_read_once(
    spark, vhost, write, tmp_path, monkeypatch
):
    path = tmp_path / "journal"
    # As Hadoop's committer does it: a task that is done, of an export that is not.
    theirs = path / "_temporary" / "0" / "task_0_m_0" / "part-0.parquet"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    write([f"a{n}" for n in range(10)], countdown=3600.0)
    export_journal(spark, vhost.url, str(path))
    monkeypatch.setattr(journal, "_last", lambda *_: {"start": "4"})
    export_journal(spark, vhost.url, str(path))
    assert theirs.exists()
    assert exported(spark, path) == ([*range(10)], 2)


def test_local_files_are_read_as_the_stream_is(spark, vhost, write, tmp_path):
    folder = str(tmp_path / "files")
    write(["one"], journal=folder)
    consume(vhost, 1, journal=folder)
    rows = read_journal(spark, folder).orderBy("at").collect()
    assert [(row.event, row.task_id, row.queue) for row in rows] == [
        (s.SCHEDULED, "one", "celery"),
        (s.RELEASED, "one", "celery"),
    ]


def test_a_time_before_1900_or_after_9999_is_null_since_spark_and_python_may_refuse_it(
    spark, vhost, write, tmp_path
):
    write(["a"], countdown=3600.0)
    year_1, year_10000 = -62_135_596_800_000_000, 253_402_300_800_000_000
    known = {"event": s.SCHEDULED, "at": 0}
    dues = {
        "sooner": year_1,
        "last": year_10000 - 1,
        "later": year_10000,
        "far": 10**18,
        "most": 2**63 - 1,
    }
    events = [json.dumps({**known, "id": name, "due": due}) for name, due in dues.items()]
    with vhost.connect() as connection:
        channel = connection.channel()
        channel.confirm_select()
        for event in events:
            channel.basic_publish_confirm(amqp.Message(event), "", "kbd.v2.journal")
    files, path = tmp_path / "files", str(tmp_path / "journal")
    files.mkdir()
    (files / "journal-1.jsonl").write_text("".join(f"{event}\n" for event in events))
    mode = "spark.sql.parquet.int96RebaseModeInWrite"
    before = spark.conf.get(mode)
    try:
        spark.conf.set(mode, "EXCEPTION")  # the default of PySpark 3.5
        export_journal(spark, vhost.url, path)
    finally:
        spark.conf.set(mode, before)
    for where in (str(files), path):
        rows = read_journal(spark, where).where("task_id <> 'a'").collect()
        years = {row.task_id: (row.at.year, row.due and row.due.year) for row in rows}
        assert years == {name: (1970, 9999 if name == "last" else None) for name in dues}


@pytest.fixture
def read_on(spark, vhost, tmp_path):
    """Write what a stream has got since the last call to a table, by a checkpoint."""
    spark.dataSource.register(JournalSource)

    def read_on(name, **options):
        writing = (
            spark.readStream.format(FORMAT)
            .options(broker=vhost.url, **options)
            .load()
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / f"{name}-checkpoint"))
            .trigger(availableNow=True)
        )

        def run():
            query = writing.start(str(tmp_path / name))
            query.awaitTermination()
            return query

        return despite_a_slow_start(run)

    return read_on


def offsets(spark, path):
    """Return the offsets that a stream has written, by the log of its sink."""
    return sorted(row.offset for row in spark.read.parquet(str(path)).collect())


def test_a_stream_is_read_on_and_can_be_read_again(spark, write, read_on, tmp_path):
    write([f"a{n}" for n in range(10)], countdown=3600.0)
    read_on("first")
    assert offsets(spark, tmp_path / "first") == list(range(10))
    write([f"b{n}" for n in range(15)], countdown=3600.0)
    read_on("first")
    read_on("second")
    assert offsets(spark, tmp_path / "first") == list(range(25))
    assert offsets(spark, tmp_path / "second") == list(range(25))


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(journal, "_LimitedStreamReader"), reason="PySpark limits micro-batches from 4.2 on"
)
def test_a_query_that_dies_in_the_middle_loses_nothing_and_writes_nothing_twice(
    spark, write, read_on, tmp_path
):
    write([f"{n}" for n in range(25)], countdown=3600.0)
    query = read_on("table", maxOffsetsPerTrigger="10")
    assert [
        progress.numInputRows for progress in query.recentProgress if progress.numInputRows
    ] == [10, 10, 5]
    write([f"more {n}" for n in range(12)], countdown=3600.0)
    checkpoint, table = tmp_path / "table-checkpoint", tmp_path / "table"
    for folder in (checkpoint, table):
        shutil.copytree(folder, tmp_path / "kept" / folder.name)
    commit, batch = checkpoint / "commits", table / "_spark_metadata"
    # What a driver leaves that was killed in its third micro-batch: before the commit, or before
    # the sink had written it.
    for missing in ([commit], [commit, batch]):
        for folder in (checkpoint, table):
            shutil.rmtree(folder)
            shutil.copytree(tmp_path / "kept" / folder.name, folder)
        for folder in missing:
            (folder / "2").unlink()
            (folder / ".2.crc").unlink(missing_ok=True)
        read_on("table", maxOffsetsPerTrigger="10")
        assert offsets(spark, table) == list(range(37)), missing


@pytest.fixture
def drop(vhost):
    """A stream with ten events, and a function that adds others until these are dropped."""
    numbers = itertools.count()
    with vhost.connect() as connection:
        channel = connection.channel()
        small = {"x-stream-max-segment-size-bytes": 20_000, "x-max-length-bytes": 40_000}
        kind = {"x-queue-type": "stream", **small}
        channel.queue_declare("kbd.v2.journal", durable=True, auto_delete=False, arguments=kind)
        channel.confirm_select()

        def write(count):
            for number in itertools.islice(numbers, count):
                event = json.dumps({"event": s.SCHEDULED, "id": "i" * 500, "hops": number})
                channel.basic_publish_confirm(amqp.Message(event), "", "kbd.v2.journal")

        def drop():
            deadline = time.monotonic() + PATIENCE
            before = 0
            while (first := _Stream({"broker": vhost.url}).start()) <= 11 or first != before:
                assert time.monotonic() < deadline
                if first <= 11:
                    write(100)
                else:
                    # More may still be dropped.
                    time.sleep(1)
                before = first
            return first, next(numbers)

        write(10)
        yield drop


@pytest.mark.slow
def test_a_stream_that_has_dropped_what_was_not_read_ends_the_query(spark, drop, read_on, tmp_path):
    read_on("table")
    first, count = drop()
    with pytest.raises(Exception, match=f"was read up to the offset 10, and begins at {first} now"):
        read_on("table")
    assert offsets(spark, tmp_path / "table") == list(range(10))
    read_on("table", failOnDataLoss="false")
    read = sorted(row.hops for row in spark.read.parquet(str(tmp_path / "table")).collect())
    # Not by offsets: RabbitMQ uses some itself, one for each segment of the stream.
    assert read == [*range(10), *range(read[10], count)]
    assert read[10] > 10


@pytest.mark.slow
def test_an_export_after_events_that_the_stream_has_dropped_is_refused(
    spark, vhost, drop, tmp_path
):
    path = tmp_path / "journal"
    export_journal(spark, vhost.url, str(path))
    first, _ = drop()
    arguments = ["spark", "journal-export", "--broker", vhost.url, "--output"]
    refused = CliRunner().invoke(binary_delay, [*arguments, str(path)])
    assert refused.exit_code == 2, refused.output
    assert f"up to the offset 10, and begins at {first} now" in refused.output
    assert "export to another table" in refused.output
    assert exported(spark, path) == ([*range(10)], 1)
    done = CliRunner().invoke(binary_delay, [*arguments, str(tmp_path / "another")])
    assert done.exit_code == 0, done.output


def test_what_is_dropped_between_the_plan_and_the_read_is_no_silent_loss(monkeypatch):
    def pages(_, begin, **__):
        yield [SimpleNamespace(offset=begin + number, body="{}") for number in (3, 4)]

    monkeypatch.setattr(_Stream, "_pages", pages)
    monkeypatch.setattr(_Stream, "start", lambda _: 3)
    with pytest.raises(RuntimeError, match="up to the offset 0, and begins at 3"):
        list(_Stream({"broker": "amqp://nobody//"}, may_lose=False).rows(0, 5))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger must be a whole number .* got '0'"),
        ({"maxOffsetsPerTrigger": "ten"}, "maxOffsetsPerTrigger must be a whole .* got 'ten'"),
        ({"failOnDataLoss": "perhaps"}, "failOnDataLoss must be true or false, got 'perhaps'"),
    ],
)
def test_options_of_a_stream_that_cannot_be_are_refused(options, words):
    lowered = {name.lower(): value for name, value in options.items()}
    source = JournalSource({"broker": "amqp://nobody//", **lowered})
    with pytest.raises(ValueError, match=words):
        source.streamReader(StructType())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partitions": "0"}, "partitions must be a whole number of at least 1, got '0'"),
        ({"partitions": "-1"}, "partitions must be a whole number of at least 1, got '-1'"),
        ({"partitions": "all"}, "partitions must be a whole number of at least 1, got 'all'"),
        ({"start": "first"}, "start must be a whole number of at least 0, got 'first'"),
    ],
)
def test_options_of_a_batch_read_that_cannot_be_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        JournalSource({"broker": "amqp://nobody//", **options}).reader(StructType())


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        ("silent", "has given nothing for long before the offset 5"),
        ("deleted", "has been deleted, or its node has stopped, since the read began"),
        ("missing", "has given nothing for long before the offset 5"),
    ],
)
def test_a_stream_that_is_deleted_or_silent_while_it_is_read_is_named(
    vhost, write, monkeypatch, happens, words
):
    if happens != "missing":
        write(["a", "b", "c"], countdown=3600.0)
    if happens == "silent":
        monkeypatch.setattr(streams, "PATIENCE", 10.0)
    rows = _Stream({"broker": vhost.url}).rows(0, 5)
    if happens != "missing":
        next(rows)
    if happens == "deleted":
        with vhost.connect() as connection:
            connection.channel().queue_delete(STREAM)
    with pytest.raises(RuntimeError, match=f"the stream .* {words}"):
        list(rows)


def test_an_end_is_found_though_events_keep_coming(vhost, write):
    write(["a", "b"], countdown=3600.0)
    over = threading.Event()

    def write_on():
        with vhost.connect() as connection:
            channel = connection.channel()
            while not over.is_set():
                channel.basic_publish(amqp.Message("{}"), "", "kbd.v2.journal")
                time.sleep(0.05)

    with ThreadPoolExecutor() as pool:
        writing = pool.submit(write_on)
        try:
            assert pool.submit(_Stream({"broker": vhost.url}).end).result(timeout=PATIENCE) >= 2
        finally:
            over.set()
        writing.result()


def test_what_is_no_event_is_left_out_and_warned_of_once(vhost, write, caplog):
    write(["a"], countdown=3600.0)
    bodies = ["no JSON", "[]", "7", b"\xff", '{"retries": "3"}', '{"due": "1"}', '{"id": {}}']
    bodies += [json.dumps({"retries": 2**40}), json.dumps({"due": []}), '{"id": "\\ud800"}']
    with vhost.connect() as connection:
        channel = connection.channel()
        channel.confirm_select()
        for body in [*bodies, "{}"]:
            channel.basic_publish_confirm(amqp.Message(body), "", "kbd.v2.journal")
    write(["b"], countdown=3600.0)
    stream = _Stream({"broker": vhost.url})
    end = stream.end()
    assert end == len(bodies) + 3
    rows = [row for batch in stream.rows(0, end) for row in batch.to_pylist()]
    events = [(row["offset"], row["task_id"]) for row in rows]
    assert events == [(0, "a"), (end - 2, None), (end - 1, "b")]
    assert caplog.text.count("the event at the offset 1 of the stream kbd.v2.journal") == 1
    assert caplog.text.count("cannot be read") == 1


@pytest.mark.parametrize(
    ("start", "first", "end", "said"),
    [
        (0, 0, 0, ""),
        (0, 0, 10, ""),
        (0, 5, 10, "was read up to the offset 0, and begins at 5 now"),
        (5, 5, 10, ""),
        (10, 0, 10, ""),
        (10, 11, 20, ""),
        (5, 7, 10, "was read up to the offset 5, and begins at 7 now"),
        (10, 12, 20, "was read up to the offset 10, and begins at 12 now"),
        (1, 0, 0, "was read up to the offset 1, and now ends at 0"),
        (11, 0, 10, "was read up to the offset 11, and now ends at 10"),
    ],
)
def test_who_reads_on_is_told_where_the_offsets_do_not_fit(
    monkeypatch, caplog, start, first, end, said
):
    monkeypatch.setattr(_Stream, "start", lambda _: first)
    monkeypatch.setattr(_Stream, "end", lambda _: end)
    options = {"broker": "amqp://nobody//", "start": f"{start}"}
    offsets = {"offset": start}, {"offset": end}

    def stream(**more):
        source = JournalSource({**options, **more})
        return source.streamReader(StructType()).partitions(*offsets)

    def batch(**more):
        return JournalSource({**options, **more}).reader(StructType()).partitions()

    for partitions, lossless in (
        (batch, start > 0),
        (lambda: batch(failondataloss="false"), False),
        (stream, True),
        (lambda: stream(failondataloss="false"), False),
    ):
        caplog.clear()
        if "now ends" in said or ("begins at" in said and lossless):
            with pytest.raises(RuntimeError, match=said) as refusal:
                partitions()
            advice = "go on with another table, or another checkpoint", "export to another table"
            assert any(words in str(refusal.value) for words in advice)
        else:
            [partition] = partitions()
            low, high = partition.value
            assert range(low, high) == range(max(start, first), end)
            # What begins at 0 begins wherever the stream begins.
            assert (said in caplog.text) if said and start else not caplog.text


def test_a_large_micro_batch_is_read_by_several_spark_tasks(monkeypatch):
    monkeypatch.setattr(_Stream, "start", lambda _: 0)
    reader = JournalSource({"broker": "amqp://nobody//"}).streamReader(StructType())
    parts = [partition.value for partition in reader.partitions({"offset": 7}, {"offset": 120_000})]
    assert parts == [(7, 50_007), (50_007, 100_007), (100_007, 120_000)]


def test_a_look_that_sees_less_than_was_read_is_no_offset_that_spark_would_keep(monkeypatch):
    stream = {"end": 5}
    monkeypatch.setattr(_Stream, "start", lambda _: 0)
    monkeypatch.setattr(_Stream, "end", lambda _: stream["end"])
    monkeypatch.setattr(_Stream, "event", lambda _, offset: f"event {offset}")
    monkeypatch.setattr(_Stream, "_may_have", lambda _, offset, event: event == f"event {offset}")
    reader = JournalSource({"broker": "amqp://nobody//"}).streamReader(StructType())

    def latest(before):
        if not hasattr(journal, "_LimitedStreamReader"):
            return reader.latestOffset()  # type: ignore[call-arg]
        from pyspark.sql.streaming.datasource import ReadAllAvailable  # noqa: PLC0415 - since 4.2

        return reader.latestOffset(before, ReadAllAvailable())

    read = latest({"offset": 0, "last": None})
    assert read == {"offset": 5, "last": "event 4"} == latest(read)
    stream["end"] = 4
    with pytest.raises(RuntimeError, match="was read up to the offset 5, and now ends at 4"):
        latest(read)
    stream["end"] = 7
    assert latest(read) == {"offset": 7, "last": "event 6"}


def without_ids(vhost, count):
    """Write the events of plain messages, as Kombu publishes them."""
    options = {"binary_delay": {"journal": "stream"}}
    url, door = vhost.url, "kombu_binary_delay:Transport"
    with (
        written(vhost, count),
        Connection(url, transport=door, transport_options=options) as connection,
    ):
        for _ in range(count):
            headers = {"x-delay": 3_600_000}
            connection.Producer().publish("x", routing_key="celery", headers=headers)


@pytest.mark.parametrize(
    "named",
    [
        pytest.param(True, id="tasks"),
        pytest.param(False, id="messages without ids", marks=pytest.mark.slow),
    ],
)
def test_an_export_of_a_stream_that_was_made_anew_is_refused(spark, vhost, write, tmp_path, named):
    def happen(begin, count):
        if named:
            write([f"{begin}{n}" for n in range(count)], countdown=3600.0)
        else:
            without_ids(vhost, count)

    path = str(tmp_path / "journal")
    happen("a", 3)
    export_journal(spark, vhost.url, path)
    export_journal(spark, vhost.url, path)
    time.sleep(1.1)  # of an event without an id, the second tells
    with vhost.connect() as connection:
        connection.channel().queue_delete("kbd.v2.journal")
    # Where it ends has nothing to do with ids.
    shorter = [(1, "ends at 1")] if named else []
    for count, now in (*shorter, (5, "has another event at 2")):
        happen("b", count)
        with pytest.raises(Exception, match=f"was read up to the offset 3, and now {now}"):
            export_journal(spark, vhost.url, path)
    assert exported(spark, path) == ([*range(3)], 2)


@pytest.mark.slow
def test_a_query_whose_stream_was_made_anew_ends(spark, vhost, write, read_on, tmp_path):
    write(["a0", "a1", "a2"], countdown=3600.0)
    for table in ("shorter", "longer"):
        read_on(table)
    with vhost.connect() as connection:
        connection.channel().queue_delete("kbd.v2.journal")
    for table, count, now in (("shorter", 1, "ends at 1"), ("longer", 5, "has another event at 2")):
        write([f"b{n}" for n in range(count)], countdown=3600.0)
        with pytest.raises(Exception, match=f"was read up to the offset 3, and now {now}"):
            read_on(table)
        assert offsets(spark, tmp_path / table) == [0, 1, 2]


def test_without_a_broker_the_source_is_refused(spark, vhost):
    spark.dataSource.register(JournalSource)
    with pytest.raises(Exception, match="needs the option broker"):
        spark.read.format(FORMAT).load().count()
