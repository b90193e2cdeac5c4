"""Purpose: a driver to be killed while several jobs are each in another phase of their work.

Given a broker and a folder, each job says by a file `held/PHASE` that it has come to its phase, and
stays there.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.datasource import DataSourceReader
    from pyspark.sql.types import StructType

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from kombu_binary_delay.spark import journal
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.audit import audit
from kombu_binary_delay.spark.publish import Progress, publish
from kombu_binary_delay.spark.tables import overwrite
from tests.spark.holding_app import COMMITTING, PUBLISHING, RECORDING, hold

STAGING, BETWEEN, CLEANING = "staging", "between", "cleaning"
EXPORTING, AUDITING = "exporting", "auditing"
#: The number of rows of each job, by its phase.
JOBS = {STAGING: 100, PUBLISHING: 1500, COMMITTING: 100, BETWEEN: 300, CLEANING: 100, RECORDING: 50}
SLICE = 100
APP = "tests.spark.holding_app:app"


def rows(spark: SparkSession, phase: str) -> DataFrame:
    """Return the rows of a job; its task has the name of the phase."""
    return spark.range(JOBS[phase], numPartitions=2).select(
        F.concat(F.lit("key-"), "id").alias("key"),
        F.lit(phase).alias("task"),
        (F.lit(86400.0) + F.col("id")).alias("countdown"),
    )


def cancellations(spark: SparkSession) -> DataFrame:
    """Return the rows that cancel one of the jobs."""
    return rows(spark, RECORDING).select("key", F.lit("cancel").alias("action"))


def run(df: DataFrame, phase: str, broker: str, folder: str, **options: Any) -> Progress:
    """Publish the rows of a job."""
    given = {"slice_rows": SLICE if phase == BETWEEN else 200_000, "publishers": 2, **options}
    if phase == PUBLISHING:
        given["publishers"] = 1
    settings = {"journal": "stream", "radix": 2}
    receipts = f"{folder}/{phase}"
    return publish(df, job_id=phase, broker=broker, receipts=receipts, settings=settings, **given)


def held(df: DataFrame, phase: str) -> DataFrame:
    """Return rows that never end."""

    def held(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from tests.spark.holding_app import hold  # noqa: PLC0415 - on an executor

        yield from batches
        hold(phase)

    return df.mapInArrow(held, df.schema)


def write_audit(verdicts: DataFrame, folder: str) -> None:
    """Write verdicts as the subcommand does."""
    overwrite(verdicts, f"{folder}/verdicts")


class HeldSource(journal.JournalSource):
    """A journal that is read to its end, but the reader does not say so."""

    def reader(self, schema: StructType) -> DataSourceReader:
        return HeldReader(dict(self.options))


class HeldReader(journal._Reader):  # noqa: SLF001 - so that it is read as usual
    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        from tests.spark.holding_app import hold  # noqa: PLC0415 - on an executor

        yield from super().read(partition)
        hold(EXPORTING)


class Driver:
    """Runs each job until it is held."""

    def __init__(self, spark: SparkSession, broker: str, folder: str) -> None:
        self._spark, self._given = spark, (broker, folder)

    def run(self) -> None:
        jobs: list[Callable[[], object]] = [self._staging, self._recording]
        jobs += [partial(self._with_app, phase) for phase in (PUBLISHING, COMMITTING)]
        jobs += [partial(self._looking, phase) for phase in (BETWEEN, CLEANING)]
        threads = [threading.Thread(target=each) for each in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _staging(self) -> None:
        run(held(rows(self._spark, STAGING), STAGING), STAGING, *self._given)

    def _with_app(self, phase: str) -> None:
        run(rows(self._spark, phase), phase, *self._given, app=APP)

    def _looking(self, phase: str) -> None:
        def look(progress: Progress) -> None:
            if progress.published and (progress.remaining > 0) is (phase == BETWEEN):
                hold(phase)

        run(rows(self._spark, phase), phase, *self._given, on_progress=look)

    def _recording(self) -> None:
        run(rows(self._spark, RECORDING), RECORDING, *self._given)
        # There are events to export and to audit now.
        threading.Thread(target=self._exporting).start()
        threading.Thread(target=self._auditing).start()
        options: dict[str, Any] = {"app": APP, "resume": True, "publishers": 1}
        run(cancellations(self._spark), RECORDING, *self._given, **options)

    def _exporting(self) -> None:
        journal.JournalSource = HeldSource  # type: ignore[misc]
        broker, folder = self._given
        journal.export_journal(self._spark, broker, f"{folder}/journal")

    def _auditing(self) -> None:
        # Not from the stream, whose source is held.
        _, folder = self._given
        nothing = self._spark.createDataFrame([], s.JOURNAL)
        receipts = self._spark.read.schema(s.RECEIPTS).parquet(f"{folder}/{RECORDING}")
        verdicts = audit(receipts, nothing)
        write_audit(verdicts, folder)
        # The next audit does not come to its end.
        write_audit(held(verdicts, AUDITING), folder)


def main(broker: str, folder: str) -> None:
    """Start a Spark in which all jobs fit, and run them."""
    spark = (
        SparkSession.builder.master("local[16]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    Driver(spark, broker, folder).run()


if __name__ == "__main__":
    Path(os.environ["KBD_HOLD"]).mkdir()
    main(*sys.argv[1:])
