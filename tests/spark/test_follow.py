"""A continuous audit: a day that is fed through in steps, with kills between."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import functions as F

from kombu_binary_delay.spark import follow
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.audit import audit
from kombu_binary_delay.spark.classic import cached, release
from kombu_binary_delay.spark.follow import Step, audit_due, read_verdicts
from kombu_binary_delay.spark.tables import append, read

MIDNIGHT = datetime(2020, 1, 1, tzinfo=UTC)
HOUR = 3600.0
PATIENCE = 300.0
END = 24 * HOUR
#: When the journal is exported, and a step follows.
EXPORTS = [5 * HOUR, 9 * HOUR + PATIENCE + 20, END]
TASKS = 170


def at(seconds):
    return MIDNIGHT + timedelta(seconds=seconds)


def event(kind, task_id, seconds, due, retries=0, state=None):
    return (kind, task_id, retries, "send", "mail", at(seconds), at(due), "l", 3, state, None)


def arrives(task_id, seconds, due, state="SUCCESS", retries=0):
    return [
        event(s.RELEASED, task_id, seconds, due, retries),
        event(s.EXECUTED, task_id, seconds + 0.1, due, retries, state),
    ]


def receipt(task_id, due, status=s.PUBLISHED, published=-60.0, action=None):
    when = (at(due), at(published))
    key = f"key of {task_id}"
    return ("job", key, task_id, "send", "mail", *when, 3, 0, 0, status, None, action)


#: For each kind of task: its events after that of its publish, by its due time.
KINDS = {
    "ok": lambda i, d: arrives(i, d + 0.2, d),
    "early": lambda i, d: arrives(i, d - 1, d),
    "late": lambda i, d: arrives(i, d + 60, d),
    "lost": lambda i, d: [],
    "dropped": lambda i, d: [event(s.RELEASED, i, d + 0.2, d)],
    "dropped, at last": lambda i, d: [event(s.RELEASED, i, d + PATIENCE - 50, d)],
    "found again": lambda i, d: arrives(i, d + 3 * HOUR, d),
    "twice": lambda i, d: [*arrives(i, d + 0.2, d), *arrives(i, d + 1, d)],
    "twice, hours later": lambda i, d: [*arrives(i, d + 0.2, d), *arrives(i, d + 5 * HOUR, d)],
    "cancelled": lambda i, d: [event(s.CANCELLED, i, d + 0.2, d)],
    "postponed": lambda i, d: [
        event(s.POSTPONED, i, d + 0.2, d),
        event(s.SCHEDULED, i, d + 0.2, d + 4 * HOUR),
        *arrives(i, d + 4 * HOUR + 0.2, d + 4 * HOUR),
    ],
    "replaced": lambda i, d: [
        event(s.SCHEDULED, i, d - 10, d + 6 * HOUR),
        event(s.CANCELLED, i, d + 0.2, d),
        *arrives(i, d + 6 * HOUR + 0.2, d + 6 * HOUR),
    ],
    "retried": lambda i, d: [
        *arrives(i, d + 0.2, d, state="RETRY"),
        event(s.SCHEDULED, i, d + 1, d + HOUR, 1),
        *arrives(i, d + HOUR + 0.2, d + HOUR, retries=1),
    ],
    "retried after cancel": lambda i, d: [
        *arrives(i, d + 0.2, d, state="RETRY"),
        event(s.SCHEDULED, i, d + 1, d + HOUR, 1),
        *arrives(i, d + HOUR + 0.2, d + HOUR, retries=1),
    ],
    "nacked": lambda i, d: [],
    "ran after cancel": lambda i, d: arrives(i, d + 0.2, d),
    "unseen": lambda i, d: arrives(i, d + 0.2, d),
    "untold": lambda i, d: arrives(i, d + 0.2, d),
    "untold, dropped at last": lambda i, d: [event(s.RELEASED, i, d + PATIENCE - 50, d)],
    "untold, lost, due when sent": lambda i, d: [],
    "lost, rescheduled too late": lambda i, d: [],
    "ok, rescheduled too late": lambda i, d: arrives(i, d + 0.2, d),
}


def day():
    """Return all receipts, each with the time from which it can be seen, and all events."""
    receipts, events = [], []
    for number in range(TASKS):
        kind = list(KINDS)[number % len(KINDS)]
        # Some are due at one moment, some are due after the day.
        due = 9 * HOUR if number % 5 == 0 else number * (END + 2 * HOUR) / TASKS + 1
        task_id = f"{kind} {number}"
        status = s.NACKED if kind == "nacked" else s.PUBLISHED
        if "untold" not in kind:
            seen = due + HOUR if kind == "unseen" else 0.0
            receipts.append((seen, receipt(task_id, due, status)))
        # Amendments say due times that their messages do not have.
        far = due + 40 * END
        if kind == "retried after cancel":
            # It is seen before some of the retries, and long after others.
            record = receipt(task_id, far, s.RECORDED, due + 5, s.CANCEL)
            receipts.append((due + number % 2 * 5 * HOUR, record))
        if kind == "ran after cancel":
            record = receipt(task_id, far, s.RECORDED, due - 5, s.CANCEL)
            receipts.append((due + HOUR, record))
        if "rescheduled" in kind:
            record = receipt(task_id, far, s.RECORDED, due - 5, s.RESCHEDULE)
            receipts.append((due - 5, record))
        events.append(event(s.SCHEDULED, task_id, due + 100 if "due when" in kind else -60.0, due))
        events += KINDS[kind](task_id, due)
    # Something happens all the time.
    events += [each for n in range(25) for each in arrives(f"clock {n}", n * HOUR, n * HOUR)]
    events.sort(key=lambda each: each[5])
    return receipts, [(*each[:-1], offset) for offset, each in enumerate(events)]


@pytest.fixture
def feed(spark, tmp_path):
    """Write what happens until an export, and when that was; return receipts and journal."""
    receipts, events = day()
    tables = {name: str(tmp_path / name) for name in ("receipts", "journal")}

    def feed(begin, end):
        seen = [row for time, row in receipts if begin < time <= end]
        happened = [row for row in events if at(begin) < row[5] <= at(end)]
        mark = (s.COMPLETE, None, None, None, None, at(end), None, None, None, None, None)
        for rows, schema, path in (
            (seen, s.RECEIPTS, tables["receipts"]),
            ([*happened, mark], s.JOURNAL, tables["journal"]),
        ):
            table = spark.createDataFrame(rows, schema).coalesce(1)
            table.write.mode("append").parquet(path)
        return tuple(
            spark.read.schema(schema).parquet(tables[name])
            for name, schema in (("receipts", s.RECEIPTS), ("journal", s.JOURNAL))
        )

    return feed


class KilledError(Exception):
    """Stands for the end of a driver."""


def kill(*_):
    raise KilledError


@pytest.mark.slow
def test_the_verdicts_of_a_day_in_steps_are_those_of_one_audit(spark, feed, tmp_path, monkeypatch):
    output, begin = str(tmp_path / "audit"), -HOUR
    steps: list[Step] = []
    for number, end in enumerate(EXPORTS):
        receipts, journal = feed(begin, end)
        begin = end
        if number == 1:
            # A driver that dies when the verdicts are written, and before the step is finished.
            with monkeypatch.context() as patch:
                patch.setattr(follow, "append", kill)
                with pytest.raises(KilledError):
                    audit_due(receipts, journal, output)
            before = read_verdicts(spark, output).count()
            assert before == sum(sum(each.verdicts.values()) for each in steps)
        steps.append(audit_due(receipts, journal, output))
    # Nothing has been exported since.
    again = audit_due(receipts, journal, output)
    assert (again.batch, again.verdicts, again.corrected) == (len(EXPORTS) - 1, {}, 0)

    wanted = {
        (row.task_id, row.retries): row
        for row in audit(receipts, journal, until=at(END)).collect()
        if row.verdict != s.STILL_WAITING
    }
    last = journal.groupBy("task_id", "retries").agg(F.max("due").alias("due"))
    final = last.where(F.col("due") < at(END - PATIENCE)).collect()
    wanted = {key: wanted[key] for row in final if (key := tuple(row)[:2]) in wanted}
    found = {(row.task_id, row.retries): row for row in read_verdicts(spark, output).collect()}
    assert set(found) == set(wanted)
    assert {key: row for key, row in found.items() if row != wanted[key]} == {}
    assert {row.verdict for row in found.values()} == set(s.VERDICT_NAMES) - {
        s.STILL_WAITING,
        s.UNDECIDED,
    }

    # An audit of one job judges its tasks alone, as the audit of all does.
    jobs = receipts.withColumn("job_id", F.right("task_id", F.lit(1)))
    ids = {row.task_id for row in jobs.where("job_id = '7'").collect()}
    audit_due(jobs, journal, str(tmp_path / "of a job"), job_id="7")
    rows = read_verdicts(spark, str(tmp_path / "of a job")).collect()
    assert {(row.task_id, row.retries): row for row in rows} == {
        key: row for key, row in found.items() if key[0] in ids
    }

    # Each has one first verdict, and only those are corrected that were final before.
    rows = spark.read.schema(s.FOLLOWED).parquet(f"{output}/verdicts").collect()
    first = Counter((row.task_id, row.retries) for row in rows if not row.corrected)
    assert first == Counter(dict.fromkeys(found, 1))
    corrected = {row.task_id.rpartition(" ")[0] for row in rows if row.corrected}
    assert corrected == {
        "found again",
        "twice, hours later",
        "unseen",
        "ran after cancel",
        "retried after cancel",
    }
    assert sum(each.corrected for each in steps) == sum(row.corrected for row in rows)
    alarms = {each["verdict"] for step in steps for each in step.alarms}
    assert alarms
    assert alarms <= {s.EARLY, s.LOST_IN_THE_LADDER, s.LOST_AFTER_RELEASE}


def test_rows_that_are_kept_are_in_fewer_parts_than_a_shuffle_has(spark):
    name = "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning"
    kept = cached(spark.range(100).groupBy("id").count())
    of_a_shuffle = int(spark.conf.get("spark.sql.shuffle.partitions"))
    assert kept.rdd.getNumPartitions() <= spark.sparkContext.defaultParallelism < of_a_shuffle
    assert spark.conf.get(name, None) is None
    release(kept)


def test_a_row_that_was_refused_without_a_due_time_is_judged_too(spark, tmp_path):
    # As the sink writes it: when it was tried is all the time that it has.
    row = receipt("refused", 0.0, s.REFUSED)
    receipts = spark.createDataFrame([(*row[:5], None, *row[6:])], s.RECEIPTS)
    mark = (s.COMPLETE, None, None, None, None, at(END), None, None, None, None, None)
    step = audit_due(receipts, spark.createDataFrame([mark], s.JOURNAL), str(tmp_path / "audit"))
    assert step.verdicts == {s.NOT_PUBLISHED: 1}


@pytest.mark.slow
def test_two_audits_of_one_output_do_not_hurt_each_other(spark, feed, tmp_path, monkeypatch):
    output = str(tmp_path / "audit")
    receipts, journal = feed(-HOUR, HOUR)

    def while_another_does(*given, **more):
        # All that the other's step leaves that could be seen here.
        row = 0, at(0), at(-HOUR), at(0), 1, 0, 0
        spark.createDataFrame([row], s.STEPS).write.parquet(f"{output}/steps")
        return audit(*given, **more)

    monkeypatch.setattr(follow, "audit", while_another_does)
    with pytest.raises(RuntimeError, match="another process writes the verdicts in"):
        audit_due(receipts, journal, output)


def test_only_what_is_within_reach_is_corrected(spark, feed, tmp_path):
    output = str(tmp_path / "audit")
    receipts, journal = feed(-HOUR, 9 * HOUR)
    audit_due(receipts, journal, output)
    receipts, journal = feed(9 * HOUR, END)
    step = audit_due(receipts, journal, output, reach=4 * HOUR)
    rows = spark.read.schema(s.FOLLOWED).parquet(f"{output}/verdicts/batch=1").collect()
    again = [row for row in rows if row.corrected]
    assert step.corrected == len(again) > 0
    assert min(row.due.replace(tzinfo=UTC) for row in again) >= at(5 * HOUR - PATIENCE)
    ids = Counter((row.task_id, row.retries) for row in read_verdicts(spark, output).collect())
    assert set(ids.values()) == {1}


@pytest.mark.slow
def test_rows_that_are_too_old_are_left_out_by_the_statistics_of_their_file(spark, tmp_path):
    output, place, days = str(tmp_path / "audit"), str(tmp_path / "journal"), 24 * HOUR

    def step(day):
        rows = [(*each[:-1], day) for each in arrives(f"on day {day}", day * days, day * days)]
        mark = (s.COMPLETE, None, None, None, None, at(day * days + HOUR), *[None] * 5)
        append(spark.createDataFrame([*rows, mark], s.JOURNAL).coalesce(1), place)
        return audit_due(None, read(spark, place, s.JOURNAL), output)

    step(0)
    before = {*Path(place).glob("*.parquet")}
    step(20)
    [file] = {*Path(place).glob("*.parquet")} - before
    step(60)
    # What is left says which times are in it.
    text = file.read_bytes()
    footer = int.from_bytes(text[-8:-4], "little") + 8
    file.write_bytes(text[:4] + bytes(len(text) - footer - 4) + text[-footer:])
    Path(place, f".{file.name}.crc").unlink()
    assert step(100).verdicts == {s.OK: 1}


@pytest.mark.slow
def test_a_cancellation_without_a_due_time_counts_however_old_it_is(spark, tmp_path):
    output, days = str(tmp_path / "audit"), 24 * HOUR
    # As the sink writes it, where the row does not say when the task is due.
    cancelled = receipt("late", 0.0, s.RECORDED, action=s.CANCEL)
    rows = [(*cancelled[:5], None, *cancelled[6:])]
    rows.append(receipt("late", 40 * days, published=-120.0, action=s.PUBLISH))
    receipts = spark.createDataFrame(rows, s.RECEIPTS)
    events = arrives("first", 0.0, 0.0)
    verdicts = Counter[str]()
    for end in (35 * days, 41 * days):
        if end > 40 * days:
            events += arrives("late", 40 * days + 0.2, 40 * days)
        mark = (s.COMPLETE, None, None, None, None, at(end), *[None] * 5)
        journal = [*((*each[:-1], offset) for offset, each in enumerate(events)), mark]
        step = audit_due(receipts, spark.createDataFrame(journal, s.JOURNAL), output)
        verdicts += Counter(step.verdicts)
    assert verdicts[s.RAN_AFTER_CANCEL] == 1


def test_of_a_task_that_comes_again_beyond_the_reach_the_latest_verdict_is_read(spark, tmp_path):
    output = str(tmp_path / "audit")
    for batch, verdict in enumerate([s.OK, s.LATE]):
        known = {"task_id": "a", "retries": 0, "verdict": verdict, "corrected": False}
        row = spark.createDataFrame([known], s.FOLLOWED.rpartition(",")[0])
        row.write.parquet(f"{output}/verdicts/batch={batch}")
        step = {"batch": batch, "final_to": at(batch * HOUR), "offset": 0}
        spark.createDataFrame([step], s.STEPS).write.mode("append").parquet(f"{output}/steps")
    assert [row.verdict for row in read_verdicts(spark, output).collect()] == [s.LATE]


def test_steps_by_a_clock_that_was_ahead_are_refused(spark, tmp_path):
    output = str(tmp_path / "audit")
    later = datetime.now(UTC) + timedelta(days=1)
    row = (0, later, None, later, 0, 0, 0)
    spark.createDataFrame([row], s.STEPS).write.parquet(f"{output}/steps")
    with pytest.raises(RuntimeError, match="in the future: a clock was wrong"):
        audit_due(None, spark.createDataFrame([], s.JOURNAL), output)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"late_after": -1}, "late_after must be a number"),
        ({"patience": float("inf")}, "patience must be a number"),
        ({"reach": 0}, "reach must be above 0"),
        ({"job_id": "j"}, "job_id needs receipts"),
    ],
)
def test_what_cannot_be_is_refused(spark, given, words):
    with pytest.raises(ValueError, match=words):
        audit_due(None, spark.createDataFrame([], s.JOURNAL), "nowhere", **given)
