"""Read columns of a DataFrame, for several parts of the pipeline. Must not touch a broker."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as t

from . import schema as s

#: What text must look like to be read as a type. Spark also reads 30d as the number 30, as Java
#: does, and 12:30 as a time of today.
_PATTERNS = {
    "double": r"^\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*$",
    "timestamp_ltz": r"^\s*[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}",
}
_WHOLE = ("int", "bigint")
#: A time of day without seconds, before its zone.
_NO_SECONDS = r"^(\s*[^ T]+[ T][0-9]{1,2}:[0-9]{2})(?=\s*[A-Za-z+-])"
_TIMES = (t.StringType, t.TimestampType, t.TimestampNTZType, t.DateType, t.NullType)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
#: Where Spark puts the text of a row of CSV or JSON that it cannot read; null for the others.
UNREAD = "_corrupt_record"
#: How its reason begins.
CANNOT = "the row cannot be read"
#: The most characters of such a row that are shown.
_SHOWN = 200
INTEGERS = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)
#: The columns that a row can have. What a row does is opt-in: many tables have another ``action``.
ACTION = "action"
COLUMNS = (
    "key",
    "task",
    "eta",
    "countdown",
    "args",
    "kwargs",
    "queue",
    "exchange",
    "routing_key",
    "priority",
    "expires",
    "headers",
    ACTION,
)
#: The further ones of a plan.
PLANNED = ("published", "bytes")


@dataclass(frozen=True)
class Used:
    """Which columns of a table are used.

    :param rows: the table, with these columns under our names.
    :param used: the table's names of the columns, by ours.
    :param ignored: the table's other columns.
    :param misspelt: of these, those that look like one of ours, with that.
    """

    rows: DataFrame
    used: dict[str, str]
    ignored: tuple[str, ...]
    misspelt: dict[str, str]

    def __str__(self) -> str:
        named_so = (
            ours if ours == name else f"{name} as {ours}" for ours, name in self.used.items()
        )
        text = f"columns used: {', '.join(named_so)}"
        if self.ignored:
            text += f"; ignored: {', '.join(self.ignored)}"
        return text + "".join(f"; is {name} {ours}?" for name, ours in self.misspelt.items())


def use(df: DataFrame, columns: Mapping[str, str] | None = None) -> Used:
    """Take a table's columns by our names, ignoring case.

    :param columns: the table's name of a column, by ours, where they differ, such as
        ``{"eta": "next_contact"}``. ``action`` is used only if it is here.
    :raises ValueError: for a name that is not ours, or a column that is missing or ambiguous.
    """
    known, given = (*COLUMNS, *PLANNED), dict(columns or {})
    used = {}
    for ours in given:
        if ours not in known:
            raise ValueError(f"{ours!r} is no column of a row; known are {', '.join(known)}")
    for ours in known:
        name = find(df.columns, given.get(ours, ours))
        if name is None and ours in given:
            raise ValueError(f"there is no column {given[ours]!r} for {ours}, only {df.columns}")
        if name is not None and (ours != ACTION or ours in given):
            used[ours] = name
    ignored = tuple(name for name in df.columns if name not in {*used.values(), UNREAD})
    free = [ours for ours in COLUMNS if ours not in used and ours != ACTION]
    similar = {name: get_close_matches(name.lower(), free, 1) for name in ignored}
    rows = [F.col(quoted(name)).alias(ours) for ours, name in used.items()]
    if UNREAD in df.columns:
        rows.append(F.col(UNREAD))
    misspelt = {name: ours[0] for name, ours in similar.items() if ours}
    return Used(df.select(*rows), used, ignored, misspelt)


def find(names: Sequence[str], column: str) -> str | None:
    """Return a column's name as the DataFrame spells it, ignoring case; None if it is missing.

    :raises ValueError: if several columns differ only in case.
    """
    spellings = [name for name in names if name.lower() == column.lower()]
    if len(spellings) > 1:
        raise ValueError(f"the columns {spellings} differ by their case only; keep one of them")
    return spellings[0] if spellings else None


def has(df: DataFrame, column: str) -> bool:
    """Return whether the DataFrame has a column, ignoring case."""
    return find(df.columns, column) is not None


def named(df: DataFrame, column: str) -> Column:
    """Return an existing column, ignoring case; its name may contain dots."""
    return F.col(_found(df, column))


def kind_of(df: DataFrame, column: str) -> t.DataType:
    """Return the type of an existing column, ignoring case."""
    return df.schema[find(df.columns, column) or column].dataType


def action_of(df: DataFrame) -> Column:
    """Return the action of each row: a publish, unless it says otherwise.

    Older tables of receipts have no such column, and no amendments.
    """
    action = named(df, "action") if has(df, "action") else F.lit(None)
    return F.coalesce(action, F.lit(s.PUBLISH))


def messages(df: DataFrame) -> DataFrame:
    """Return the rows that are messages on the ladder; amendments are none."""
    return df.where(action_of(df) == s.PUBLISH)


def readable(text: str) -> str:
    """Return text with U+FFFD in place of what is not UTF-8; Spark does not check its strings.

    :param text: an expression of Spark's SQL, as what is returned.
    """
    # Java replaces it as it reads the text. Spark 4 refuses to decode it as UTF-8.
    return f"decode(encode({text}, 'UTF-16BE'), 'UTF-16BE')"


def tried(df: DataFrame, column: str, kind: str) -> Column:
    """Return an existing column as another type; null if a value cannot be converted.

    A plain cast would fail the job in ANSI mode, which is Spark's default.
    """
    value = named(df, column)
    if not isinstance(kind_of(df, column), t.StringType):
        return value.try_cast(kind)
    if kind == "timestamp_ltz":
        # Spark takes a zone only after seconds.
        value = F.regexp_replace(value, _NO_SECONDS, "$1:00")
    value = value.try_cast(kind)
    if kind in _PATTERNS:
        return F.when(named(df, column).rlike(_PATTERNS[kind]), value)
    if kind in _WHOLE:
        # pandas writes 5.0 where others of the column are missing.
        number = tried(df, column, "double")
        return F.coalesce(value, F.when(number % 1 == 0, number.try_cast(kind)))
    return value


def unread_reason(df: DataFrame) -> Column:
    """Return why a row cannot be read, with its text; null if it can."""
    if not has(df, UNREAD):
        return F.lit(None).cast("string")
    text = F.substring(named(df, UNREAD).cast("string"), 1, _SHOWN)
    return F.concat(F.lit(f"{CANNOT}: "), text)


def quoted(name: str) -> str:
    """Return a name as Spark's SQL has it, whatever it contains."""
    return "`{}`".format(name.replace("`", "``"))


def literal(text: str) -> str:
    """Return a text as Spark's SQL has it, by its defaults for what a text can contain."""
    return "'{}'".format(text.replace("\\", "\\\\").replace("'", "\\'"))


def instant(time: datetime) -> Column:
    """Return a time as a column.

    Over Spark Connect, spark.sql.timestampType can make a literal a local time without a zone.
    """
    return F.timestamp_micros(F.lit((time.astimezone(UTC) - _EPOCH) // _MICROSECOND))


def time_of(df: DataFrame, column: str) -> Column:
    """Return an existing column as times; null if its text is not a time.

    :raises ValueError: names the column, its type and the remedy.
    """
    kind = kind_of(df, column)
    if not isinstance(kind, _TIMES):
        raise ValueError(
            f"the column {column} must be a timestamp, or text such as 2030-01-31T12:00:00Z, got "
            f"{kind.simpleString()}; use timestamp_seconds or timestamp_millis for a number"
        )
    # Not TIMESTAMP: by spark.sql.timestampType, it may have no zone, and ignore that of a text.
    return tried(df, column, "timestamp_ltz")


def seconds_of(df: DataFrame, column: str) -> Column:
    """Return an existing column as seconds; null if a value is no number.

    :raises ValueError: names the column, its type and the remedy.
    """
    kind = kind_of(df, column)
    if not isinstance(kind, (t.StringType, t.NumericType, t.NullType)):
        raise ValueError(
            f"the column {column} must be a number of seconds, got {kind.simpleString()}; of an "
            f"interval, use extract(SECOND FROM ...) and further parts, or give eta"
        )
    return tried(df, column, "double")


def _found(df: DataFrame, column: str) -> str:
    return quoted(find(df.columns, column) or column)


def check_needed(names: Sequence[str]) -> None:
    """Check that the columns that every row needs exist.

    With a column ``action``, not every row needs a task and a time.

    :raises ValueError: names the missing column.
    """
    has_action = ACTION in names
    for name in ("key",) if has_action else ("key", "task"):
        if name not in names:
            raise ValueError(
                f"a column {name!r} is needed, got {list(names)}; if it has another name, say so, "
                f"as by --column {name}=NAME"
            )
    if not has_action:
        check_time(names)


def check_key(schema: t.StructType) -> None:
    """Check the type of the keys, which are made into task ids by their text.

    The text of a timestamp, for example, depends on the time zone of the session.

    :raises ValueError: names the column, its type and the remedy.
    """
    kind = schema["key"].dataType
    if not isinstance(kind, (t.StringType, t.NullType, *INTEGERS)):
        raise ValueError(
            f'the key must be a string or an integer, got {kind.simpleString()}; use cast("string")'
        )


def check_time(names: Sequence[str]) -> None:
    """Check that there is a column with the due time.

    :raises ValueError: names the missing columns.
    """
    if find(names, "eta") is None and find(names, "countdown") is None:
        raise ValueError(
            f"a column eta (timestamp) or countdown (seconds) is needed, got {list(names)}"
        )


def published_micros(df: DataFrame) -> Column:
    """Return when each row is published, in microseconds since the epoch; by default now.

    It is null if its text is not a time.

    :raises ValueError: see :func:`time_of`.
    """
    now = F.lit(time.time_ns() // 1000)
    if not has(df, "published"):
        return now
    at = F.unix_micros(time_of(df, "published"))
    return F.when(named(df, "published").isNull(), now).otherwise(at)


def due_micros(df: DataFrame, published: Column) -> Column:
    """Return each row's due time, in microseconds since the epoch; null if the row has none.

    :param published: the time of the publish, in the same unit; a ``countdown`` starts there. A row
        without it has no due time, either.
    :raises ValueError: if the DataFrame has neither ``eta`` nor ``countdown``; see :func:`time_of`.
    """
    check_time(df.columns)
    times = []
    if has(df, "eta"):
        times.append(F.unix_micros(time_of(df, "eta")))
    if has(df, "countdown"):
        seconds = seconds_of(df, "countdown")
        sane = F.when(F.abs(seconds) < 1e12, seconds)  # to Spark, NaN is greater than all numbers
        times.append(published + F.ceil(sane * 1_000_000).cast("bigint"))
    has_one = published.isNotNull()
    if len(times) > 1:
        # A row with both is not published, also if one of them cannot be read.
        has_one &= named(df, "eta").isNull() | named(df, "countdown").isNull()
    return F.when(has_one, F.coalesce(*times))
