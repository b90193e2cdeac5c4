"""Forecast the broker's load: what enters, leaves and waits in each level queue, by the minute.

A message's route follows from its delay: it enters the queue of its first digit when it is
published, and each further queue when it leaves the one before. So the plan of a ladder is a sum
over messages and digits, computed with numpy on the executors and added up by Spark. This module
must not touch a broker.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from kombu_binary_delay.ladder.ladder import Ladder
from kombu_binary_delay.ladder.topology import Topology

from .checks import check_limits, check_number, check_whole
from .columns import due_micros, has, messages, published_micros, tried

#: One row for each scope and minute in which something entered or left.
PLAN_SCHEMA = (
    "ladder string, scope string, level int, digit bigint, queue string, wait_ms bigint, "
    "minute timestamp_ltz, entered bigint, left bigint, waiting bigint, most bigint, "
    "waiting_bytes bigint, most_bytes bigint"
)
#: What a row of a plan counts: a level queue, the whole ladder, or messages that never enter it.
QUEUE, LADDER, AT_ONCE, BEYOND, UNDATED = SCOPES = (
    "queue",
    "ladder",
    "at once",
    "beyond the ladder",
    "no due time",
)

#: ``place`` is an index in :func:`_places`: one key costs Spark less than several.
_COUNTS = (
    "place int, digit bigint, bin bigint, "
    "entered bigint, left bigint, bytes_in bigint, bytes_out bigint, peak bigint, peak_bytes bigint"
)
_SUMS = ("entered", "left", "bytes_in", "bytes_out", "peak", "peak_bytes")
_NONE = np.iinfo(np.int64).min
#: Into how many parts a minute is cut to find its greatest number waiting, and all minutes of a
#: level in a chunk, at most; and from how many minutes of waiting on it is not: those that leave in
#: a minute are then few among those that wait.
_PARTS = 600
_MOST_PARTS = 600_000
_LONG = 10
_CHUNK = 1_000_000  # rows counted at once: Spark adds up the counts of every chunk


@dataclass(frozen=True)
class Variant:
    """A ladder, and how long before the due time messages are published to it.

    :param ladder: its tick and radices.
    :param horizon: seconds; a message is published at most this long before it is due, as by a
        rolling job. None publishes it at the time in the data.
    :param queue_per_delay: whether each distinct delay has a separate queue, as with the setting
        of that name for delays that are used repeatedly.
    """

    ladder: Ladder
    horizon: float | None = None
    queue_per_delay: bool = False

    @property
    def name(self) -> str:
        """The ladder's name, with the options in which the variant differs."""
        per_delay = ", a queue per delay" if self.queue_per_delay else ""
        within = "" if self.horizon is None else f", within {self.horizon:g} s"
        return f"{self.ladder.name}{per_delay}{within}"


@dataclass(frozen=True)
class Limits:
    """The limits of a broker's load; None sets no limit.

    :param waiting: messages on the ladder at any moment.
    :param queue_waiting: messages in one level queue at any moment.
    :param bytes: of the messages on the ladder at any moment, one copy of each.
    :param hops_per_second: messages that level queues dead-letter, mean of a minute.
    :param published_per_second: messages that enter the ladder, mean of a minute.
    :param queues: distinct level queues.
    :param beyond: messages whose delay is longer than the ladder.
    :param undated: rows without a due time, or with a time that cannot be read.
    :raises ValueError: for a limit that is not a finite number >= 0, or for 0 hops per second.
    """

    waiting: float | None = None
    queue_waiting: float | None = None
    bytes: float | None = None
    hops_per_second: float | None = None
    published_per_second: float | None = None
    queues: float | None = None
    beyond: float | None = 0
    undated: float | None = 0

    def __post_init__(self) -> None:
        # A load divided by it is a time.
        check_limits(asdict(self), above_0=("hops_per_second",))


def plan(
    df: DataFrame,
    ladders: Ladder | Variant | Sequence[Ladder | Variant],
    *,
    message_bytes: int = 500,
    every: int = 60,
) -> DataFrame:
    """Return the load of every level queue, minute by minute, on one or several ladders.

    :param df: one row per message; rows with another ``action`` do not count. ``eta`` is a
        timestamp, or ``countdown`` a number of seconds from ``published``; ``published`` is a
        timestamp, by default now; ``bytes`` is the size of the message, by default
        ``message_bytes``. Times can be text. A row in which that is not a time counts as without a
        due time.
    :param every: the length of a "minute", in seconds.
    :returns: rows of :data:`PLAN_SCHEMA`. ``waiting`` is the depth at the end of the minute, and
        ``most`` is at least the greatest depth in it; both are also in bytes. A minute without a
        row is like the one before it. The broker's processing time is not included: a message
        leaves a queue the moment that it is due.
    :raises ValueError: for an invalid parameter or column.
    """
    variants = _variants(ladders)
    check_whole("every", every, unit=" s")
    check_whole("message_bytes", message_bytes, least=0)
    df = messages(df)
    published = published_micros(df)
    size = tried(df, "bytes", "bigint") if has(df, "bytes") else F.lit(message_bytes)
    rows = df.select(
        F.coalesce(published, F.lit(time.time_ns() // 1000)).cast("bigint").alias("published"),
        F.coalesce(due_micros(df, published), F.lit(_NONE)).cast("bigint").alias("due"),
        F.coalesce(size, F.lit(message_bytes)).cast("bigint").alias("bytes"),
    )
    width = every * 1_000_000

    places = _places(variants)

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        indexes = {place: index for index, place in enumerate(places)}
        for chunk in _chunks(batches):
            for number, variant in enumerate(variants):
                for scope, level, counts in _count(variant, *chunk, width):
                    yield _batch(indexes[number, scope, level], counts)

    summed = (
        rows.mapInArrow(count, _COUNTS)
        .groupBy("place", "digit", "bin")
        .agg(*(F.sum(each).alias(each) for each in _SUMS))
    )
    # Without levels, a digit is a number of ticks.
    ladder_of = [variants[number].ladder for number, _, _ in places]
    weights = [
        ladder.tick if level < 0 else ladder.weights[-1 - level]
        for ladder, (_, _, level) in zip(ladder_of, places, strict=True)
    ]
    counted = summed.withColumns(
        {
            "variant": _nth([number for number, _, _ in places], F.col("place")),
            "scope": _nth([SCOPES.index(scope) for _, scope, _ in places], F.col("place")),
            "level": _nth([level for _, _, level in places], F.col("place")),
            "wait_ms": F.col("digit") * _nth(weights, F.col("place")),
        }
    )
    so_far = (
        Window.partitionBy("place", "digit")
        .orderBy("bin")
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    waiting = F.sum(F.col("entered") - F.col("left")).over(so_far)
    waiting_bytes = F.sum(F.col("bytes_in") - F.col("bytes_out")).over(so_far)
    is_queue = F.col("scope") == SCOPES.index(QUEUE)
    return counted.select(
        _nth([variant.name for variant in variants], F.col("variant")).alias("ladder"),
        _nth(SCOPES, F.col("scope")).alias("scope"),
        F.when(is_queue & (F.col("level") >= 0), F.col("level")).alias("level"),
        F.when(is_queue, F.col("digit")).alias("digit"),
        F.when(is_queue, _queue_name(variants)).alias("queue"),
        F.when(is_queue, F.col("wait_ms")).alias("wait_ms"),
        F.timestamp_micros(F.col("bin") * width).alias("minute"),
        "entered",
        "left",
        waiting.alias("waiting"),
        (waiting - F.col("entered") + F.col("left") + F.col("peak")).alias("most"),
        waiting_bytes.alias("waiting_bytes"),
        (waiting_bytes - F.col("bytes_in") + F.col("bytes_out") + F.col("peak_bytes")).alias(
            "most_bytes"
        ),
    )


def summarize(plan: DataFrame, *, every: int = 60) -> DataFrame:
    """Return one row per ladder of a plan: the values that :class:`Limits` limit, and the hops.

    :param every: the length of a "minute" in seconds, the same as for :func:`plan`.
    """
    scope = F.col("scope")

    def total(name: str) -> Column:
        return F.coalesce(F.sum(F.when(scope == name, F.col("entered"))), F.lit(0))

    def peak(name: str, column: str) -> Column:
        return F.coalesce(F.max(F.when(scope == name, F.col(column))), F.lit(0))

    by_minute = plan.groupBy("ladder", "minute").agg(
        F.sum(F.when(scope == QUEUE, F.col("left"))).alias("hops"),
        F.sum(F.when(scope == LADDER, F.col("entered"))).alias("published"),
    )
    rates = by_minute.groupBy("ladder").agg(
        (F.coalesce(F.max("hops"), F.lit(0)) / every).alias("hops_per_second"),
        (F.coalesce(F.max("published"), F.lit(0)) / every).alias("published_per_second"),
    )
    deepest = F.max_by("queue", F.when(scope == QUEUE, F.col("most")))
    return (
        plan.groupBy("ladder")
        .agg(
            total(LADDER).alias("messages"),
            total(QUEUE).alias("hops"),
            peak(LADDER, "most").alias("waiting"),
            F.max_by("minute", F.when(scope == LADDER, F.col("most"))).alias("waiting_at"),
            peak(QUEUE, "most").alias("queue_waiting"),
            deepest.alias("deepest_queue"),
            peak(LADDER, "most_bytes").alias("bytes"),
            F.count_distinct(F.when(scope == QUEUE, F.col("queue"))).alias("queues"),
            total(AT_ONCE).alias("at_once"),
            total(BEYOND).alias("beyond"),
            total(UNDATED).alias("undated"),
        )
        .join(rates, "ladder")
        .withColumn(
            "hops_per_message",
            F.when(F.col("messages") > 0, F.col("hops") / F.col("messages")).otherwise(F.lit(0.0)),
        )
    )


def check(summary: DataFrame, limits: Limits) -> DataFrame:
    """Compare a summary with limits.

    :returns: ``ladder, limit, planned, allowed, passed``, one row per limit.
    """
    given = {name: value for name, value in asdict(limits).items() if value is not None}
    judged = [
        F.struct(
            F.lit(name).alias("limit"),
            F.col(name).cast("double").alias("planned"),
            F.lit(float(value)).alias("allowed"),
            (F.col(name) <= value).alias("passed"),
        )
        for name, value in given.items()
    ]
    if not judged:
        raise ValueError(
            f"no limit is given; set one of {', '.join(each.name for each in fields(Limits))}"
        )
    return summary.select("ladder", F.explode(F.array(*judged)).alias("each")).select(
        "ladder", "each.*"
    )


# -- counting, on the executors ---------------------------------------------------------------


def _chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Any, Any, Any]]:
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        if rows >= _CHUNK:
            yield _arrays(held)
            held, rows = [], 0
    if rows:
        yield _arrays(held)


def _arrays(batches: list[pa.RecordBatch]) -> tuple[Any, Any, Any]:
    table = pa.Table.from_batches(batches)
    published, due, size = (column.to_numpy() for column in table.columns)
    # Usually all have the same, and then counts are enough.
    smallest = int(size.min())
    return published, due, smallest if smallest == size.max() else size


#: Digit, bin and the sums of ``_SUMS``.
_Counts = tuple[Any, ...]


def _count(
    variant: Variant, published: Any, due: Any, size: Any, width: int
) -> Iterator[tuple[str, int, _Counts]]:
    """Count the load of one chunk of messages on one ladder; times in microseconds.

    :param size: one number if all messages have the same size.
    :returns: scope, level and counts.
    """
    ladder = variant.ladder
    if variant.horizon is not None:
        # Without a due time, the difference would overflow.
        earliest = np.where(due == _NONE, published, due) - round(variant.horizon * 1_000_000)
        published = np.maximum(published, earliest)
    undated = due == _NONE
    at_once = ~undated & (due <= published)
    # Rounded up to ticks: never early.
    ticks = -(-(np.where(undated, published, due) - published) // (ladder.tick * 1000))
    beyond = ticks * ladder.tick > ladder.maximum
    delayed = ~(undated | at_once | beyond)
    for scope, mask in ((AT_ONCE, at_once), (BEYOND, beyond), (UNDATED, undated)):
        if mask.any():
            at = published[mask]
            nothing = np.zeros(len(at), np.int64)
            yield scope, -1, _cells(nothing, at, at, _of(size, mask), width)
    if not delayed.all():
        published, ticks, size = published[delayed], ticks[delayed], _of(size, delayed)
    if not len(published):
        return
    at = published.copy()
    end = at + ticks * (ladder.tick * 1000)
    yield LADDER, -1, _cells(np.zeros(len(at), np.int64), at, end, size, width)
    if variant.queue_per_delay:
        yield QUEUE, -1, _cells(ticks, at, end, size, width, ladder.tick)
        return
    highest = int(ticks.max())
    base = ladder.maximum // ladder.tick + 1
    for level, radix in zip(reversed(range(ladder.levels)), ladder.radices, strict=True):
        base //= radix
        if base > highest:
            continue
        digits = ticks // base
        waits = digits.nonzero()[0]
        ticks = ticks - digits * base
        if not len(waits):
            continue
        digit, enters, weight = digits[waits], at[waits], base * ladder.tick
        leaves = enters + digit * (weight * 1000)
        at[waits] = leaves
        yield QUEUE, level, _cells(digit, enters, leaves, _of(size, waits), width, weight)


def _of(size: Any, which: Any) -> Any:
    return size[which] if isinstance(size, np.ndarray) else size


def _cells(digit: Any, enters: Any, leaves: Any, size: Any, width: int, weight: int = 0) -> _Counts:
    """Count what enters and leaves, by digit and bin: one row for each cell where something does.

    :param weight: the wait of the digit 1, in milliseconds; 0 if only the whole is counted.
    """
    first, last = enters // width, leaves // width
    low = int(first.min())
    span = int(last.max()) - low + 1
    row = digit * span - low
    came, went = row + first, row + last
    lowest = int(came.min())
    room = int(went.max()) - lowest + 1
    if room <= 4 * len(came):
        found, ins, outs = None, came - lowest, went - lowest
    else:
        found, moves = np.unique(np.concatenate([came, went]), return_inverse=True)
        ins, outs, room = moves[: len(came)], moves[len(came) :], len(found)
    entered, left = np.bincount(ins, minlength=room), np.bincount(outs, minlength=room)
    if isinstance(size, np.ndarray):
        bytes_in = np.bincount(ins, weights=size, minlength=room).astype(np.int64)
        bytes_out = np.bincount(outs, weights=size, minlength=room).astype(np.int64)
    else:
        bytes_in, bytes_out = entered * size, left * size
    if found is None:
        used = (entered + left).nonzero()[0]
        found = used + lowest
        entered, left, bytes_in, bytes_out = (
            each[used] for each in (entered, left, bytes_in, bytes_out)
        )
    peak, peak_bytes = entered.copy(), bytes_in.copy()
    # If some leave in the minute in which others enter, not all are in the queue at once.
    both = (left > 0) & (entered > 1)
    if weight * 1000 < _LONG * width and both.any():
        cells = found[both]
        parts = max(min(_PARTS, _MOST_PARTS // len(cells)), 1)
        coming = _parts(cells, came, enters % width * parts // width, parts)
        going = _parts(cells, went, leaves % width * parts // width, parts)
        peak[both] = _peaks(coming, going, None, len(cells), parts)
        if isinstance(size, np.ndarray):
            peak_bytes[both] = _peaks(coming, going, size, len(cells), parts)
        else:
            peak_bytes[both] = peak[both] * size
    digits, bins = np.divmod(found, span)
    return digits, bins + low, entered, left, bytes_in, bytes_out, peak, peak_bytes


def _batch(place: int, counts: _Counts) -> pa.RecordBatch:
    names = ["place", "digit", "bin", *_SUMS]
    return pa.RecordBatch.from_arrays(
        [pa.array(np.full(len(counts[0]), place, np.int32)), *map(pa.array, counts)], names=names
    )


def _parts(cells: Any, of: Any, part: Any, parts: int) -> tuple[Any, Any]:
    """Return the cell and the part of it for each message, and whether it is in any cell."""
    low, high = int(cells[0]), int(cells[-1])
    if high - low <= 4 * len(of):
        places = np.full(high - low + 1, -1)
        places[cells - low] = np.arange(len(cells))
        inside = (of >= low) & (of <= high)
        place = np.where(inside, places[np.where(inside, of - low, 0)], -1)
        found = place >= 0
    else:
        place = np.minimum(np.searchsorted(cells, of), len(cells) - 1)
        found = cells[place] == of
    return place[found] * parts + part[found], found


def _peaks(came: tuple[Any, Any], went: tuple[Any, Any], size: Any, cells: int, parts: int) -> Any:
    """Return, for each cell, the greatest increase in messages since the cell's beginning.

    Within a part, all arrivals count before all departures, so the result is never too small. Other
    chunks reach their greatest numbers at other moments, so the sum is not too small either.
    """
    ins, outs = (
        np.bincount(
            places, weights=None if size is None else size[found], minlength=cells * parts
        ).reshape(cells, parts)
        for places, found in (came, went)
    )
    present = np.cumsum(ins, axis=1) - np.cumsum(outs, axis=1) + outs
    return present.max(axis=1).astype(np.int64)


# -- names ------------------------------------------------------------------------------------


def _variants(given: Ladder | Variant | Sequence[Ladder | Variant]) -> tuple[Variant, ...]:
    listed = (given,) if isinstance(given, (Ladder, Variant)) else tuple(given)
    variants = tuple(each if isinstance(each, Variant) else Variant(each) for each in listed)
    names = [variant.name for variant in variants]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"ladders to compare must be given, each once; got {names!r}")
    for variant in variants:
        if variant.horizon is not None:
            check_number("horizon", variant.horizon)
    return variants


def _places(variants: Sequence[Variant]) -> list[tuple[int, str, int]]:
    """Return all that is counted separately: the variant's index, a scope, and a level or -1."""
    return [
        (number, scope, level)
        for number, variant in enumerate(variants)
        for scope in SCOPES
        for level in range(-1, variant.ladder.levels if scope == QUEUE else 0)
    ]


def _nth(values: Sequence[str] | Sequence[int], index: Column) -> Column:
    return F.element_at(F.array(*map(F.lit, values)), index + 1)


def _queue_name(variants: Sequence[Variant]) -> Column:
    """Return the name of a level queue, as in the topology."""
    bits = F.bin("digit")
    queue = F.lit(None).cast("string")
    for number, variant in enumerate(variants):
        topology = Topology(variant.ladder)
        if variant.queue_per_delay:
            name = F.concat(
                F.lit(f"{topology.direct}."), F.col("wait_ms").cast("string"), F.lit("ms")
            )
        else:
            levels = range(variant.ladder.levels)
            level = F.greatest(F.col("level"), F.lit(0))
            names = _nth([topology.level_name(each) for each in levels], level)
            zeros = _nth([variant.ladder.word(each, 0) for each in levels], level)
            # As many low bits as the level reads, padded with zeros.
            digit = F.concat(zeros, bits).substr(F.length(bits) + 1, F.length(zeros))
            name = F.concat(names, F.lit("."), digit)
        queue = F.when(F.col("variant") == number, name).otherwise(queue)
    return queue
