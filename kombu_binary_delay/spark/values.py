"""Check the columns of a sink by Spark's schema, and convert the values of its rows in Python.

Columns mean the same as to :func:`~kombu_binary_delay.spark.prepare.prepare`, which does the same
in Spark's functions. This module must not touch a broker.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import types as t

from . import schema as s
from .columns import INTEGERS, check_key, check_needed, find

_NUMBERS = (*INTEGERS, t.DoubleType, t.DecimalType)
_TEXT = ((t.StringType,), "a string", 'cast("string")')
_TIME = ((t.TimestampType,), "a timestamp", 'cast("timestamp_ltz")')
_OBJECT = ((t.StringType, t.MapType, t.StructType), "JSON, a map or a struct", "to_json")
_COLUMNS: dict[str, tuple[tuple[type[t.DataType], ...], str, str]] = {
    "action": _TEXT,
    "task": _TEXT,
    "eta": _TIME,
    "countdown": ((t.NumericType,), "a number of seconds", 'cast("double")'),
    "args": ((t.StringType, t.ArrayType), "JSON or an array", "to_json"),
    "kwargs": _OBJECT,
    "headers": _OBJECT,
    "queue": _TEXT,
    "exchange": _TEXT,
    "routing_key": _TEXT,
    "priority": (INTEGERS, "an integer", 'cast("int")'),
    "expires": _TIME,
}
_JSON = ("args", "kwargs", "headers")


def check_types(schema: t.StructType, key: str) -> None:
    """Check that no column is missing, has a wrong type or is ambiguous.

    :raises ValueError: names the column, its type and the remedy.
    """
    check_needed(schema.names, key)
    check_key(schema, key)
    for name, (kinds, words, remedy) in _COLUMNS.items():
        spelled = find(schema.names, name)
        if spelled is None:
            continue
        kind = schema[spelled].dataType
        if not isinstance(kind, (*kinds, t.NullType)):
            raise ValueError(
                f"the column {name} must be {words}, got {kind.simpleString()}; use {remedy}"
            )
        other = _without_json(kind) if name in _JSON else None
        if other is not None:
            raise ValueError(
                f"the column {name} has a {other.simpleString()} in it, which JSON does not know, "
                f"got {kind.simpleString()}; use to_json"
            )


def rows(
    batch: pa.RecordBatch, schema: t.StructType, key: str
) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yield each row of a batch for a sender: times in microseconds, JSON as text.

    With it comes the reason why the row cannot be read; None if it can.
    """
    found = ((name, find(schema.names, name)) for name in (key, *_COLUMNS))
    spelled = {name: each for name, each in found if each is not None}
    columns = [batch.column(each) for each in spelled.values()]
    # As numbers: some timestamps have no Python datetime.
    columns = [
        column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
        for column in columns
    ]
    kinds = {name: schema[spelled[name]].dataType for name in _JSON if name in spelled}
    for given, reason in _read(pa.RecordBatch.from_arrays(columns, names=list(spelled))):
        row = {name: given.get(name) for name in _COLUMNS}
        row["key"] = None if given[key] is None else str(given[key])
        if row["action"] is None:
            row["action"] = s.PUBLISH
        if row["countdown"] is not None:
            row["countdown"] = float(row["countdown"])
        for name in _JSON:
            if row[name] is not None and not isinstance(row[name], str):
                row[name] = json.dumps(_plain(row[name], kinds[name]))
        yield row, reason


def _read(batch: pa.RecordBatch) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yield the rows of a batch, each with the reason why it cannot be read, if any.

    Spark does not check that its strings are UTF-8.
    """
    try:
        readable = batch.to_pylist()
    except UnicodeDecodeError:
        yield from (_read_row(batch, number) for number in range(batch.num_rows))
    else:
        yield from ((given, None) for given in readable)


def _read_row(batch: pa.RecordBatch, number: int) -> tuple[dict[str, Any], str | None]:
    given: dict[str, Any] = {}
    reasons = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        cell = column[number]
        try:
            given[name] = cell.as_py()
        except UnicodeDecodeError:
            reasons.append(f"{name} is not UTF-8")
            is_text = isinstance(cell, (pa.StringScalar, pa.LargeStringScalar))
            # The receipt shows what can be read of it.
            given[name] = bytes(cell.as_buffer()).decode(errors="replace") if is_text else None
    return given, "; ".join(reasons) or None


def _without_json(kind: t.DataType) -> t.DataType | None:
    """Return the type, or a type in it, that JSON does not have; None if there is none."""
    if isinstance(kind, t.ArrayType):
        return _without_json(kind.elementType)
    if isinstance(kind, t.StructType):
        found = (_without_json(each.dataType) for each in kind)
        return next((each for each in found if each is not None), None)
    if isinstance(kind, t.MapType):
        if not isinstance(kind.keyType, (t.StringType, *INTEGERS)):
            return kind.keyType
        return _without_json(kind.valueType)
    # A 32-bit float has other digits in Python than in Spark.
    is_json = isinstance(kind, (t.StringType, t.BooleanType, t.NullType, *_NUMBERS))
    return None if is_json else kind


def _plain(value: Any, kind: t.DataType) -> Any:
    """Return a value that becomes the same JSON as with Spark's ``to_json``."""
    if value is None:
        return None
    if isinstance(kind, t.ArrayType):
        return [_plain(each, kind.elementType) for each in value]
    if isinstance(kind, t.MapType):
        # Arrow represents a map as pairs.
        return {str(name): _plain(each, kind.valueType) for name, each in value}
    if isinstance(kind, t.StructType):
        return {each.name: _plain(value[each.name], each.dataType) for each in kind}
    return _number(value, kind) if isinstance(kind, t.FractionalType) else value


def _number(value: Any, kind: t.DataType) -> Any:
    if isinstance(kind, t.DecimalType):
        return float(value) if kind.scale else int(value)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
