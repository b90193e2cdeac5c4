"""Purpose: an export and an audit, in each of which an executor is killed with what it has done.

Given a broker, a folder with the table `receipts`, and the time up to which the audit is to judge,
it writes `journal` and `verdicts`, and for each executor killed a file `killed/PHASE` with its
process id.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceReader
    from pyspark.sql.types import StructType

from pyspark.sql import SparkSession

from kombu_binary_delay.spark import journal
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.audit import audit
from kombu_binary_delay.spark.journal import export_journal, read_journal
from kombu_binary_delay.spark.tables import overwrite, read

EXPORTING, AUDITING = "exporting", "auditing"
FOLDER = "KBD_KILLED"


def kill_once(phase: str) -> None:
    """Kill the executor of this Spark task, if none has been killed in this phase."""
    # The parent of the worker is a daemon, and that one's is the executor.
    status = Path(f"/proc/{os.getppid()}/stat").read_text()
    executor = int(status.rpartition(")")[2].split()[1])
    assert "ExecutorBackend" in Path(f"/proc/{executor}/cmdline").read_text()
    try:
        with Path(os.environ[FOLDER], phase).open("x") as file:
            file.write(str(executor))
    except FileExistsError:
        return
    os.kill(executor, signal.SIGKILL)


def passed_on(phase: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield all rows; before the end, the executor dies."""
    from tests.spark.killed_executors import kill_once  # noqa: PLC0415 - on an executor

    for batch in batches:
        yield batch
        kill_once(phase)


class DyingSource(journal.JournalSource):
    """A journal whose first reader dies."""

    def reader(self, schema: StructType) -> DataSourceReader:
        return DyingReader(dict(self.options))


class DyingReader(journal._Reader):  # noqa: SLF001 - so that it is read as usual
    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        yield from passed_on(EXPORTING, super().read(partition))


def main(broker: str, folder: str, until: str) -> None:
    """Start two executors, and lose one in each phase."""
    spark = (
        SparkSession.builder.master("local-cluster[2,1,512]")
        .config("spark.executor.memory", "512m")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    usual, journal.JournalSource = journal.JournalSource, DyingSource  # type: ignore[misc]
    export_journal(spark, broker, f"{folder}/journal")
    journal.JournalSource = usual  # type: ignore[misc]
    receipts = read(spark, f"{folder}/receipts", s.RECEIPTS)
    events = read_journal(spark, f"{folder}/journal")
    verdicts = audit(receipts, events, until=datetime.fromisoformat(until))
    # After the shuffle: what the executor has made for the others is lost as well.
    overwrite(verdicts.mapInArrow(partial(passed_on, AUDITING), s.VERDICTS), f"{folder}/verdicts")
    spark.stop()


if __name__ == "__main__":
    Path(os.environ[FOLDER]).mkdir()
    main(*sys.argv[1:])
