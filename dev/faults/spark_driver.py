"""Purpose: a Spark driver that publishes tasks for the worker in tasks.py, to be killed.

Given a master, a broker, a path for receipts, a number of rows, and when the first is due (seconds
since the epoch). A job that has receipts is resumed.
"""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it

from dev.faults.tasks import QUEUE
from kombu_binary_delay.spark.publish import publish

#: The job, and the column of its keys.
JOB, KEY = "faults", "key"
#: Rows due in one second, rows of a slice, and rows per second.
AT_ONCE, SLICE, RATE = 100, 300, 300


def due(first: float, number: int) -> float:
    """Return when a row is due, in seconds since the epoch."""
    return first + number // AT_ONCE


def main(master: str, broker: str, receipts: str, count: str, first: str) -> None:
    """Publish the rows."""
    spark = (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.executor.memory", "512m")
        .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.executor.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .getOrCreate()
    )
    number = F.col("id")
    rows = spark.range(int(count)).select(
        number.cast("string").alias(KEY),
        F.lit("arrive").alias("task"),
        F.lit(QUEUE).alias("queue"),
        F.timestamp_seconds(F.lit(float(first)) + F.floor(number / AT_ONCE)).alias("eta"),
    )
    done = publish(
        rows,
        job_id=JOB,
        broker=broker,
        app="dev.faults.tasks:app",
        receipts=receipts,
        resume=True,
        slice_seconds=SLICE / RATE,
        max_rate=RATE,
    )
    spark.stop()
    sys.exit(done.remaining + done.failed + done.rejected)


if __name__ == "__main__":
    main(*sys.argv[1:])
