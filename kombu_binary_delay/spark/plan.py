"""Forecast the load: what is published, due and waiting, minute by minute, in Spark's own SQL.

A broker that gets more to deliver than it can carry does the rest afterwards. So what is due in a
second, beside what the broker carries, says how late tasks will be. This module must not touch a
broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from kombu_binary_delay.ladder.ladder import Ladder

from .checks import check_limits, check_number, check_whole
from .columns import due_micros, has, messages, published_micros, tried, use
from .measured import ONE_QUEUE, SUSTAINED

_MINUTE = 60
_SUMS = ("published", "due", "change", "bytes_change", "hops", "beyond", "undated")


@dataclass(frozen=True)
class Limits:
    """The limits of a broker's load; None sets no limit.

    :param waiting: messages on the ladder at any moment.
    :param bytes: of these messages, one copy of each.
    :param due_per_second: messages that are due, mean of a minute.
    :param published_per_second: messages that are published, mean of a minute.
    :param late: seconds by which the last task of a backlog is late, as an estimate.
    :param beyond: messages whose delay is longer than the ladder.
    :param undated: rows without a due time, or with a time that cannot be read.
    :raises ValueError: for a limit that is not a finite number >= 0.
    """

    waiting: float | None = None
    bytes: float | None = None
    due_per_second: float | None = None
    published_per_second: float | None = None
    late: float | None = None
    beyond: float | None = 0
    undated: float | None = 0

    def __post_init__(self) -> None:
        check_limits(asdict(self))


def plan(
    df: DataFrame,
    ladder: Ladder | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    horizon: float | None = None,
    message_bytes: int = 500,
) -> DataFrame:
    """Return the load minute by minute: rows of :data:`~kombu_binary_delay.spark.schema.PLAN`.

    :param df: one row per message; rows with another ``action`` do not count. ``eta`` is a
        timestamp, or ``countdown`` a number of seconds from ``published``; ``published`` is a
        timestamp, by default now; ``bytes`` is the size of the message, by default
        ``message_bytes``. Times can be text.
    :param ladder: by default, that of the default settings.
    :param columns: see :func:`~kombu_binary_delay.spark.columns.use`.
    :param horizon: seconds; a message is published at most this long before it is due, as by a
        rolling job.
    :raises ValueError: for an invalid parameter or column.
    """
    check_whole("message_bytes", message_bytes, least=0)
    ladder = ladder or Ladder.default()
    df = messages(use(df, columns).rows)
    published, size = published_micros(df), F.lit(message_bytes)
    if has(df, "bytes"):
        size = F.coalesce(tried(df, "bytes", "bigint"), size)
    rows = df.select(
        published.alias("at"), due_micros(df, published).alias("due"), size.alias("size")
    )
    if horizon is not None:
        check_number("horizon", horizon)
        rows = rows.withColumn("at", F.greatest("at", F.col("due") - round(horizon * 1_000_000)))
    now = F.coalesce("at", F.unix_micros(F.now()))
    # Spark's greatest() takes no notice of null.
    due = F.when(F.col("due").isNotNull(), F.greatest("due", "at"))
    rows = rows.withColumns({"at": now}).withColumn("due", due)
    ticks = F.ceil((F.col("due") - F.col("at")) / (ladder.tick * 1000)).cast("bigint")
    is_beyond = F.coalesce(ticks * ladder.tick > ladder.maximum, F.lit(False))
    waits = F.col("due").isNotNull() & ~is_beyond
    rows = rows.select(
        "at",
        "due",
        "size",
        _hops(ladder, ticks).alias("hops"),
        waits.alias("waits"),
        is_beyond.alias("beyond"),
    )
    one, none = F.lit(1), F.lit(0)
    enters = {
        "second": F.col("at"),
        "published": one,
        "due": none,
        "change": F.when(F.col("waits"), one).otherwise(none),
        "bytes_change": F.when(F.col("waits"), F.col("size")).otherwise(none),
        "hops": none,
        "beyond": F.col("beyond").cast("int"),
        "undated": F.col("due").isNull().cast("int"),
    }
    leaves = {
        "second": F.when(F.col("waits"), F.col("due")),
        "published": none,
        "due": one,
        "change": F.lit(-1),
        "bytes_change": -F.col("size"),
        "hops": F.col("hops"),
        "beyond": none,
        "undated": none,
    }
    seconds = (
        rows.select(F.inline(F.array(_event(enters), _event(leaves))))
        .where(F.col("second").isNotNull())
        .groupBy("second")
        .agg(*(F.sum(name).alias(name) for name in _SUMS))
    )
    minute = F.floor(F.col("second") / _MINUTE).alias("minute")
    minutes = seconds.groupBy(minute).agg(
        *(F.sum(name).alias(name) for name in _SUMS), F.max("due").alias("most_due")
    )
    so_far = Window.partitionBy(F.lit(0)).orderBy("minute")
    return minutes.select(
        F.timestamp_seconds(F.col("minute") * _MINUTE).alias("minute"),
        "published",
        "due",
        "most_due",
        F.sum("change").over(so_far).alias("waiting"),
        F.sum("bytes_change").over(so_far).alias("bytes"),
        "hops",
        "beyond",
        "undated",
    )


def summarize(plan: DataFrame, *, carries: float = SUSTAINED) -> dict[str, Any]:
    """Return the figures of a plan: those that :class:`Limits` limit, and further ones.

    :param carries: messages per second that the broker delivers; by default, what was measured.
    :returns: the limits' names with their values; ``messages``, ``hops_per_message``,
        ``waiting_at`` and ``due_at`` (times of the greatest, in seconds since the epoch), and
        ``carries``.
    """
    return figures(plan.orderBy("minute").collect(), carries)


def figures(minutes: Iterable[Row], carries: float) -> dict[str, Any]:
    """Return what :func:`summarize` does, from the rows of a plan in their order."""
    rows = [row.asDict() for row in minutes]
    messages = sum(row["due"] for row in rows)

    def most(name: str) -> Any:
        return max(rows, key=lambda row: row[name], default=None)

    def of(row: Any, name: str) -> float:
        return row[name] if row else 0

    return {
        "messages": messages,
        "hops_per_message": sum(row["hops"] for row in rows) / messages if messages else 0.0,
        "waiting": of(most("waiting"), "waiting"),
        "waiting_at": (rows and most("waiting")["minute"].timestamp()) or None,
        "bytes": of(most("bytes"), "bytes"),
        "due_per_second": of(most("due"), "due") / _MINUTE,
        "due_at": (rows and most("due")["minute"].timestamp()) or None,
        "most_due": of(most("most_due"), "most_due"),
        "published_per_second": of(most("published"), "published") / _MINUTE,
        "late": max(backlog(rows, carries), default=0.0),
        "beyond": sum(row["beyond"] for row in rows),
        "undated": sum(row["undated"] for row in rows),
        "carries": carries,
    }


def backlog(rows: Iterable[Mapping[str, Any]], carries: float) -> list[float]:
    """Estimate how late the last task of each minute is, in seconds.

    What is more than the broker carries waits. And of a second in which more is due than one queue
    passes on, the last is late.
    """
    late, behind, before = [], 0.0, None
    for row in rows:
        at = row["minute"].timestamp()
        if before is not None:
            behind = max(0.0, behind - carries * (at - before - _MINUTE))
        behind, before = max(0.0, behind + row["due"] - carries * _MINUTE), at
        late.append(max(behind / carries, row["most_due"] / ONE_QUEUE - 1, 0.0))
    return late


def check(summary: Mapping[str, Any], limits: Limits) -> dict[str, dict[str, Any]]:
    """Compare a summary with limits.

    :returns: for each limit that is set: planned, allowed, passed.
    """
    allowed = {name: limit for name, limit in asdict(limits).items() if limit is not None}
    return {
        name: {"planned": summary[name], "allowed": limit, "passed": summary[name] <= limit}
        for name, limit in allowed.items()
    }


def _hops(ladder: Ladder, ticks: Column) -> Column:
    """Return the number of level queues on the way: one for each digit that is not zero."""
    hops, base = F.lit(0), ladder.maximum // ladder.tick + 1
    for radix in ladder.radices:
        base //= radix
        digit = F.pmod(F.floor(ticks / F.lit(base)), F.lit(radix))
        hops = hops + F.when(digit > 0, 1).otherwise(0)
    return hops


def _event(values: Mapping[str, Column]) -> Column:
    second = F.floor(values["second"] / 1_000_000)
    fields = [values[name].cast("bigint").alias(name) for name in _SUMS]
    return F.struct(second.alias("second"), *fields)
