"""``df.write.format("celery_delayed")``: publish rows as to any other Spark sink.

Use it for streams, and if you do not need slices and resuming. Each Spark task publishes its rows
and writes their receipts to a hidden file, which it opens before it sends anything. The commit on
the driver renames these files, so that a retried Spark task leaves one receipt per message.
Duplicate keys are detected only within a Spark task.

Options: ``job_id``, ``broker``, ``receipts`` (a folder that driver and executors share), ``key``
(``key``), ``app``, ``settings`` (JSON), ``past`` (``send``), ``max_rate`` (per Spark task).
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark import TaskContext
from pyspark.sql import types as t

from . import schema as s
from .checks import read_number, read_settings
from .prepare import FIRST, LAST, PAST, task_id
from .publish import receipts_of
from .send import WINDOW, Sender, Sent, Target
from .values import check_types, rows
from .versions import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
    check_sinks,
    check_stream_sinks,
)

FORMAT = "celery_delayed"
check_sinks(FORMAT)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")


class CelerySink(DataSource):
    """A sink whose rows become delayed Celery tasks."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return FORMAT

    def writer(self, schema: t.StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a DataFrame."""
        return _Writer(self.options, schema, overwrite=overwrite)

    def streamWriter(  # noqa: N802 - Spark's
        self, schema: t.StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """Return the writer of a stream's micro-batches."""
        check_stream_sinks(FORMAT)
        return _StreamWriter(self.options, schema, overwrite=overwrite)


@dataclass
class _Written(WriterCommitMessage):
    """The place where a Spark task has written its receipts."""

    path: str


class _Job:
    """The part that both writers share."""

    def __init__(
        self, options: Mapping[str, str], schema: t.StructType, *, overwrite: bool
    ) -> None:
        if overwrite:
            raise ValueError("what has been published cannot be overwritten; use mode('append')")
        given = {name.lower(): value for name, value in options.items()}
        for name in ("job_id", "broker", "receipts"):
            if not given.get(name):
                raise ValueError(f"the format {FORMAT} needs the option {name}")
        self._job_id = given["job_id"]
        self._key = given.get("key", "key")
        self._past = given.get("past", "send")
        if self._past not in PAST:
            raise ValueError(f"past must be one of {PAST}, got {self._past!r}")
        check_types(schema, self._key)
        self._schema = schema
        settings = read_settings(given["settings"]) if "settings" in given else None
        rate = read_number("max_rate", given["max_rate"]) if "max_rate" in given else None
        self._target = Target(given["broker"], given.get("app"), settings, rate)
        self._target.ladder()
        self._max_age = self._target.max_age() * 1000
        self._system, self._folder = _filesystem(given["receipts"])
        self._system.create_dir(self._folder)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        attempt = (context.partitionId(), context.attemptNumber()) if context else (0, 0)
        path = f"{self._folder}/_{uuid.uuid4()}.parquet"
        seen: set[str] = set()
        with self._receipts(path) as file:

            def keep(finished: list[Sent]) -> None:
                if finished:
                    file.write_batch(receipts_of(finished, self._job_id, *attempt))

            ready = (self._ready(batch, seen, keep) for batch in iterator)
            for finished in Sender(self._target).send(ready):
                keep(finished)
        return _Written(path)

    def commit(self, messages: list[WriterCommitMessage | None], *batch: int) -> None:
        # Each is tried, and those that have failed once more: their messages have been published,
        # and after an error Spark calls abort, which deletes what is still hidden.
        failed = self._unmoved(self._unmoved(_paths(messages)))
        if failed:
            raise next(iter(failed.values()))

    def abort(self, messages: list[WriterCommitMessage | None], *batch: int) -> None:
        for path in _paths(messages):
            # A commit that has failed may have moved it. What stays is hidden from readers.
            with suppress(OSError):
                self._system.delete_file(path)

    def _unmoved(self, paths: Iterable[str]) -> dict[str, OSError]:
        """Move receipts to the name that readers see; return the errors, by the receipts' paths."""
        failed = {}
        for path in paths:
            name = path.rpartition("/")[2]
            try:
                self._system.move(path, f"{self._folder}/part-{name.removeprefix('_')}")
            except OSError as exc:
                failed[path] = exc
        return failed

    @contextmanager
    def _receipts(self, path: str) -> Iterator[pq.ParquetWriter]:
        nothing = receipts_of([], self._job_id, 0, 0)
        try:
            file = pq.ParquetWriter(path, nothing.schema, filesystem=self._system)
        except OSError as exc:
            raise OSError(
                f"receipts cannot be written: {exc}; they need a folder that the driver and all "
                f"executors see"
            ) from exc
        try:
            with file:
                yield file
        except BaseException:
            with suppress(OSError):
                self._system.delete_file(path)
            raise

    def _ready(
        self,
        batch: pa.RecordBatch,
        seen: set[str],
        keep: Callable[[list[Sent]], None],
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows that can be sent, and keep a receipt of each other row.

        :param seen: the keys of the rows before, to which this adds.
        """
        refused: list[Sent] = []
        for row, unread in rows(batch, self._schema, self._key):
            key = row["key"]
            row["task_id"] = None if key is None else task_id(self._job_id, key)
            now = time.time_ns() // 1000
            due = _due(row, now)
            reason = unread or _reason(row, due, seen)
            reason = reason or self._reason_of_time(row["action"], due, now)
            if row["action"] == s.CANCEL:
                # A time that is not valid is not known.
                row["eta"], row["countdown"] = due, None
            if reason is None:
                seen.add(key)
                yield row
                continue
            # When it was tried: a continuous audit looks for receipts by their time.
            refused.append(Sent(row, due, published_at=now, status=s.REFUSED, detail=reason))
            if len(refused) >= WINDOW:
                keep(refused)
                refused = []
        keep(refused)

    def _reason_of_time(self, action: str, due: int | None, now: int) -> str | None:
        if due is None or action == s.CANCEL:
            return None
        if due <= now and (action == s.RESCHEDULE or self._past == "reject"):
            return "due in the past"
        if due > now + self._max_age and action == s.RESCHEDULE:
            return "due later than amendments are kept, by amendments_max_age"
        return None


class _Writer(_Job, DataSourceArrowWriter):
    """Writes a DataFrame."""


class _StreamWriter(_Job, DataSourceStreamArrowWriter):
    """Writes a stream: a micro-batch that runs again publishes the same task ids."""


def _due(row: dict[str, Any], now: int) -> int | None:
    due: int | None = row["eta"]
    # That of a cancellation would count from now, not from when its task was published.
    if due is None and row["action"] != s.CANCEL and _is_seconds(row["countdown"]):
        due = now + round(row["countdown"] * 1_000_000)
    return due if due is not None and FIRST <= due <= LAST else None


def _is_seconds(countdown: float | None) -> bool:
    return countdown is not None and abs(countdown) < 1e12


def _reason(row: dict[str, Any], due: int | None, seen: set[str]) -> str | None:
    eta, countdown, expires = row["eta"], row["countdown"], row["expires"]
    found = {
        f"action must be one of {', '.join(s.ACTIONS)}": row["action"] not in s.ACTIONS,
        "the key is null": row["key"] is None,
        "the key is not unique": row["key"] in seen,
    }
    if row["action"] == s.RESCHEDULE:
        found["a task is rescheduled by eta alone"] = eta is None or countdown is not None
        found["due outside of the years 1900 to 9999"] = due is None
    if row["action"] != s.PUBLISH:
        return _first(found)
    found |= {
        "no task is named": not (row["task"] or "").strip(),
        "neither eta nor countdown": eta is None and countdown is None,
        "both eta and countdown": eta is not None and countdown is not None,
        "countdown is not a number of seconds": countdown is not None
        and not _is_seconds(countdown),
        "due outside of the years 1900 to 9999": due is None,
        "expires outside of the years 1900 to 9999": expires is not None
        and not FIRST <= expires <= LAST,
    }
    return _first(found)


def _first(found: dict[str, bool]) -> str | None:
    return next((reason for reason, is_so in found.items() if is_so), None)


def _filesystem(path: str) -> tuple[fs.FileSystem, str]:
    if not _SCHEME.match(path):
        return fs.LocalFileSystem(), str(Path(path).absolute())
    try:
        # Hadoop has other names for S3.
        system, folder = fs.FileSystem.from_uri(re.sub("(?i)^s3[an]:", "s3:", path))
    except ValueError as exc:
        raise ValueError(
            f"receipts cannot be written to {path!r}: {exc}; give a path, or a URI of file, s3, "
            f"gs, abfs or hdfs"
        ) from exc
    return system, folder.rstrip("/")


def _paths(messages: list[WriterCommitMessage | None]) -> list[str]:
    return [message.path for message in messages if isinstance(message, _Written)]
