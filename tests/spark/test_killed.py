"""Whatever is killed, and in whichever phase: `resume` leaves one receipt a row, and no row without
its message; exports and audits have the same rows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import functions as F

from dev.processes import Processes
from dev.service import wait_until
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.audit import audit
from kombu_binary_delay.spark.journal import export_journal, read_journal
from kombu_binary_delay.spark.prepare import task_id
from kombu_binary_delay.spark.publish import publish
from tests.spark import killed_executors
from tests.spark.holding_app import COMMITTING, PUBLISHING, RECORDING
from tests.spark.killed_driver import (
    AUDITING,
    BETWEEN,
    CLEANING,
    EXPORTING,
    JOBS,
    SLICE,
    STAGING,
    cancellations,
    rows,
    run,
    write_audit,
)

#: For each phase: the fewest and the most receipts of published rows that a killed driver leaves.
LEFT = {
    STAGING: (0, 0),
    PUBLISHING: (0, 0),
    COMMITTING: (1, JOBS[COMMITTING] - 1),
    # A slice is about as large as it is to be.
    BETWEEN: (SLICE // 2, 2 * SLICE),
    CLEANING: (JOBS[CLEANING], JOBS[CLEANING]),
    RECORDING: (JOBS[RECORDING], JOBS[RECORDING]),
}


def receipts(spark, folder, phase):
    path = f"{folder}/{phase}"
    if not list(Path(path).glob("*.parquet")):
        return []
    return spark.read.schema(s.RECEIPTS).parquet(path).collect()


@pytest.mark.slow
def test_after_a_driver_was_killed_in_any_phase_resume_leaves_one_receipt_and_no_row_out(
    spark, vhost, tmp_path
):
    folder, held, log = str(tmp_path), tmp_path / "held", tmp_path / "driver.log"
    script = str(Path(__file__).with_name("killed_driver.py"))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "KBD_HOLD": str(held)}
    with Processes("driver") as processes:
        driver = processes.spawn([sys.executable, script, vhost.url, folder], env, log)

        def all_held():
            names = {each.name for each in held.glob("*")}
            return names == {*JOBS, EXPORTING, AUDITING} and list(
                (tmp_path / COMMITTING).glob("*.parquet")
            )

        try:
            wait_until(all_held, 900, "not all jobs came to their phase", driver)
        except (TimeoutError, ChildProcessError) as failure:
            pytest.fail(f"{failure}: {[each.name for each in held.glob('*')]}\n{log.read_text()}")
        processes.kill(driver)

    left = {phase: receipts(spark, folder, phase) for phase in JOBS}
    for phase, (fewest, most) in LEFT.items():
        assert fewest <= len(left[phase]) <= most, phase
    assert not list((tmp_path / "journal").glob("*.parquet"))
    # Those of the audit before the one that was killed.
    verdicts = spark.read.parquet(f"{folder}/verdicts").groupBy("verdict").count().collect()
    assert dict(verdicts) == {s.UNDECIDED: JOBS[RECORDING]}

    def resume(phase):
        return run(rows(spark, phase), phase, vhost.url, folder, resume=True)

    with ThreadPoolExecutor(4) as pool:
        for phase, done in zip(JOBS, pool.map(resume, JOBS), strict=True):
            already = len(left[phase])
            assert (done.already, done.published) == (already, JOBS[phase] - already), phase
    done = run(cancellations(spark), RECORDING, vhost.url, folder, resume=True)
    assert (done.cancelled, done.failed) == (JOBS[RECORDING], 0)
    for phase in JOBS:
        counts = Counter((row.key, row.status) for row in receipts(spark, folder, phase))
        expected = {(f"key-{n}", s.PUBLISHED): 1 for n in range(JOBS[phase])}
        if phase == RECORDING:
            expected |= {(f"key-{n}", s.RECORDED): 1 for n in range(JOBS[phase])}
        assert counts == expected, phase
    # What was staged has been removed, by the last run or by the next one of the job.
    assert spark.read.schema("key string").parquet(f"{folder}/*-staged/*").count() == 0

    # Each event is exported once, and each row has been handed to the broker with its id.
    for _ in range(2):
        export_journal(spark, vhost.url, f"{folder}/journal")
    journal = spark.read.schema(s.JOURNAL).parquet(f"{folder}/journal")
    events = journal.where(F.col("event") != s.COMPLETE).collect()
    assert sorted(each.offset for each in events) == list(range(len(events)))
    scheduled = {each.task_id for each in events if each.event == s.SCHEDULED}
    ids = {task_id(phase, f"key-{n}") for phase, count in JOBS.items() for n in range(count)}
    assert scheduled == ids
    assert read_journal(spark, vhost.url).count() == len(events)

    write_audit(audit(None, read_journal(spark, f"{folder}/journal")), folder)
    verdicts = spark.read.parquet(f"{folder}/verdicts").groupBy("verdict").count().collect()
    assert dict(verdicts) == {s.STILL_WAITING: len(ids)}


@pytest.mark.slow
def test_an_export_and_an_audit_have_the_same_rows_though_executors_were_killed(
    spark, vhost, tmp_path
):
    folder, killed, count = str(tmp_path), tmp_path / "killed", 2000
    due = F.lit(86400.0) + F.col("id")
    key = F.concat(F.lit("key-"), "id")
    df = spark.range(count).select(
        key.alias("key"), F.lit("t").alias("task"), due.alias("countdown")
    )
    table, settings = f"{folder}/receipts", {"journal": "stream"}
    publish(df, job_id="j", broker=vhost.url, receipts=table, settings=settings)
    # By then, about half of them should have come.
    until = datetime.now(UTC) + timedelta(seconds=86400 + count // 2 + 300)
    # The executors' files go to Spark's home, which is to be empty of them.
    home = tmp_path / "home"
    home.mkdir()
    for name in ("bin", "jars"):
        (home / name).symlink_to(Path(pyspark.__file__).with_name(name))
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "SPARK_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, killed_executors.__file__, vhost.url, folder, until.isoformat()],
        env={**os.environ, **env, killed_executors.FOLDER: str(killed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    phases = {killed_executors.EXPORTING, killed_executors.AUDITING}
    assert {each.name for each in killed.iterdir()} == phases
    assert len({each.read_text() for each in killed.iterdir()}) == len(phases)

    def rows_of(df):
        return Counter(tuple(row) for row in df.collect())

    journal = read_journal(spark, f"{folder}/journal")
    events = rows_of(journal.where(F.col("event") != s.COMPLETE))
    assert events == rows_of(read_journal(spark, vhost.url))
    assert len(events) == count
    assert journal.count() == count + 1
    receipts = spark.read.schema(s.RECEIPTS).parquet(table)
    verdicts = rows_of(spark.read.schema(s.VERDICTS).parquet(f"{folder}/verdicts"))
    assert verdicts == rows_of(audit(receipts, journal, until=until))
    names = {row.verdict for row in spark.read.parquet(f"{folder}/verdicts").collect()}
    assert names == {s.LOST_IN_THE_LADDER, s.STILL_WAITING}
    assert len(verdicts) == count
