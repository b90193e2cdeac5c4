"""The same rows, written as to any other sink."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from pyspark.sql import functions as F

from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.prepare import task_id
from kombu_binary_delay.spark.sink import FORMAT, CelerySink

FAR = datetime.now(timezone.utc) + timedelta(days=1)


@pytest.fixture
def rows(spark):
    spark.dataSource.register(CelerySink)
    return spark.range(40, numPartitions=2).select(
        F.concat(F.lit("k"), "id").alias("key"),
        F.lit("t").alias("task"),
        F.array("id").alias("args"),
        F.create_map(F.lit("x"), F.col("id")).alias("kwargs"),
        F.lit(FAR).alias("eta"),
    )


def test_rows_are_published_and_their_receipts_committed(spark, rows, vhost, tmp_path):
    receipts = str(tmp_path / "receipts")
    bad = rows.limit(1).withColumn("task", F.lit(None).cast("string"))
    options = {"job_id": "j", "broker": vhost.url, "receipts": receipts}
    rows.unionByName(bad).write.format(FORMAT).mode("append").options(**options).save()
    found = spark.read.schema(s.RECEIPTS).parquet(receipts).collect()
    published = {row.key: row.task_id for row in found if row.status == s.PUBLISHED}
    assert published == {f"k{n}": task_id("j", f"k{n}") for n in range(40)}
    [refused] = [row for row in found if row.status == s.REFUSED]
    assert (refused.key, refused.detail) == ("k0", "no task is named")


def test_a_stream_is_published_as_it_comes(spark, rows, vhost, tmp_path):
    source, receipts = str(tmp_path / "source"), str(tmp_path / "receipts")

    def run():
        query = (
            spark.readStream.schema(rows.schema)
            .parquet(source)
            .writeStream.format(FORMAT)
            .options(job_id="j", broker=vhost.url, receipts=receipts)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return spark.read.schema(s.RECEIPTS).parquet(receipts).count()

    rows.limit(10).write.parquet(source)
    assert run() == 10
    rows.limit(5).withColumn("key", F.concat(F.lit("new-"), "key")).write.mode("append").parquet(
        source
    )
    assert run() == 15
    assert run() == 15


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"broker": "amqp://"}, "needs the option job_id"),
        ({"job_id": "j"}, "needs the option broker"),
        ({"job_id": "j", "broker": "amqp://", "past": "drop"}, "past must be one of"),
        ({"job_id": "j", "broker": "amqp://", "key": "id"}, "a column 'id' is needed"),
        ({"job_id": "j", "broker": "amqp://", "settings": '{"tik": 1}'}, "unknown setting 'tik'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(rows, options, words):
    with pytest.raises(Exception, match=words):
        rows.write.format(FORMAT).mode("append").options(**options).save()
