"""Purpose: measure the Spark pipeline: rows published, planned and audited per second.

Publishing is measured against the loops it replaces: Celery's `send_task` with a confirm for each
message, the same in a batch, and plain Kombu with a confirm; and against what sends on an executor,
without Spark. Plans and audits are measured at growing numbers of rows, so
that one can see how they grow.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial, reduce
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
from celery import Celery
from kombu import Connection, Queue
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it

from benchmarks.rig import Row, Scale, in_turns, own_cpu, summary
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.audit import audit
from kombu_binary_delay.spark.plan import plan, summarize
from kombu_binary_delay.spark.publish import Progress, publish, receipts_of
from kombu_binary_delay.spark.send import Sender, Target

if TYPE_CHECKING:
    from dev.broker import Broker

#: For each row, the number of tasks, and what handles them.
Calls = dict[str, tuple[int, Callable[[], object]]]

OURS = "kombu_binary_delay:Transport"
CONFIRM = {"confirm_publish": True}
#: How many tasks are published, how many of them by a loop, and how many are planned and audited.
#: A job has some seconds of its own, whatever its size: so two of Spark are measured.
PUBLISHED, MORE, LOOPED, RECKONED = 100_000, 400_000, 10_000, (1_000_000, 5_000_000, 20_000_000)


def publishing(broker: Broker, scale: Scale) -> dict[str, Row]:
    """Measure in turns the tasks published per second, from end to end."""
    with _session() as (spark, folder):
        few, tasks, more = scale.pick((LOOPED, PUBLISHED, MORE), (20, 200, 300))
        by_spark = _by_spark(spark, broker, folder)
        calls: Calls = {
            "publish: Celery": (few, partial(_by_celery, broker, few)),
            "publish: Celery, batch": (few, partial(_by_celery_batch, broker, few)),
            "publish: Kombu": (few, partial(_by_kombu, broker, few)),
            "publish: template": (tasks, partial(_alone, broker, tasks)),
            "publish: Spark": (tasks, partial(by_spark, tasks)),
            "publish: Spark, more": (more, partial(by_spark, more)),
        }
        # What Spark compiles in its first jobs is paid once.
        if not scale.quick:
            by_spark(tasks)
        # Spark ends a Python process that had no work for a minute: a new one takes a second.
        by_few = partial(by_spark, 100)
        return _measured(calls, scale, dict.fromkeys(list(calls)[-2:], by_few))


def reckoning(_: Broker, scale: Scale) -> dict[str, Row]:
    """Measure in turns the tasks planned and audited per second."""
    with _session() as (spark, folder):
        reckoned = {
            rows: _reckoned(_events(spark, rows, f"{folder}/{rows}"), folder)
            for rows in scale.pick(RECKONED, (1_000,))
        }
        calls: Calls = {}
        for name in next(iter(reckoned.values())):
            calls |= {f"{name}: {rows:,}": (rows, row[name]) for rows, row in reckoned.items()}
        if not scale.quick:
            for call in next(iter(reckoned.values())).values():
                call()
        return _measured(calls, scale)


def _measured(
    calls: Calls, scale: Scale, before: Mapping[str, Callable[[], object]] | None = None
) -> dict[str, Row]:
    def measure(name: str) -> Row:
        tasks, call = calls[name]
        if not scale.quick and before and name in before:
            before[name]()
        gc.collect()
        begin, used = time.perf_counter(), _python_cpu()
        progress = call()
        row = {"tasks": tasks, "rate": tasks / (time.perf_counter() - begin)}
        if name.startswith("publish"):
            cpu = sum(seconds - used.get(pid, 0.0) for pid, seconds in _python_cpu().items())
            row["python_us"] = cpu / tasks * 1e6
        if isinstance(progress, Progress):
            row["publishing"] = progress.rate
        return row

    return summary(in_turns(list(calls), scale, measure, "spark"))


@contextmanager
def _session() -> Iterator[tuple[SparkSession, str]]:
    """Yield a Spark session, and a folder for its tables."""
    with tempfile.TemporaryDirectory(prefix="spark-bench-") as folder:
        spark = _spark()
        try:
            yield spark, folder
        finally:
            spark.stop()


def _spark() -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    return (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )


def _by_celery(broker: Broker, tasks: int) -> None:
    app = Celery(broker=broker.vhost().url, set_as_current=False)
    app.conf.update(broker_transport=OURS, broker_transport_options=CONFIRM)
    for number in range(tasks):
        app.send_task("t", (number,), countdown=3600 + number)


def _by_celery_batch(broker: Broker, tasks: int) -> None:
    app = Celery(broker=broker.vhost().url, set_as_current=False)
    app.conf.broker_transport = OURS
    with app.producer_or_acquire() as producer, producer.batch():
        for number in range(tasks):
            app.send_task("t", (number,), countdown=3600 + number, producer=producer)


def _alone(broker: Broker, tasks: int) -> None:
    """Send what Spark gives to one executor, with its receipts."""
    target = Target(broker.vhost().url)
    batches = (
        pa.RecordBatch.from_pydict(
            {
                "key": [f"k{number}" for number in part],
                "task_id": [str(uuid4()) for _ in part],
                "task": ["t"] * len(part),
                "args": [f"[{number}]" for number in part],
                "countdown": [3600.0 + number for number in part],
                "action": [s.PUBLISH] * len(part),
            }
        )
        for part in (range(at, min(at + 10_000, tasks)) for at in range(0, tasks, 10_000))
    )
    for batch, sent in Sender(target).send(batches):
        receipts_of(batch, sent, "j", target.ladder(), (0, 0))


def _python_cpu() -> dict[int, float]:
    """Return the seconds of CPU of this process and of each of Spark's Python processes."""
    used = {os.getpid(): time.process_time()}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"pyspark.daemon" in (process / "cmdline").read_bytes():
                used[int(process.name)] = own_cpu(int(process.name))
    return used


def _by_kombu(broker: Broker, tasks: int) -> None:
    with Connection(broker.vhost().url, transport=OURS, transport_options=CONFIRM) as connection:
        Queue("celery")(connection.default_channel).declare()
        producer = connection.Producer()
        for number in range(tasks):
            headers = {"x-delay": (3600 + number) * 1000}
            producer.publish([number], routing_key="celery", headers=headers)


def _by_spark(spark: SparkSession, broker: Broker, folder: str) -> Callable[[int], Progress]:
    """Return what publishes so many tasks as a job of its own, with receipts."""
    numbers = count()

    def by_spark(tasks: int) -> Progress:
        df = spark.range(tasks).select(
            F.concat(F.lit("k"), "id").alias("key"),
            F.lit("t").alias("task"),
            F.array("id").alias("args"),
            (F.lit(3600.0) + F.col("id")).alias("countdown"),
        )
        url = broker.vhost().url
        return publish(df, job_id="j", broker=url, receipts=f"{folder}/receipts-{next(numbers)}")

    return by_spark


def _events(spark: SparkSession, rows: int, folder: str) -> DataFrame:
    """Write tasks that are due within a week, and return them as read from there."""
    due = F.timestamp_seconds(F.lit(1.6e9) + F.rand(1) * 7 * 86400)
    spark.range(rows).select(
        F.col("id").cast("string").alias("task_id"),
        due.alias("due"),
        F.timestamp_seconds(F.lit(1.6e9)).alias("published"),
    ).write.parquet(folder)
    return spark.read.parquet(folder)


def _reckoned(events: DataFrame, folder: str) -> dict[str, Callable[[], object]]:
    return {
        "plan": lambda: summarize(plan(events, columns={"eta": "due"})),
        "audit": lambda: _audit(events).groupBy("verdict").count().collect(),
        "audit, written": lambda: (
            _audit(events).write.mode("overwrite").parquet(f"{folder}/verdicts")
        ),
    }


def _audit(events: DataFrame) -> DataFrame:
    """Audit a receipt and three events for each task."""

    def shaped(schema: str, **values: Any) -> DataFrame:
        columns = s.columns_of(schema).items()
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
