"""``df.write.format("celery_delayed")``: the same rows, written as to any other sink.

For streams, and for who has no use for slices and resuming. Each task publishes its rows and writes
their receipts to a hidden file; the commit on the driver gives these their names, so that a task
that is tried again leaves one receipt a message. Duplicate keys are seen within a task only.

Options: ``job_id``, ``broker``, ``receipts`` (a folder; none are written without it), ``key``
(``key``), ``app``, ``settings`` (JSON), ``past`` (``send``), ``max_rate`` (of each task).
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark import TaskContext
from pyspark.sql import types as t
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)

from . import schema as s
from .prepare import PAST, task_id
from .publish import receipts_of
from .send import Sender, Sent, Target

FORMAT = "celery_delayed"
_TEXT = ("task", "queue", "exchange", "routing_key")


class CelerySink(DataSource):
    """A sink whose rows become delayed Celery tasks."""

    @classmethod
    def name(cls) -> str:
        """Tell the name for ``format``."""
        return FORMAT

    def writer(self, schema: t.StructType, overwrite: bool) -> DataSourceWriter:
        """Write a DataFrame."""
        return _Writer(self.options, schema, overwrite=overwrite)

    def streamWriter(  # noqa: N802 - Spark's
        self, schema: t.StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """Write the micro-batches of a stream."""
        return _StreamWriter(self.options, schema, overwrite=overwrite)


@dataclass
class _Written(WriterCommitMessage):
    """Where a task has put its receipts."""

    path: str | None


class _Job:
    """What both writers do."""

    def __init__(
        self, options: Mapping[str, str], schema: t.StructType, *, overwrite: bool
    ) -> None:
        if overwrite:
            raise ValueError("what has been published cannot be overwritten; use mode('append')")
        given = {name.lower(): value for name, value in options.items()}
        for name in ("job_id", "broker"):
            if not given.get(name):
                raise ValueError(f"the format {FORMAT} needs the option {name}")
        self._job_id = given["job_id"]
        self._key = given.get("key", "key")
        self._past = given.get("past", "send")
        self._receipts = given.get("receipts")
        if self._past not in PAST:
            raise ValueError(f"past must be one of {PAST}, got {self._past!r}")
        for name in (self._key, "task"):
            if name not in schema.names:
                raise ValueError(f"a column {name!r} is needed, got {schema.names}")
        if not {"eta", "countdown"} & set(schema.names):
            raise ValueError(
                f"a column eta (timestamp) or countdown (seconds) is needed, got {schema.names}"
            )
        settings = json.loads(given["settings"]) if "settings" in given else None
        rate = float(given["max_rate"]) if "max_rate" in given else None
        self._target = Target(given["broker"], given.get("app"), settings, rate)
        self._target.ladder()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        attempt = (context.partitionId(), context.attemptNumber()) if context else (0, 0)
        seen: set[str] = set()
        refused: list[Sent] = []
        rows = (row for batch in iterator for row in batch.to_pylist())
        ready = self._ready(rows, seen, refused)
        batches = [
            receipts_of(settled, self._job_id, *attempt)
            for settled in Sender(self._target).send(ready)
        ]
        batches.append(receipts_of(refused, self._job_id, *attempt))
        if self._receipts is None:
            bad = next((each for each in refused), None)
            if bad is not None:
                raise ValueError(
                    f"{len(refused)} rows cannot be published, the first, of the key "
                    f"{bad.row.get('key')!r}, since {bad.detail}; with the option receipts, such "
                    f"rows have a receipt instead"
                )
            return _Written(None)
        system, folder = _filesystem(self._receipts)
        system.create_dir(folder)
        path = f"{folder}/_{uuid.uuid4()}.parquet"
        pq.write_table(pa.Table.from_batches(batches), path, filesystem=system)
        return _Written(path)

    def commit(self, messages: list[WriterCommitMessage | None], *batch: int) -> None:
        for path in _paths(messages):
            folder, _, name = path.rpartition("/")
            system, _ = _filesystem(str(self._receipts))
            system.move(path, f"{folder}/part-{name.removeprefix('_')}")

    def abort(self, messages: list[WriterCommitMessage | None], *batch: int) -> None:
        for path in _paths(messages):
            system, _ = _filesystem(str(self._receipts))
            system.delete_file(path)

    def _ready(
        self, rows: Iterator[dict[str, Any]], seen: set[str], refused: list[Sent]
    ) -> Iterator[dict[str, Any]]:
        for given in rows:
            row, due = self._row(given), 0
            reason = _reason(row, seen)
            if reason is None:
                now = time.time_ns() // 1000
                due = row["eta"] if row["eta"] is not None else now + round(row["countdown"] * 1e6)
                if self._past == "reject" and due <= now:
                    reason = "due in the past"
            if reason is None:
                seen.add(row["key"])
                yield row
            else:
                refused.append(Sent(row, due, status=s.REFUSED, detail=reason))

    def _row(self, given: dict[str, Any]) -> dict[str, Any]:
        key = given.get(self._key)
        row: dict[str, Any] = {name: given.get(name) for name in _TEXT}
        row["key"] = None if key is None else str(key)
        row["task_id"] = None if key is None else task_id(self._job_id, str(key))
        row["priority"] = given.get("priority")
        countdown = given.get("countdown")
        row["countdown"] = None if countdown is None else float(countdown)
        row["eta"], row["expires"] = _micros(given.get("eta")), _micros(given.get("expires"))
        for name in ("args", "kwargs", "headers"):
            row[name] = _json(given.get(name), mapping=name != "args")
        return row


class _Writer(_Job, DataSourceArrowWriter):
    """Of a DataFrame."""


class _StreamWriter(_Job, DataSourceStreamArrowWriter):
    """Of a stream: a micro-batch that is run again publishes the same task ids."""


def _reason(row: dict[str, Any], seen: set[str]) -> str | None:
    if row["key"] is None:
        return "the key is null"
    if row["key"] in seen:
        return "the key is not unique"
    if not (row["task"] or "").strip():
        return "no task is named"
    if (row["eta"] is None) == (row["countdown"] is None):
        return "both eta and countdown" if row["eta"] else "neither eta nor countdown"
    if row["countdown"] is not None and not abs(row["countdown"]) < 1e12:
        return "countdown is not a number of seconds"
    return None


def _json(value: Any, *, mapping: bool) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if mapping and isinstance(value, list):
        value = dict(value)  # Arrow gives a map as pairs
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    raise TypeError(f"{value!r} has no JSON; make it a string")


def _micros(value: datetime | None) -> int | None:
    if value is None:
        return None
    if value.tzinfo is None:
        value = value.replace(tzinfo=timezone.utc)
    epoch = datetime(1970, 1, 1, tzinfo=timezone.utc)
    return (value - epoch) // (datetime.resolution)


def _filesystem(path: str) -> tuple[Any, str]:
    if "://" in path or path.startswith("file:"):
        system, folder = fs.FileSystem.from_uri(path)
        return system, folder
    return fs.LocalFileSystem(), path


def _paths(messages: list[WriterCommitMessage | None]) -> list[str]:
    return [message.path for message in messages if isinstance(message, _Written) and message.path]
