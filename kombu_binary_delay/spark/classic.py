"""What only a session with a Java process of its own has. Elsewhere, the pipeline does without.

Spark Connect has no SparkContext, and Databricks serverless no cache. This module must not touch a
broker.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, SparkSession


def tracker(session: SparkSession) -> Any:
    """Return what knows how far Spark is; None if the session has no such thing."""
    try:
        return session.sparkContext.statusTracker()
    # Each release raises another error.
    except Exception:  # noqa: BLE001
        return None


def cached(df: DataFrame) -> DataFrame:
    """Return the rows so that they are computed once, where Spark can keep them."""
    try:
        return df.cache()
    except Exception:  # noqa: BLE001 - as above
        return df


def hush(session: SparkSession) -> None:
    """Let PySpark print no traceback of its own when the Java process dies."""
    try:
        server: Any = session.sparkContext._accumulatorServer  # noqa: SLF001 - it has no other name
    except Exception:  # noqa: BLE001 - as above
        return
    # It counts accumulators in a thread, where nothing catches its errors.
    server.handle_error = lambda *_: None
