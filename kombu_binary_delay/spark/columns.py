"""What several parts of the pipeline read alike out of a DataFrame. It must not touch a broker."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F


def has(df: DataFrame, column: str) -> bool:
    """Whether there is such a column."""
    return column in df.columns


def due_micros(df: DataFrame, published: Column) -> Column:
    """Tell when each row is due, in microseconds since the epoch; null where it does not say.

    :param published: when it is published, in the same unit: what a ``countdown`` counts from.
    :raises ValueError: where the DataFrame has neither ``eta`` nor ``countdown``.
    """
    times = []
    if has(df, "eta"):
        times.append(F.unix_micros(F.col("eta").cast("timestamp")))
    if has(df, "countdown"):
        seconds = F.col("countdown").cast("double")
        sane = F.when(F.abs(seconds) < 1e12, seconds)  # NaN is above all numbers to Spark
        times.append(published + F.ceil(sane * 1_000_000).cast("bigint"))
    if not times:
        raise ValueError(
            f"a column eta (timestamp) or countdown (seconds) is needed, got {df.columns}"
        )
    return F.coalesce(*times)
