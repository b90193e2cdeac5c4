"""Purpose: measure the Spark pipeline: rows published, planned and audited per second.

    python -m benchmarks.spark_pipeline [--rows N] [--plan-rows N,N,...] [--into FOLDER]

Publishing is measured against the two loops it replaces: Celery's `send_task` with a confirm for
each message, and plain Kombu with one. Plans and audits are measured at growing numbers of rows, so
that one can see how they grow. What was found is written to FOLDER/results/spark.json. Without
--into, that is the folder of the documentation; `python -m docs.generate` then writes its pages.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from functools import reduce
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery import Celery
from kombu import Connection, Queue
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it

from benchmarks.record import DOCS, Recording
from benchmarks.rig import Row, machine, undisturbed
from dev.broker import Broker
from kombu_binary_delay import Ladder
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.audit import audit
from kombu_binary_delay.spark.plan import plan, summarize
from kombu_binary_delay.spark.publish import publish

if TYPE_CHECKING:
    from collections.abc import Callable

OURS = "kombu_binary_delay:Transport"
CONFIRM = {"confirm_publish": True}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark_pipeline")
    parser.add_argument("--rows", type=int, default=100_000, help="to publish")
    parser.add_argument("--plan-rows", default="1000000,5000000,20000000", help="to plan and audit")
    parser.add_argument("--into", type=Path, default=DOCS, help="the folder to write to")
    given = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    recording = Recording("spark", 1, given.into)
    with Broker(os.environ.get("RABBITMQ_ROOT")) as broker:
        on = machine(broker) | {"spark": spark.version}
        found = published(spark, broker, given.rows)
    for rows in map(int, given.plan_rows.split(",")):
        found |= reckoned(spark, rows)
    kinds = ("publish", "plan", "audit", "audit, written")
    found = dict(sorted(found.items(), key=lambda row: kinds.index(row[0].partition(":")[0])))
    for name, row in found.items():
        print(f"{name:40} {row['rate']['median']:12,.0f} tasks a second")
    recording.write(on, found)


def published(spark: SparkSession, broker: Broker, rows: int) -> dict[str, Row]:
    found = {}
    few = rows // 10  # the loops are slow, and their rate does not depend on the number

    def by_celery() -> None:
        app = Celery(broker=broker.vhost().url, set_as_current=False)
        app.conf.update(broker_transport=OURS, broker_transport_options=CONFIRM)
        for number in range(few):
            app.send_task("t", (number,), countdown=3600 + number)

    def by_kombu() -> None:
        with Connection(
            broker.vhost().url, transport=OURS, transport_options=CONFIRM
        ) as connection:
            Queue("celery")(connection.default_channel).declare()
            producer = connection.Producer()
            for number in range(few):
                headers = {"x-delay": (3600 + number) * 1000}
                producer.publish([number], routing_key="celery", headers=headers)

    folder = tempfile.mkdtemp(prefix="spark-bench-")
    numbers = count()

    def by_spark(rows: int = rows) -> None:
        df = spark.range(rows).select(
            F.concat(F.lit("k"), "id").alias("key"),
            F.lit("t").alias("task"),
            F.array("id").alias("args"),
            (F.lit(3600.0) + F.col("id")).alias("countdown"),
        )
        url = broker.vhost().url
        publish(df, job_id="j", broker=url, receipts=f"{folder}/receipts-{next(numbers)}")

    # What Spark compiles at its first job is paid once, whatever the number of rows.
    timed(lambda: by_spark(100))
    found["publish: Celery"] = rated(few, timed(by_celery))
    found["publish: Kombu"] = rated(few, timed(by_kombu))
    found["publish: Spark"] = rated(rows, timed(by_spark))
    shutil.rmtree(folder)
    return found


def reckoned(spark: SparkSession, rows: int) -> dict[str, Row]:
    due = F.timestamp_seconds(F.lit(1.6e9) + F.rand(1) * 7 * 86400)
    events = spark.range(rows).select(
        F.col("id").cast("string").alias("task_id"),
        due.alias("due"),
        F.timestamp_seconds(F.lit(1.6e9)).alias("published"),
    )
    folder = tempfile.mkdtemp(prefix="spark-bench-")
    events.write.parquet(f"{folder}/events")
    events = spark.read.parquet(f"{folder}/events")
    times = {
        "plan": warm(
            lambda: summarize(
                plan(events.withColumnRenamed("due", "eta"), Ladder.default())
            ).collect()
        ),
        "audit": warm(lambda: _audit(events).groupBy("verdict").count().collect()),
        "audit, written": warm(
            lambda: _audit(events).write.mode("overwrite").parquet(f"{folder}/verdicts")
        ),
    }
    shutil.rmtree(folder)
    return {f"{name}: {rows:,}": rated(rows, row) for name, row in times.items()}


def _audit(events: DataFrame) -> DataFrame:
    """Audit a receipt and three events for each task."""

    def shaped(schema: str, **values: Any) -> DataFrame:
        columns = [each.split() for each in schema.split(", ")]
        return events.select(
            *((values.get(name, F.lit(None))).cast(kind).alias(name) for name, kind in columns)
        )

    task, due = F.col("task_id"), F.col("due")
    receipts = shaped(s.RECEIPTS, task_id=task, due=due, status=F.lit(s.PUBLISHED))
    scheduled, *others = (
        shaped(s.JOURNAL, event=F.lit(event), task_id=task, due=due, at=due)
        for event in s.EVENTS[:3]
    )
    journal = reduce(DataFrame.unionByName, others, scheduled)
    return audit(receipts, journal)


def rated(tasks: int, row: Row) -> Row:
    figures = {"tasks": tasks, "rate": tasks / row["seconds"], "stolen": row["stolen"]}
    return {name: {"median": value} for name, value in figures.items()}


def warm(call: Callable[[], object]) -> Row:
    """Time the second of two calls: Spark compiles at the first."""
    call()
    return timed(call)


def timed(call: Callable[[], object]) -> Row:
    """Time a call that can be repeated, undisturbed by the host."""

    def once() -> Row:
        begin = time.perf_counter()
        call()
        return {"seconds": time.perf_counter() - begin}

    return undisturbed(once)


if __name__ == "__main__":
    main()
