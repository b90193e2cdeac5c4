"""Purpose: a driver to be killed while it publishes; given a broker, receipts and rows."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from kombu_binary_delay.spark.publish import publish

broker, receipts, rows = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.sql.shuffle.partitions", "2")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    .config("spark.sql.codegen.wholeStage", "false")
    .getOrCreate()
)
publish(
    spark.range(int(rows)).select(
        F.concat(F.lit("key-"), "id").alias("key"),
        F.lit("shop.remind").alias("task"),
        (F.lit(86400.0) + F.col("id")).alias("countdown"),
    ),
    job_id="job",
    broker=broker,
    receipts=receipts,
    slice_rows=500,
    max_rate=100,
    on_progress=lambda progress: print(progress.published, flush=True),  # noqa: T201
)
