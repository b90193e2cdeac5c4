"""A driver that is killed: `resume` leaves one receipt a row, and little is published twice."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import functions as F

from dev.processes import Processes
from dev.service import wait_until
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.journal import read_journal
from kombu_binary_delay.spark.prepare import task_id
from kombu_binary_delay.spark.publish import publish
from kombu_binary_delay.spark.tables import existing

ROOT = Path(__file__).parents[2]
ROWS, RATE, SECONDS = 3000, 150, 4


def job(spark, broker, receipts, **options):
    rows = spark.range(ROWS).select(
        F.concat(F.lit("key-"), "id").alias("key"),
        F.lit("t").alias("task"),
        (F.lit(86400.0) + F.col("id")).alias("countdown"),
    )
    settings = {"journal": "stream", "radix": 2}
    given = {"broker": broker, "receipts": receipts, "settings": settings, **options}
    return publish(rows, job_id="j", **given)


def main(broker, receipts):
    """Publish slowly, until this process is killed."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - of a process of its own

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    job(spark.getOrCreate(), broker, receipts, max_rate=RATE, slice_seconds=SECONDS)


@pytest.mark.slow
def test_after_a_driver_was_killed_resume_leaves_one_receipt_and_doubles_a_slice_at_most(
    spark, vhost, tmp_path
):
    receipts, log = str(tmp_path / "receipts"), tmp_path / "driver.log"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def done():
        table = existing(spark, receipts, s.RECEIPTS)
        return 0 if table is None else table.count()

    with Processes("driver") as processes:
        argv = [sys.executable, "-m", "tests.spark.test_killed", vhost.url, receipts]
        driver = processes.spawn(argv, env, log)
        wait_until(lambda: done() > 0, 600, "no slice was published", driver)
        # In the midst of another slice.
        time.sleep(SECONDS / 2)
        processes.kill(driver)
    left = done()
    assert 0 < left < ROWS
    # Its lease is that of a process which has ended.
    progress = job(spark, vhost.url, receipts, resume=True)
    assert (progress.already, progress.published) == (left, ROWS - left)
    keys = Counter(row.key for row in spark.read.schema(s.RECEIPTS).parquet(receipts).collect())
    assert keys == {f"key-{number}": 1 for number in range(ROWS)}
    events = Counter(row.task_id for row in read_journal(spark, vhost.url).collect())
    assert set(events) == {task_id("j", f"key-{number}") for number in range(ROWS)}
    assert sum(events.values()) - ROWS <= RATE * SECONDS


if __name__ == "__main__":
    main(*sys.argv[1:])
