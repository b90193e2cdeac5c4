"""Read the journal as a table, from the stream on the broker or from files.

``spark.read.format("binary_delay_journal")`` reads the events that exist, and ``readStream`` also
those that follow. Both use the offsets of the stream, so that a read can be repeated. Options:
``broker`` (a URL), ``namespace`` (``kbd``) and, for a batch read, ``partitions`` (1) and
``start``, an offset (0), with ``last``, the event before it as an export writes it, by which
another stream is noticed. Named as Kafka's: ``failOnDataLoss`` (``true``), whether it is an error
that the stream has dropped events after those that were read before; and for a stream
``maxOffsetsPerTrigger``, the most messages of a micro-batch, each of one event or up to a hundred
(200,000; PySpark 4.2 and later).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import kombu
import pyarrow as pa
from amqp.exceptions import NotFound
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as t
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)

from kombu_binary_delay.celery_side.urls import for_kombus_transport, is_broker_url
from kombu_binary_delay.journal import stream_name
from kombu_binary_delay.journal.events import lines
from kombu_binary_delay.wire.deliveries import StreamRecord
from kombu_binary_delay.wire.executor import is_deleted
from kombu_binary_delay.wire.streams import StreamError, pages

from . import schema as s
from .columns import instant
from .prepare import FIRST, LAST
from .tables import Place, append, existing, read

try:
    from pyspark.sql.streaming import datasource as limits
except ImportError:  # before PySpark 4.2
    limits = None  # type: ignore[assignment]
logger = logging.getLogger(__name__)

#: Up to where a stream was read: ``offset``, and ``last``, the :func:`_identity` of the event
#: before it, by which another stream is noticed.
Offset = dict[str, Any]

FORMAT = "binary_delay_journal"
#: The most messages of the stream in a micro-batch, and in one Spark task of it. A message has one
#: event, or up to a hundred.
_TRIGGER, _SHARE = 200_000, 50_000
#: The most events in a batch of Arrow's.
_AT_ONCE = 10_000
_RAW = (
    "event string, id string, task string, retries int, exchange string, key string, "
    "due bigint, at bigint, ladder string, hops int, state string"
)


def read_journal(spark: SparkSession, where: str, *, namespace: str = "kbd") -> DataFrame:
    """Return the journal as it is now: rows of the schema ``JOURNAL``.

    :param where: the URL of a broker; or the place of a table of :func:`export_journal`; or a
        folder with the journal's local files.
    """
    if is_broker_url(where):
        return _load(spark, {"broker": where, "namespace": namespace})
    place = Place.parse(where)
    if place.form == "parquet" and _has_lines(spark, place.where):
        return _columns(spark.read.schema(_RAW).json(f"{place.where}/journal-*.jsonl*"))
    table = read(spark, place, s.JOURNAL)
    has_repeats = _overlaps(table) if place.is_files else _repeats(table)
    return table.distinct() if has_repeats else table


def _repeats(table: DataFrame) -> bool:
    """Return whether concurrent exports have written the same events to a table."""
    # One message of the stream has events of many tasks.
    row = F.xxhash64("offset", "event", "task_id", "at", "due")
    [counts] = table.agg(F.count(row), F.count_distinct(row)).collect()
    return bool(counts[0] != counts[1])


def _overlaps(table: DataFrame) -> bool:
    """Return the same for files: by their first and last offsets, which takes less."""
    file = F.col("_metadata.file_path").alias("file")
    offsets = table.where(F.col("offset").isNotNull()).select(file, "offset").groupBy("file")
    files = offsets.agg(F.min("offset").alias("first"), F.max("offset").alias("last")).collect()
    ranges = sorted((row["first"], row["last"]) for row in files)
    return any(first <= last for (_, last), (first, _) in pairwise(ranges))


def export_journal(spark: SparkSession, broker: str, path: str, *, namespace: str = "kbd") -> None:
    """Append the stream's events since the last export to a table at a place such as a path.

    The offsets in the table show where the last export ended. If the stream has dropped events
    since then, or is another one than it was, the export fails: an audit would take the tasks of
    the gap for lost. Two concurrent exports append the same events; :func:`read_journal` then
    returns each of them once. Each export adds one row
    :data:`~kombu_binary_delay.spark.schema.COMPLETE`, by which an audit knows how far the table
    goes.
    """
    # The end of the stream is found after this time.
    begun = datetime.now(UTC)
    options = {"broker": broker, "namespace": namespace, **_last(spark, path)}
    # In one partition, so in one file, which exists or not: the last offset implies all others.
    events = _load(spark, options)
    append(events.unionByName(_complete(events, begun)).coalesce(1), path)


def _load(spark: SparkSession, options: dict[str, str]) -> DataFrame:
    spark.dataSource.register(JournalSource)
    return spark.read.format(FORMAT).options(**options).load()


def _complete(events: DataFrame, until: datetime) -> DataFrame:
    """Return the row that says until when a journal is complete."""
    known = {"event": F.lit(s.COMPLETE), "at": instant(until)}
    columns = [
        known.get(field.name, F.lit(None)).cast(field.dataType).alias(field.name)
        for field in events.schema
    ]
    return events.sparkSession.range(1, numPartitions=1).select(*columns)


def _last(spark: SparkSession, path: str) -> dict[str, str]:
    """Return the options to read on after the last event in a table; none where it has no event."""
    table = existing(spark, path, s.JOURNAL)
    if table is None:
        return {}
    last = table.agg(F.max("offset").alias("last")).collect()[0]["last"]
    if last is None:
        return {}
    at = F.unix_micros(F.col("at").cast("timestamp_ltz"))
    rows = table.where(F.col("offset") == last).select("event", "task_id", at).collect()
    return {"start": str(int(last) + 1), "last": min(_identity(*row) for row in rows)}


def _identity(event: str | None, task_id: str | None, at: int | None) -> str:
    """Return what tells an event from others; ``at``, in µs, only of one that has no id.

    A table may keep times in whole seconds.
    """
    return json.dumps([event, task_id if task_id is not None or at is None else at // 1_000_000])


def _has_lines(spark: SparkSession, folder: str) -> bool:
    files = spark.read.format("binaryFile").option("pathGlobFilter", "*.jsonl*").load(folder)
    return not files.select("path").limit(1).isEmpty()


def _columns(raw: DataFrame) -> DataFrame:
    """Return the lines of a local file with the same columns as the stream's."""
    return raw.select(
        "event",
        F.col("id").alias("task_id"),
        "retries",
        "task",
        _queue(F.col("exchange"), F.coalesce("key", F.lit(""))).alias("queue"),
        _time("at"),
        _time("due"),
        "ladder",
        "hops",
        "state",
        F.lit(None).cast("bigint").alias("offset"),
    )


def _time(name: str) -> Column:
    micros = F.col(name)
    return F.timestamp_micros(F.when(micros.between(FIRST, LAST), micros)).alias(name)


def _queue(exchange: Column, key: Column) -> Column:
    return F.when(exchange.isNull(), key).otherwise(F.concat(exchange, F.lit("/"), key))


# -- the stream as a data source --------------------------------------------------------------


class JournalSource(DataSource):
    """A data source for the journal in a stream queue, for batch and streaming reads."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return FORMAT

    def schema(self) -> str:
        """Return the columns."""
        return s.JOURNAL

    def reader(self, schema: t.StructType) -> DataSourceReader:
        """Return the reader of the events that exist now."""
        return _Reader(dict(self.options))

    def streamReader(self, schema: t.StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        """Return the reader that also reads events that follow."""
        options = dict(self.options)
        return _StreamReader(options) if limits is None else _LimitedStreamReader(options)


class _Stream:
    """The stream queue that the options name.

    :param may_lose: whether to warn, and not to raise, where the stream has dropped events.
    """

    def __init__(self, options: dict[str, str], *, may_lose: bool = True) -> None:
        if not options.get("broker"):
            raise ValueError(f"the format {FORMAT} needs the option broker, the URL of a RabbitMQ")
        self.options = options
        self.queue = stream_name(options.get("namespace", "kbd"))
        self.may_lose = may_lose
        self._has_warned = False

    def end(self) -> int:
        """Return the offset after the last event now; 0 if there is no event."""
        last = -1
        for page in self._pages("last"):
            last = page[-1].offset
        return last + 1

    def start(self) -> int:
        """Return the first offset that the stream still has."""
        for page in self._pages("first"):
            return page[0].offset
        return 0

    def begin(self, start: int, end: int, last: str | None = None) -> int:
        """Return the offset to read from, given the next offset and the end of the stream.

        :param last: the :func:`_identity` of the last event that was read.
        :raises RuntimeError: if it is not the same stream as before.
        """
        now = f"ends at {end}" if start > end else ""
        if not now and last is not None and not self._may_have(start - 1, last):
            now = f"has another event at {start - 1}"
        if now:
            raise RuntimeError(
                f"the stream {self.queue} was read up to the offset {start}, and now {now}: it has "
                f"been deleted since, and its offsets begin anew; keep what was read from it, and "
                f"go on with another table, or another checkpoint, that is still empty"
            )
        first = self.start()
        # A batch read begins at 0, wherever the stream begins.
        if start > 0 or not self.may_lose:
            self._check_loss(start, first)
        return max(start, first)

    def event(self, offset: int) -> str | None:
        """Return the :func:`_identity` of the event at an offset; None without a readable one."""
        next_offset, body = self._next(offset)
        return _identity_of(body) if next_offset == offset else None

    def _may_have(self, offset: int, event: str) -> bool:
        """Return whether an event is where it was, or has been dropped by retention."""
        next_offset, body = self._next(offset)
        if next_offset == offset:
            return _identity_of(body) == event
        return next_offset is None or self.start() > offset

    def _next(self, offset: int) -> tuple[int | None, str | bytes]:
        """Return the first event from an offset on, with its own; None and nothing without one."""
        for page in self._pages(offset, until=offset):
            for event in page:
                # RabbitMQ sends whole chunks: the first may begin before the offset.
                if event.offset >= offset:
                    return event.offset, event.body
        return None, b""

    def _check_loss(self, start: int, first: int) -> None:
        # Each segment of a stream begins with an entry of RabbitMQ's own, which has an offset.
        if first <= start + 1:
            return
        lost = (
            f"the stream {self.queue} was read up to the offset {start}, and begins at {first} "
            f"now: what was between has passed its retention; read it more often, or raise "
            f"journal_max_age"
        )
        if not self.may_lose:
            raise RuntimeError(
                f"{lost}; to go on without it, export to another table, or as a stream set "
                f"failOnDataLoss=false"
            )
        logger.warning("%s", lost)

    def rows(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield the events in a range of offsets, in batches."""
        last = -1
        for page in self._pages(start, until=end - 1) if start < end else ():
            if last < 0 and page[0].offset > start:
                # Its retention may have passed since the read was planned.
                self._check_loss(start, self.start())
            last = page[-1].offset
            # RabbitMQ sends whole chunks: the first may begin before the offset.
            events = [
                (record.offset, line)
                for record in page
                if start <= record.offset < end
                for line in lines(record.body)
            ]
            for at in range(0, len(events), _AT_ONCE):
                yield self._batch(events[at : at + _AT_ONCE])
            if last >= end - 1:
                return
        if start < end:
            raise RuntimeError(
                f"the stream {self.queue} has given nothing for long before the offset {end}: the "
                f"broker is away, or the stream has been deleted, or cut by its retention, since "
                f"the read began; read it again"
            )

    def _batch(self, events: list[tuple[int, str | bytes]]) -> pa.RecordBatch:
        """Return a batch of all readable events: any program may have written to the stream."""
        try:
            return _batch([_event(*event) for event in events])
        except _UNREADABLE:
            readable = [event for event in events if self._is_readable(*event)]
            return _batch([_event(*event) for event in readable])

    def _is_readable(self, offset: int, body: str | bytes) -> bool:
        try:
            _batch([_event(offset, body)])
        except _UNREADABLE as exc:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "the event at the offset %s of the stream %s cannot be read, and is left out, "
                    "as are further ones of this kind: %s",
                    offset,
                    self.queue,
                    exc,
                )
            return False
        return True

    def _pages(self, begin: int | str, until: int | None = None) -> Iterator[list[StreamRecord]]:
        """Yield the events that the stream has; see :func:`~..wire.streams.pages`."""
        url, tls = for_kombus_transport(self.options["broker"])
        with kombu.Connection(url, ssl=tls) as connection:
            try:
                yield from pages(connection.connection, self.queue, begin, until)
            except NotFound as exc:
                # Else no program has written to it yet.
                if not is_deleted(exc):
                    raise RuntimeError(
                        f"the stream {self.queue} cannot be read now, since its node has stopped "
                        f"or is just starting; try again later"
                    ) from None
            except StreamError as exc:
                raise RuntimeError(
                    f"the stream {self.queue} has been deleted, or its node has stopped, since the "
                    f"read began; read it again: {exc}"
                ) from None


def _number(options: dict[str, str], name: str, default: int, least: int = 1) -> int:
    # Spark's names of options are in lower case here.
    text = options.get(name.lower(), str(default))
    number = int(text) if text.isdecimal() else -1
    if number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {text!r}")
    return number


def _may_lose(options: dict[str, str]) -> bool:
    lossless = options.get("failondataloss", "true").lower()
    if lossless not in {"true", "false"}:
        raise ValueError(f"failOnDataLoss must be true or false, got {lossless!r}")
    return lossless == "false"


class _Reader(DataSourceReader):
    def __init__(self, options: dict[str, str]) -> None:
        self._number = _number(options, "partitions", 1)
        self._start = _number(options, "start", 0, least=0)
        self._last = options.get("last")
        self._stream = _Stream(options, may_lose=not self._start or _may_lose(options))

    def partitions(self) -> Sequence[InputPartition]:
        end = self._stream.end()
        start = self._stream.begin(self._start, end, self._last)
        if start >= end:
            return [InputPartition((0, 0))]  # Spark turns no partition into one without a value
        step = -(-(end - start) // self._number)
        return [InputPartition((at, min(at + step, end))) for at in range(start, end, step)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from self._stream.rows(*partition.value)


class _StreamReader(DataSourceStreamReader):
    def __init__(self, options: dict[str, str]) -> None:
        self._stream = _Stream(options, may_lose=_may_lose(options))
        self._latest: Offset = {}
        self._most = _number(options, "maxOffsetsPerTrigger", _TRIGGER)

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's
        return {"offset": self._stream.start(), "last": None}

    # Before 4.2, Spark calls it without arguments, and treats one without arguments that way.
    def latestOffset(self) -> Offset:  # type: ignore[override]  # noqa: N802 - Spark's
        self._latest = self._up_to(self._end(), self._latest)
        return self._latest

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        high = end["offset"]
        low = self._stream.begin(start["offset"], high, start.get("last"))
        ranges = [(at, min(at + _SHARE, high)) for at in range(low, high, _SHARE)]
        return [InputPartition(range_) for range_ in ranges or [(high, high)]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from self._stream.rows(*partition.value)

    def _end(self) -> int:
        return max(self._stream.end(), self._stream.start())

    def _up_to(self, end: int, before: Offset) -> Offset:
        """Return the offset to read up to, with the event before it, as Spark keeps them.

        :param before: up to where it was read before; empty if that is not known.
        :raises RuntimeError: if it is another stream, or a part is lost. Spark would keep the
            offset, and fail by it again, though a replica was only behind.
        """
        if end == before.get("offset"):
            return before
        if before:
            self._stream.begin(before["offset"], end, before.get("last"))
        return {"offset": end, "last": self._stream.event(end - 1) if end else None}


if limits is not None:

    class _LimitedStreamReader(_StreamReader, limits.SupportsTriggerAvailableNow):
        """The same for Spark from 4.2, which lets a source limit its micro-batches."""

        _target: int | None = None

        def getDefaultReadLimit(self) -> limits.ReadLimit:  # noqa: N802 - Spark's
            return limits.ReadMaxRows(self._most)

        def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's
            self._target = self._end()

        def latestOffset(  # type: ignore[override]  # noqa: N802 - Spark's
            self, start: Offset, limit: limits.ReadLimit
        ) -> Offset:
            end = self._end() if self._target is None else self._target
            if isinstance(limit, limits.ReadMaxRows):
                first = start["offset"]
                if self._stream.may_lose:
                    first = max(first, self._stream.start())
                end = min(end, first + limit.max_rows)
            return self._up_to(end, start)


#: The errors that an event raises which is not a journal event.
_UNREADABLE = (pa.ArrowException, TypeError, ValueError, OverflowError, RecursionError)


def _event(offset: int, body: str | bytes) -> dict[str, Any]:
    return {**json.loads(body), "offset": offset}


def _identity_of(body: str | bytes) -> str | None:
    """Return the least :func:`_identity` of a message's events; None if none can be read."""
    least: str | None = None
    for line in lines(body):
        try:
            row = _batch([_event(0, line)])
        except _UNREADABLE:
            continue
        at = row.column("at").cast(pa.int64())
        identity = _identity(
            *(column[0].as_py() for column in (row.column("event"), row.column("task_id"), at))
        )
        least = identity if least is None else min(least, identity)
    return least


def _batch(events: list[dict[str, Any]]) -> pa.RecordBatch:
    when = pa.timestamp("us", "UTC")
    columns = {
        "event": pa.string(),
        "id": pa.string(),
        "retries": pa.int32(),
        "task": pa.string(),
        "queue": pa.string(),
        "at": when,
        "due": when,
        "ladder": pa.string(),
        "hops": pa.int32(),
        "state": pa.string(),
        "offset": pa.int64(),
    }
    for event in events:
        for name in ("at", "due"):
            if event.get(name) is not None and not FIRST <= event[name] <= LAST:
                event[name] = None  # Spark may refuse to write it, and Python to read it
        key = event.get("key", "")
        event["queue"] = f"{event['exchange']}/{key}" if event.get("exchange") else key
    arrays = [
        pa.array([event.get(name) for event in events], kind) for name, kind in columns.items()
    ]
    names = ["task_id" if name == "id" else name for name in columns]
    return pa.RecordBatch.from_arrays(arrays, names)
