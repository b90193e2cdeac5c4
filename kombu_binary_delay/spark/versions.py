"""The differences between PySpark 3.5 and later versions; no other module asks for the version.

PySpark 4.0 has data sources that are written in Python, and 4.1 such sinks for streams of Arrow
batches. All else that the pipeline uses is in 3.5. This module must not touch a broker.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as t

try:
    from pyspark.sql import datasource
except ImportError:
    HAS_SOURCES = HAS_STREAM_SINKS = False
else:
    HAS_SOURCES = True
    HAS_STREAM_SINKS = hasattr(datasource, "DataSourceStreamArrowWriter")

try:
    from pyspark.sql.streaming import datasource as limits
except ImportError:  # before PySpark 4.2
    limits = None  # type: ignore[assignment]

if TYPE_CHECKING or HAS_SOURCES:
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceArrowWriter,
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
        InputPartition,
        WriterCommitMessage,
    )
else:

    class DataSource:
        """Stands in for the base class of sources; :func:`load` reads them."""

        def __init__(self, options: dict[str, str]) -> None:
            self.options = options

    class InputPartition:
        """Stands in for the part of a source that one Spark task reads."""

        def __init__(self, value: Any) -> None:
            self.value = value

    # No instance of these is made: without data sources, a sink is refused when it is imported.
    DataSourceReader = DataSourceStreamReader = object
    DataSourceArrowWriter = DataSourceStreamWriter = DataSourceWriter = object
    WriterCommitMessage = object

if TYPE_CHECKING or HAS_STREAM_SINKS:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
else:
    # No instance of it is made: a stream is refused before.
    DataSourceStreamArrowWriter = DataSourceStreamWriter


def check_sinks(name: str) -> None:
    """Check that a DataFrame can be written to a sink in Python.

    :raises ImportError: names what PySpark lacks, and the version that has it.
    """
    if not HAS_SOURCES:
        raise ImportError(
            f"the format {name} needs the module pyspark.sql.datasource of PySpark 4.0 or later, "
            f"and this is PySpark {pyspark.__version__}; use publish() instead"
        )


def check_stream_sinks(name: str) -> None:
    """Check that a stream can be written to a sink in Python.

    :raises NotImplementedError: names what PySpark lacks, and the version that has it.
    """
    if not HAS_STREAM_SINKS:
        raise NotImplementedError(
            f"to write a stream to the format {name} needs DataSourceStreamArrowWriter of "
            f"PySpark 4.1 or later, and this is PySpark {pyspark.__version__}; use publish() in "
            f"foreachBatch instead"
        )


def load(spark: SparkSession, source: type[DataSource], options: dict[str, str]) -> DataFrame:
    """Return the rows of a data source, whether or not Spark knows such sources."""
    if not HAS_SOURCES:
        return load_by_map(spark, source, options)
    spark.dataSource.register(source)
    return spark.read.format(source.name()).options(**options).load()


def load_by_map(
    spark: SparkSession, source: type[DataSource], options: dict[str, str]
) -> DataFrame:
    """Return the rows of a data source by ``mapInArrow``; its partitions are found at once."""

    def find(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            found = source(options).reader(t.StructType()).partitions()
            yield pa.RecordBatch.from_pydict({"part": [pickle.dumps(each) for each in found]})

    found = spark.range(1, numPartitions=1).mapInArrow(find, "part binary").collect()
    parts = [bytes(row["part"]) for row in found]

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reader = source(options).reader(t.StructType())
        for batch in batches:
            for place in batch.column(0).to_pylist():
                # It is what `find` has made.
                part: InputPartition = pickle.loads(parts[place])  # noqa: S301
                yield from reader.read(part)

    places = spark.range(len(parts), numPartitions=len(parts))
    return places.mapInArrow(read, source(options).schema())


__all__ = [
    "HAS_SOURCES",
    "HAS_STREAM_SINKS",
    "DataSource",
    "DataSourceArrowWriter",
    "DataSourceReader",
    "DataSourceStreamArrowWriter",
    "DataSourceStreamReader",
    "DataSourceStreamWriter",
    "DataSourceWriter",
    "InputPartition",
    "WriterCommitMessage",
    "check_sinks",
    "check_stream_sinks",
    "limits",
    "load",
    "load_by_map",
]
