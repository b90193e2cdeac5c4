"""From a DataFrame to messages in a real broker, and a receipt for each."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pyarrow.parquet as pq
import pytest
from kombu import Connection, Queue
from pyspark.sql import Observation
from pyspark.sql import functions as F

from kombu_binary_delay.spark import publish as of_publish
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark import staging as of_staging
from kombu_binary_delay.spark.compiled import HANDLER, REASONS
from kombu_binary_delay.spark.prepare import job_uuid, task_id
from kombu_binary_delay.spark.publish import Progress, publish
from kombu_binary_delay.spark.publish import _slice_rows as slice_rows
from kombu_binary_delay.spark.staging import Staging
from kombu_binary_delay.spark.staging import _has_died as has_died
from kombu_binary_delay.spark.staging import _machine as machine
from kombu_binary_delay.spark.tables import PART, Place
from tests.spark.dying_app import order
from tests.waits import PATIENCE, wait_until

FAR = datetime.now(UTC) + timedelta(days=1)


@pytest.fixture
def reminders(spark):
    def reminders(count, first=0):
        return spark.range(first, first + count, numPartitions=2).select(
            F.concat(F.lit("key-"), "id").alias("key"),
            F.lit("shop.remind").alias("task"),
            F.array("id").alias("args"),
            F.timestamp_seconds(F.lit(FAR.timestamp()) - F.col("id")).alias("eta"),
        )

    return reminders


@pytest.fixture
def receipts(tmp_path):
    return str(tmp_path / "receipts")


@pytest.fixture
def run(vhost, receipts):
    def run(df, **options):
        # A column of actions counts only if it is named.
        columns = {"action": "action"} if "action" in df.columns else {}
        given = {"job_id": "job", "broker": vhost.url, "receipts": receipts, "columns": columns}
        # On the ladder with the fewest queues.
        settings = {"radix": 2, **options.pop("settings", {})}
        return publish(df, **{**given, **options}, settings=settings)

    return run


def to_local(moment):
    """As Spark's rows have it."""
    return datetime.fromtimestamp(moment.timestamp())  # noqa: DTZ006 - so it has no time zone


def read(spark, path, schema=s.RECEIPTS):
    return spark.read.schema(schema).parquet(path)


def waiting(vhost, count):
    """Count the messages on the ladder, as soon as they are as many as that."""

    def counted():
        names = [row["name"] for row in vhost.queues() if row["type"] != "stream"]
        return sum(vhost.waiting(*names).values())

    wait_until(lambda: counted() >= count)
    return counted()


def test_every_row_is_on_the_ladder_and_has_a_receipt_and_nearest_due_is_published_first(
    spark, reminders, run, receipts, vhost, monkeypatch
):
    monkeypatch.setattr(of_publish, "_FIRST_PACE", 200_000)
    monkeypatch.setattr(of_publish, "_slice_rows", lambda *_: 200)
    reports: list[Progress] = []
    progress = run(reminders(500), slice_seconds=0.001, publishers=1, on_progress=reports.append)
    assert (progress.published, progress.failed, progress.remaining) == (500, 0, 0)
    assert (progress.by_send_task, progress.reasons) == (0, ())
    assert [report.remaining for report in reports] == sorted(
        (t.remaining for t in reports), reverse=True
    )
    assert len(reports) == 4
    rows = read(spark, receipts).orderBy("published_at").collect()
    due = [row.due for row in rows]
    assert due == sorted(due)
    assert {(row.key, row.task_id) for row in rows} == {
        (f"key-{n}", task_id("job", f"key-{n}")) for n in range(500)
    }
    assert {(row.status, row.queue, row.task, row.attempt) for row in rows} == {
        (s.PUBLISHED, "celery", "shop.remind", 0)
    }
    assert waiting(vhost, 500) == 500


def test_what_is_due_at_the_same_time_is_cut_by_its_id(reminders, run, monkeypatch):
    monkeypatch.setattr(of_publish, "_FIRST_PACE", 50)
    monkeypatch.setattr(of_publish, "_slice_rows", lambda *_: 100)
    remaining = []
    df = reminders(300).withColumn("eta", F.lit(FAR))
    run(df, slice_seconds=1.0, on_progress=lambda progress: remaining.append(progress.remaining))
    assert remaining == [300, 200, 100, 0]


def test_a_slice_is_seconds_of_work_and_grows_by_four_times_at_most():
    assert slice_rows(rows=1000, seconds=10.0, wanted=15) == 1500
    assert slice_rows(rows=1000, seconds=0.1, wanted=15) == 4000
    assert slice_rows(rows=1000, seconds=60.0, wanted=15) == 250


def test_a_second_run_of_a_job_waits_for_the_first_and_goes_on_only_if_that_has_died(
    spark, reminders, run, receipts, caplog, monkeypatch
):
    """Given: a run that is at work, one that was suspended, and one that died elsewhere."""
    monkeypatch.setattr(of_staging, "_FRESH", 0.0)
    place, job = Place.parse(receipts), job_uuid("job")
    first = Staging(spark, place, job, longest=600.0)
    first.claim()
    said = {}

    def start():
        with pytest.raises(RuntimeError, match="another run of this job is at work") as error:
            run(reminders(5))
        said["error"] = str(error.value)

    second = threading.Thread(target=start)
    second.start()
    wait_until(lambda: "waiting until" in caplog.text)
    first.renew()
    second.join(PATIENCE)
    assert "run a job once at a time" in said["error"]
    assert "waiting until" in caplog.text

    first.end()

    # It died, and nobody on this machine knows.
    monkeypatch.setattr(of_staging, "_VALID", 3.0 - 600.0)
    Staging(spark, place, job, 600.0, _owner="elsewhere/1").claim()
    assert run(reminders(5)).published == 5


def test_of_runs_that_ask_at_the_same_time_each_waits_until_the_others_run_or_give_way(
    spark, receipts, caplog, monkeypatch
):
    monkeypatch.setattr(of_staging, "_FRESH", 0.0)
    place, job = Place.parse(receipts), job_uuid("job")
    first, second, third = (Staging(spark, place, job, 600.0, _run=name) for name in "abc")
    second._sign("asks")  # noqa: SLF001 - the other half of a claim must be slow
    # As if neither had found the other when it began.
    monkeypatch.setattr(first, "_wait", lambda: None)
    others, looks = first._others, list[int]()  # noqa: SLF001 - to see that it looks again

    def look():
        seen = others()
        looks.append(len(seen))
        return seen

    monkeypatch.setattr(first, "_others", look)
    with ThreadPoolExecutor(1) as pool:
        claimed = pool.submit(first.claim)
        wait_until(lambda: len(looks) == 3)
        assert not claimed.done()
        second.renew()
        with pytest.raises(RuntimeError, match="another run of this job is at work"):
            claimed.result(PATIENCE)
    second.end()
    # Nobody has to wait for one that gave way.
    third.claim()
    assert "waiting until" not in caplog.text


def test_a_run_that_was_killed_has_died_though_nobody_has_waited_for_its_process_yet():
    with subprocess.Popen(["sleep", "60"]) as process:  # noqa: S607
        owner = f"{machine()}/{process.pid}"
        assert not has_died(owner)
        process.kill()
        wait_until(lambda: has_died(owner))


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a container")
def test_a_process_is_dead_only_for_the_machine_or_the_container_that_it_ran_on():
    dead = subprocess.Popen(["true"])  # noqa: S607
    dead.wait()
    script = "from kombu_binary_delay.spark.staging import _machine; print(_machine())"
    argv = ["unshare", "--pid", "--fork", sys.executable, "-c", script]
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True)
    assert has_died(f"{machine()}/{dead.pid}")
    assert not has_died(f"{machine()}/{os.getpid()}")
    # It has this machine's name.
    assert not has_died(f"{done.stdout.strip()}/{dead.pid}")


def test_a_run_that_was_taken_for_dead_while_it_stored_its_rows_publishes_nothing(
    spark, reminders, run, receipts, vhost, monkeypatch
):
    monkeypatch.setattr(of_staging, "_FRESH", 0.0)
    other = Staging(spark, Place.parse(receipts), job_uuid("job"), 600.0, _owner="elsewhere/1")

    def report(progress):
        if progress.remaining:
            other._sign("runs")  # noqa: SLF001 - as if the lease had ended

    with pytest.raises(RuntimeError, match="another run of this job is at work, elsewhere/1"):
        run(reminders(5), on_progress=report)
    assert read(spark, receipts).count() == 0


@pytest.mark.slow
def test_of_two_runs_that_begin_at_once_one_publishes(spark, reminders, run, vhost):
    def start(_):
        try:
            return run(reminders(50), resume=True).published
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        outcomes = sorted(pool.map(start, range(2)), key=str)
    assert outcomes[0] in {0, 50}
    assert 50 in outcomes
    assert waiting(vhost, 50) == 50


def test_a_broker_that_is_not_there_is_one_error_after_a_moment(reminders, run, monkeypatch):
    monkeypatch.setattr(of_publish, "_AT_FIRST", 1.0)
    with pytest.raises(ConnectionError, match=r"cannot be reached: .*refused.* resume") as error:
        run(reminders(5), broker="amqp://guest:guest@127.0.0.1:1//")
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("local_times")
def test_resume_publishes_only_what_has_no_receipt(spark, reminders, run, receipts, vhost):
    run(reminders(100))
    with pytest.raises(RuntimeError, match=r"'job' has receipts .* pass resume .* another job_id"):
        run(reminders(150))
    progress = run(reminders(150), resume=True)
    assert (progress.published, progress.already) == (50, 100)
    assert run(reminders(150), resume=True).published == 0
    counts = Counter(row.key for row in read(spark, receipts).collect())
    assert len(counts) == 150
    assert set(counts.values()) == {1}
    assert waiting(vhost, 150) == 150


def test_what_a_server_does_not_tell_is_counted_in_the_receipts(spark, run, vhost, monkeypatch):
    """Given: no observed metrics, as over Spark Connect if they are there too late."""
    monkeypatch.setattr(Observation, "get", property(lambda _: {}))
    schema = "key string, task string, countdown double, exchange string, routing_key string"
    ways = [("failed", "amq.topic", "lonely"), ("sent", None, None)]
    df = spark.createDataFrame([(key, "t", 3600.0, *way) for key, *way in ways], schema)
    df = df.withColumn("action", F.lit(s.PUBLISH))
    near = df.withColumn("countdown", F.lit(-1.0))
    first = run(near)
    with vhost.connect() as connection:
        channel = connection.channel()
        channel.queue_declare("company")
        channel.queue_bind("company", "amq.topic", "lonely")
    cancelled = df.where("key = 'sent'").withColumn("action", F.lit(s.CANCEL))
    second = run(near.where("key = 'failed'").unionByName(cancelled), resume=True)

    assert (first.published, first.failed, first.remaining) == (1, 1, 0)
    assert (second.rejections, second.already) == ({}, 0)
    assert (second.published, second.cancelled, second.failed) == (1, 1, 0)
    assert (second.remaining, second.to_cancel) == (0, 0)


def test_rejected_rows_have_a_table_of_their_own(spark, reminders, run, receipts):
    bad = reminders(3).withColumn("key", F.lit("same"))
    latin = reminders(1).withColumn("key", F.unhex(F.lit("6be9")).cast("string"))
    progress = run(reminders(5).unionByName(bad).unionByName(latin))
    assert (progress.published, progress.rejected) == (5, 4)
    assert progress.rejections == {"the key is not unique": 3, "key is not UTF-8": 1}
    # As readers without Spark, which refuse text that is not UTF-8.
    rejects = pq.read_table(f"{receipts}-rejects").to_pylist()
    assert Counter((row["key"], row["reason"]) for row in rejects) == {
        ("same", "the key is not unique"): 3,
        ("k\ufffd", "key is not UTF-8"): 1,
    }


def test_a_dry_run_counts_and_does_nothing(reminders, run, tmp_path, vhost):
    bad = reminders(3).withColumn("key", F.lit(None).cast("string"))
    progress = run(reminders(5).unionByName(bad), dry_run=True)
    assert (progress.remaining, progress.rejected, progress.published) == (5, 3, 0)
    assert list(tmp_path.iterdir()) == []
    assert vhost.queues() == []


def test_a_horizon_leaves_what_is_due_later_for_another_run(spark, run, receipts):
    now = datetime.now(UTC)
    rows = [("soon", "t", now + timedelta(minutes=10)), ("later", "t", now + timedelta(hours=2))]
    df = spark.createDataFrame(rows, "key string, task string, eta timestamp")
    # Further away than a short ladder reaches, too: when its time comes, it will be near.
    progress = run(df, horizon=3600, settings={"tick": 1000, "radix": 2, "levels": 12})
    assert (progress.published, progress.later, progress.rejected) == (1, 1, 0)
    progress = run(df, horizon=10_000, resume=True)
    assert (progress.published, progress.already, progress.later) == (1, 1, 0)
    assert {row.key for row in read(spark, receipts).collect()} == {"soon", "later"}


def test_a_run_that_publishes_nothing_leaves_receipts_in_which_there_are_none(
    spark, reminders, run, receipts
):
    progress = run(reminders(5), horizon=60, settings={"journal": "stream"})
    assert (progress.published, progress.later) == (0, 5)
    written = spark.read.parquet(receipts).drop(PART)
    assert written.schema == spark.createDataFrame([], s.RECEIPTS).schema
    assert read(spark, receipts).count() == 0
    # It is no beginning of a job.
    assert run(reminders(5)).published == 5


def test_a_table_cancels_and_reschedules_what_the_job_has_published(
    spark, reminders, run, receipts, vhost
):
    run(reminders(5))
    first = {row.key: row.due for row in read(spark, receipts).collect()}
    hour, day = timedelta(hours=1), timedelta(days=1)
    names = "key string, action string, task string, eta timestamp"
    rows = [
        ("key-0", s.CANCEL, None, None),
        ("key-1", s.RESCHEDULE, None, FAR + hour),
        ("key-2", None, "shop.remind", FAR),
        ("key-3", s.RESCHEDULE, None, FAR - hour),
        # As if the lake had a later time than the message.
        ("key-4", s.CANCEL, None, FAR + 60 * day),
        ("never", s.CANCEL, None, None),
        ("new", s.PUBLISH, "shop.remind", FAR),
    ]
    changes = spark.createDataFrame(rows, names)
    asked = run(changes, resume=True, dry_run=True)
    assert (asked.remaining, asked.to_cancel, asked.to_reschedule) == (5, 3, 1)
    done = run(changes, resume=True)
    assert (done.published, done.cancelled, done.rescheduled, done.failed) == (1, 3, 1, 0)
    assert (done.rejected, done.already, done.remaining) == (1, 1, 0)
    assert (done.to_cancel, done.to_reschedule) == (0, 0)
    again = run(changes, resume=True)
    assert (again.confirmed, again.rejected, again.already) == (0, 1, 6)
    late = [
        ("key-0", None, "shop.remind", FAR),
        ("key-1", s.RESCHEDULE, None, FAR + 2 * hour),
        ("key-2", s.RESCHEDULE, None, FAR + 40 * day),
        ("key-3", "drop", None, FAR),
        ("never", None, "shop.remind", FAR),
    ]
    more = run(spark.createDataFrame(late, names), resume=True)
    assert (more.rescheduled, more.already, more.rejected) == (2, 1, 2)
    rejects = read(spark, f"{receipts}-rejects", s.REJECTS).collect()
    assert Counter((row.key, row.reason) for row in rejects) == {
        ("key-3", "due earlier than before: a task can only be postponed"): 2,
        ("key-3", "action must be one of publish, cancel, reschedule"): 1,
        ("never", "the key has been cancelled in this job"): 1,
    }
    # One receipt for each that was done, with what is known of its due time.
    recorded = read(spark, receipts).where("action <> 'publish'").collect()
    assert Counter((row.key, row.action, row.due, row.status) for row in recorded) == {
        ("key-0", s.CANCEL, first["key-0"], s.RECORDED): 1,
        ("never", s.CANCEL, None, s.RECORDED): 1,
        ("key-1", s.RESCHEDULE, to_local(FAR + hour), s.RECORDED): 1,
        ("key-1", s.RESCHEDULE, to_local(FAR + 2 * hour), s.RECORDED): 1,
        ("key-2", s.RESCHEDULE, to_local(FAR + 40 * day), s.RECORDED): 1,
        ("key-4", s.CANCEL, to_local(FAR + 60 * day), s.RECORDED): 1,
    }
    with Connection(vhost.url, transport="kombu_binary_delay:Transport") as connection:
        connection.connect()
        amendments = connection.connection.delay_mechanism.amendments
        amendments.reader.catch_up()
        reasons = {}
        for key in ("key-0", "key-1", "key-3", "key-4", "never", "new"):
            headers = {"task": "shop.remind", "id": task_id("job", key)}
            judgement = amendments.memory.judge(
                {"application_headers": headers}, time.time_ns() // 1_000_000
            )
            reasons[key] = judgement and judgement.reason
    cancelled = dict.fromkeys(("key-0", "key-4", "never"), "cancelled")
    assert reasons == {**cancelled, "key-1": "postponed", "key-3": None, "new": None}


def test_cancellations_and_reschedulings_that_are_mixed_by_their_due_times_are_all_recorded(
    reminders, run
):
    run(reminders(40))
    is_even = F.col("key").substr(5, 3).cast("int") % 2 == 0
    changes = reminders(40).select(
        "key",
        F.when(is_even, s.CANCEL).otherwise(s.RESCHEDULE).alias("action"),
        F.when(~is_even, F.col("eta") + F.expr("interval 1 second")).alias("eta"),
    )
    done = run(changes, resume=True)
    assert (done.cancelled, done.rescheduled, done.remaining) == (20, 20, 0)


def test_jobs_with_one_table_of_receipts_leave_each_other_alone(
    spark, reminders, run, receipts, tmp_path
):
    reports: list[Progress] = []

    def another(progress):
        if not reports:
            reports.append(progress)
            run(reminders(20, first=10), job_id="another/job")

    done = run(reminders(10), on_progress=another)
    assert (done.published, done.failed) == (10, 0)
    rows = read(spark, receipts).collect()
    expected = [("job", f"key-{n}") for n in range(10)]
    expected += [("another/job", f"key-{n}") for n in range(10, 30)]
    assert sorted((row.job_id, row.key) for row in rows) == sorted(expected)
    assert spark.read.schema("key string").parquet(f"{receipts}-staged/*").count() == 0


def test_a_failed_attempt_leaves_one_receipt_a_message_and_one_task_id(
    spark, reminders, run, receipts, vhost
):
    # An executor's Python dies in the middle of its rows, once.
    task = f"die-in-{vhost.url.rpartition('/')[2]}"
    order(task).touch()
    df = reminders(2000).withColumn("task", F.lit(task))
    progress = run(df, app="tests.spark.dying_app:app", publishers=1)
    assert not order(task).exists()
    assert progress.published == 2000
    # That application has a handler, which could change each message.
    assert progress.by_send_task == 2000
    assert progress.reasons == (REASONS[HANDLER],)
    rows = read(spark, receipts).collect()
    assert len({row.key for row in rows}) == len(rows) == 2000
    assert {row.attempt for row in rows} == {1}
    # A window of the first attempt had been sent, and its messages carry the same ids.
    assert 3000 <= waiting(vhost, 3000) < 4000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"job_id": ""}, "job_id must name"),
        ({"max_rate": 0}, r"max_rate must be above 0, and at most 1e\+12, got 0"),
        ({"max_rate": float("inf")}, "max_rate must be .* got inf"),
        ({"horizon": -1}, "horizon must be above 0, .* got -1"),
        ({"horizon": 1e15}, "horizon must be .* got 1000000000000000.0"),
        ({"patience": -1}, "patience must be above 0, .* got -1"),
        ({"patience": float("inf")}, "patience must be .* got inf"),
        ({"publishers": 0}, "publishers must be a whole number of at least 1, got 0"),
        ({"slice_seconds": 0}, "slice_seconds must be above 0, .* got 0"),
        ({"past": "drop"}, "past must be one of"),
        ({"settings": {"tik": 1}}, "unknown setting 'tik'"),
    ],
)
def test_what_cannot_be_is_refused_at_the_call(reminders, run, options, words):
    with pytest.raises(ValueError, match=words):
        run(reminders(1), **options)


def test_speculative_execution_is_refused(spark, reminders, run, monkeypatch):
    df = reminders(1)
    monkeypatch.setattr(type(spark.conf), "get", lambda *_: "true")
    with pytest.raises(RuntimeError, match="twice; set it to false"):
        run(df)


def test_a_worker_finds_the_task_in_its_queue(spark, run, vhost):
    df = spark.createDataFrame([("k", "t", 0.5)], "key string, task string, countdown double")
    run(df)
    with Connection(vhost.url, transport="kombu_binary_delay:Transport") as connection:
        queue = Queue("celery")(connection.default_channel)
        message = wait_until(lambda: queue.get(no_ack=True))
    assert message.headers["id"] == task_id("job", "k")
