"""Tables of Delta Lake and Iceberg, made of what the pipeline writes, and as its input.

Their own libraries do it, which need no Java. For formats inside of Spark, see test_tables.py.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, convert_to_deltalake, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog

from kombu_binary_delay import Ladder
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.audit import audit
from kombu_binary_delay.spark.plan import plan, summarize
from kombu_binary_delay.spark.tables import append, overwrite, read

PAST = datetime.now(UTC).replace(microsecond=123456) - timedelta(days=1)
ROWS = 20


@pytest.fixture
def written(spark, tmp_path):
    """The folders of a pipeline: receipts, journal and verdicts, each with two appends or one."""
    folders = {name: str(tmp_path / name) for name in ("receipts", "journal", "verdicts")}
    for half in range(2):
        numbers = range(half * ROWS // 2, (half + 1) * ROWS // 2)
        receipts = [
            ("j", f"k{n}", f"i{n}", "t", "q", PAST, PAST, 1, 0, 0, s.PUBLISHED, None, None)
            for n in numbers
        ]
        events = [(s.SCHEDULED, f"i{n}", 0, "t", "q", PAST, PAST, "l", 1, None, n) for n in numbers]
        append(spark.createDataFrame(receipts, s.RECEIPTS), folders["receipts"])
        append(spark.createDataFrame(events, s.JOURNAL), folders["journal"])
    tables = [
        read(spark, folders["receipts"], s.RECEIPTS),
        read(spark, folders["journal"], s.JOURNAL),
    ]
    overwrite(audit(*tables, until=datetime.now(UTC)), folders["verdicts"])
    return {name: (folder, read(spark, folder)) for name, folder in folders.items()}


def rows_of(table):
    """Return an Arrow table's rows, in the order of their task ids."""
    return sorted(table.to_pylist(), key=lambda row: row["task_id"])


def arrow(df):
    """Return rows as an Arrow table, in PySpark 3.5 too."""
    if hasattr(df, "toArrow"):
        return df.toArrow()
    return pa.Table.from_batches(df._collect_as_arrow())  # noqa: SLF001 - the same, not yet public


def same(df):
    return rows_of(arrow(df))


def test_folders_become_tables_of_delta_lake_where_they_are(written):
    for folder, df in written.values():
        expected = same(df)
        convert_to_deltalake(folder)
        assert rows_of(DeltaTable(folder).to_pyarrow_table()) == expected
        assert len(expected) == ROWS


def test_folders_become_tables_of_iceberg_where_they_are(written, tmp_path):
    where = {"uri": f"sqlite:///{tmp_path}/catalogue.db", "warehouse": tmp_path.as_uri()}
    catalogue = SqlCatalog("lake", **where)
    catalogue.create_namespace("lake")
    for name, (folder, df) in written.items():
        files = [str(path) for path in sorted(tmp_path.glob(f"{name}/*.parquet"))]
        table = catalogue.create_table(f"lake.{name}", schema=pq.read_schema(files[0]))
        table.add_files(files)
        assert rows_of(table.scan().to_arrow()) == same(df), folder
    catalogue.engine.dispose()


def test_a_table_of_theirs_is_input(spark, written, tmp_path):
    _, receipts = written["receipts"]
    reminders = receipts.selectExpr("key", "task", "due AS eta")
    folder = str(tmp_path / "reminders")
    write_deltalake(folder, arrow(reminders))
    df = spark.createDataFrame(DeltaTable(folder).to_pandas())
    [summary] = summarize(plan(df, [Ladder.default()])).collect()
    assert summary.at_once == ROWS  # they are due already
