"""What several parts of the pipeline read alike out of a DataFrame. It must not touch a broker."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F


def find(names: Sequence[str], column: str) -> str | None:
    """Return the name of a column as it is spelled, in whichever case; None where there is none.

    :raises ValueError: where several columns differ by their case only.
    """
    found = [name for name in names if name.lower() == column.lower()]
    if len(found) > 1:
        raise ValueError(f"the columns {found} differ by their case only; keep one of them")
    return found[0] if found else None


def has(df: DataFrame, column: str) -> bool:
    """Whether there is such a column, in whichever case."""
    return find(df.columns, column) is not None


def named(df: DataFrame, column: str) -> Column:
    """Return a column that is there, in whichever case, and with dots in its name."""
    return F.col(_quoted(df, column))


def tried(df: DataFrame, column: str, kind: str) -> Column:
    """Return a column that is there as another type; null where a value is none of that type.

    A cast would end the job there under ANSI, which is Spark's default.
    """
    return F.expr(f"try_cast({_quoted(df, column)} AS {kind})")


def _quoted(df: DataFrame, column: str) -> str:
    name = find(df.columns, column) or column
    return "`{}`".format(name.replace("`", "``"))


def check_needed(names: Sequence[str], key: str) -> None:
    """Refuse rows that lack what every task needs.

    :raises ValueError: names the column.
    """
    for name in (key, "task"):
        if find(names, name) is None:
            raise ValueError(f"a column {name!r} is needed, got {list(names)}")
    check_time(names)


def check_time(names: Sequence[str]) -> None:
    """Refuse rows that never say when they are due.

    :raises ValueError: names the columns.
    """
    if find(names, "eta") is None and find(names, "countdown") is None:
        raise ValueError(
            f"a column eta (timestamp) or countdown (seconds) is needed, got {list(names)}"
        )


def due_micros(df: DataFrame, published: Column) -> Column:
    """Return when each row is due, in microseconds since the epoch; null where it does not say.

    :param published: when it is published, in the same unit: what a ``countdown`` counts from.
    :raises ValueError: where the DataFrame has neither ``eta`` nor ``countdown``.
    """
    check_time(df.columns)
    times = []
    if has(df, "eta"):
        times.append(F.unix_micros(tried(df, "eta", "timestamp")))
    if has(df, "countdown"):
        seconds = tried(df, "countdown", "double")
        sane = F.when(F.abs(seconds) < 1e12, seconds)  # NaN is above all numbers to Spark
        times.append(published + F.ceil(sane * 1_000_000).cast("bigint"))
    return F.coalesce(*times)
