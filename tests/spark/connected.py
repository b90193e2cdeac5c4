"""Purpose: the pipeline, as a client of Spark Connect runs it: no JVM, only a remote server.

Given the server, a broker and a folder, it ends with what it has found, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import kombu
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.connect.session import SparkSession as ConnectSession

from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.audit import audit, lateness
from kombu_binary_delay.spark.follow import follow, read_verdicts
from kombu_binary_delay.spark.journal import FORMAT as JOURNAL
from kombu_binary_delay.spark.journal import JournalSource, export_journal, read_journal
from kombu_binary_delay.spark.plan import Limits, check, plan, summarize
from kombu_binary_delay.spark.publish import publish
from kombu_binary_delay.spark.report import audit_page
from kombu_binary_delay.spark.tables import existing, merge, overwrite, read
from tests.waits import despite_a_slow_start

server, broker, folder = sys.argv[1:]
ROWS = 40
OPTIONS = {"binary_delay": {"journal": "stream"}}

spark = SparkSession.builder.remote(server).getOrCreate()
assert isinstance(spark, ConnectSession)
reminders = spark.range(ROWS).select(
    F.concat(F.lit("key-"), "id").alias("key"),
    F.lit("shop.remind").alias("task"),
    F.array("id").alias("args"),
    F.when(F.col("id") < ROWS // 2, 1.0).otherwise(86400.0).alias("countdown"),
)
bad = reminders.limit(1).withColumn("key", F.lit(None).cast("string"))

summary = summarize(plan(reminders))
held = check(summary, Limits(waiting=ROWS)).values()

receipts = f"{folder}/receipts"
given = {"job_id": "j", "broker": broker, "receipts": receipts, "settings": OPTIONS["binary_delay"]}
done = publish(reminders.unionByName(bad), **given)
again = publish(reminders, **given, resume=True)

# What a worker would do, as far as the journal sees.
with kombu.Connection(
    broker, transport="kombu_binary_delay:Transport", transport_options=OPTIONS
) as connection:
    queue = kombu.Queue("celery")(connection.default_channel)
    taken = 0
    while taken < ROWS // 2:
        taken += queue.get(no_ack=True) is not None

for _ in range(2):
    export_journal(spark, broker, f"{folder}/journal")
journal = read_journal(spark, f"{folder}/journal")
published = spark.read.schema(s.RECEIPTS).parquet(receipts)
# No worker has executed them: without the name of a task, the audit does not expect it.
nameless = F.lit(None).cast("string")
verdicts = audit(
    published.withColumn("task", nameless),
    journal.withColumn("task", nameless),
    until=datetime.now(UTC),
    late_after=3600,
)
verdicts.write.parquet(f"{folder}/verdicts")
followed = follow(
    published.withColumn("task", nameless),
    journal.withColumn("task", nameless),
    f"{folder}/followed",
    late_after=3600,
    patience=0,
)
followed_so_far = Counter(row.verdict for row in followed.collect())
last = read_verdicts(spark, f"{folder}/followed").collect()
assert followed_so_far == Counter(row.verdict for row in last)
verdicts = spark.read.parquet(f"{folder}/verdicts")

in_catalogue = "table:verdicts"
assert existing(spark, in_catalogue, s.VERDICTS) is None
merge(verdicts, in_catalogue, ["task_id", "retries"])
overwrite(verdicts, in_catalogue)

spark.dataSource.register(JournalSource)
writing = (
    spark.readStream.format(JOURNAL)
    .option("broker", broker)
    .load()
    .writeStream.format("parquet")
    .option("checkpointLocation", f"{folder}/checkpoint")
    .trigger(availableNow=True)
)
despite_a_slow_start(lambda: writing.start(f"{folder}/read-on").awaitTermination())

figures = {
    "plan": summary["messages"],
    "passed": all(verdict["passed"] for verdict in held),
    "published": [done.published, done.rejected, done.failed],
    "again": [again.published, again.already],
    "journal": Counter(row.event for row in journal.collect()),
    "followed": followed_so_far,
    "verdicts": Counter(row.verdict for row in verdicts.collect()),
    "arrived": lateness(verdicts).where("grouping = 'all'").collect()[0].tasks,
    "page": audit_page(verdicts)[0].startswith("<!doctype html>"),
    "in the catalogue": read(spark, in_catalogue, s.VERDICTS).count(),
    "read on": spark.read.schema(s.JOURNAL).parquet(f"{folder}/read-on").count(),
}
spark.stop()
Path(folder, "figures.json").write_text(json.dumps(figures))
