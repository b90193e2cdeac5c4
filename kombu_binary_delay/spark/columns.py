"""What several parts of the pipeline read alike out of a DataFrame. It must not touch a broker."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F


def has(df: DataFrame, column: str) -> bool:
    """Whether there is such a column."""
    return column in df.columns


def check_needed(names: Sequence[str], key: str) -> None:
    """Refuse rows that lack what every task needs.

    :raises ValueError: names the column.
    """
    for name in (key, "task"):
        if name not in names:
            raise ValueError(f"a column {name!r} is needed, got {names}")
    check_time(names)


def check_time(names: Sequence[str]) -> None:
    """Refuse rows that never say when they are due.

    :raises ValueError: names the columns.
    """
    if not {"eta", "countdown"} & set(names):
        raise ValueError(f"a column eta (timestamp) or countdown (seconds) is needed, got {names}")


def due_micros(df: DataFrame, published: Column) -> Column:
    """Return when each row is due, in microseconds since the epoch; null where it does not say.

    :param published: when it is published, in the same unit: what a ``countdown`` counts from.
    :raises ValueError: where the DataFrame has neither ``eta`` nor ``countdown``.
    """
    check_time(df.columns)
    times = []
    if has(df, "eta"):
        times.append(F.unix_micros(F.col("eta").cast("timestamp")))
    if has(df, "countdown"):
        seconds = F.col("countdown").cast("double")
        sane = F.when(F.abs(seconds) < 1e12, seconds)  # NaN is above all numbers to Spark
        times.append(published + F.ceil(sane * 1_000_000).cast("bigint"))
    return F.coalesce(*times)
