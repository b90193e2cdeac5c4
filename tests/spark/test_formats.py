"""Tables of Delta Lake and Iceberg, made of what the pipeline writes, and as its input.

Their own libraries do it, which need no Java. For formats inside of Spark, see test_tables.py.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field, Schema, convert_to_deltalake, write_deltalake
from deltalake.schema import PrimitiveType

from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.audit import audit
from kombu_binary_delay.spark.plan import plan, summarize
from kombu_binary_delay.spark.tables import PART, append, overwrite, read

pytestmark = pytest.mark.slow

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


def same(df):
    return rows_of(df.toArrow())


def test_folders_become_tables_of_delta_lake_where_they_are(written):
    for folder, df in written.values():
        expected = same(df)
        # Each append has a folder of its own, and so a partition.
        if parts := list(Path(folder).glob("part=*")):
            by = Schema([Field(PART, PrimitiveType("string"))])
            convert_to_deltalake(folder, partition_by=by, partition_strategy="hive")
        else:
            convert_to_deltalake(folder)
        table = DeltaTable(folder).to_pyarrow_table()
        assert rows_of(table.drop_columns([PART]) if parts else table) == expected
        assert len(expected) == ROWS


def test_folders_become_tables_of_iceberg_where_they_are(written, tmp_path):
    from pyiceberg.catalog.sql import SqlCatalog  # noqa: PLC0415 - to import it takes a second

    where = {"uri": f"sqlite:///{tmp_path}/catalogue.db", "warehouse": tmp_path.as_uri()}
    catalogue = SqlCatalog("lake", **where)
    catalogue.create_namespace("lake")
    for name, (folder, df) in written.items():
        files = [str(path) for path in sorted(tmp_path.glob(f"{name}/**/*.parquet"))]
        table = catalogue.create_table(f"lake.{name}", schema=pq.read_schema(files[0]))
        table.add_files(files)
        assert rows_of(table.scan().to_arrow()) == same(df), folder
    catalogue.engine.dispose()


def test_a_table_of_theirs_is_input(spark, written, tmp_path):
    _, receipts = written["receipts"]
    reminders = receipts.selectExpr("key", "task", "due AS eta")
    folder = str(tmp_path / "reminders")
    write_deltalake(folder, reminders.toArrow())
    df = spark.createDataFrame(DeltaTable(folder).to_pandas())
    assert summarize(plan(df))["messages"] == ROWS
