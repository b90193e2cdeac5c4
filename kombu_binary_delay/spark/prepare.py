"""Find which rows can be published, and why others cannot: pure transforms, in Spark's functions.

The task id is computed here, from the job and the key alone, so that publishing a row again
publishes the same task. This module must not touch a broker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from uuid import NAMESPACE_URL, UUID, uuid5

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql import types as t

from kombu_binary_delay.ladder.ladder import Ladder

from . import schema as s
from .checks import check_number
from .columns import (
    CANNOT,
    check_key,
    check_needed,
    has,
    kind_of,
    literal,
    named,
    readable,
    seconds_of,
    time_of,
    tried,
    unread_reason,
    use,
)

logger = logging.getLogger(__name__)

#: What to do with a row whose due time has passed.
PAST = ("send", "reject")
#: The years 1900 to 9999, in microseconds since the epoch: Python has no later times.
FIRST, LAST = -2_208_988_800_000_000, 253_402_300_799_999_999
#: The year 2000: what is due before it has a wrong unit, such as seconds read as milliseconds.
_DUE_FIRST = 946_684_800_000_000
_YEARS = "due outside of the years 2000 to 9999"
_NAMESPACE = uuid5(NAMESPACE_URL, "kombu-binary-delay:job")
_NAMES = ("queue", "exchange", "routing_key")
#: The reasons that apply to amendments, too.
_NO_KEY = "the key is null"
_OF_TIMES = ("eta is not a time", _YEARS)
#: The values that replace an invalid priority, and text that is not a time.
_NONE, _UNREAD = -1, 1 - 2**63


def job_uuid(job_id: str) -> UUID:
    """Return the UUID of a job; its id may be any text."""
    return uuid5(_NAMESPACE, job_id)


def task_id(job_id: str, key: str) -> str:
    """Return the task id of a key in a job: the version 5 UUID of the key in that of the job."""
    return str(uuid5(job_uuid(job_id), key))


def prepare(
    df: DataFrame,
    *,
    job_id: str,
    ladder: Ladder,
    columns: Mapping[str, str] | None = None,
    past: str = "send",
    horizon: float | None = None,
) -> DataFrame:
    """Return rows in the form that is published, each with the reason why it cannot be, if any.

    :param df: ``key``, ``task``, ``eta`` (timestamp, or its
        text) or ``countdown`` (seconds); optionally ``args`` and ``kwargs`` (JSON, or arrays, maps
        and structs), ``queue``, ``exchange``, ``routing_key``, ``priority``, ``expires`` (as
        ``eta``) and ``headers`` (JSON, or a map or struct). Column names ignore case. With
        ``action``, which ``columns`` must name, a row can also be ``"cancel"``, which needs a key
        only, or ``"reschedule"``, which needs a key and ``eta``; null is ``"publish"``. A row with
        a ``_corrupt_record``, where Spark puts the text of what it cannot read, has that as its
        reason.
    :param ladder: the delays must be in its range.
    :param columns: see :func:`~kombu_binary_delay.spark.columns.use`.
    :param past: ``"send"`` sends a row whose due time has passed at once; ``"reject"`` rejects it.
    :param horizon: seconds; rows due after it are left for a later run, and their delays are not
        checked yet.
    :returns: the same columns under the same names, with times in microseconds and JSON as text;
        ``task_id``; ``due``, in microseconds as of now; ``later``, whether that is beyond the
        horizon; and ``reason``, null for a valid row.
    :raises ValueError: if a column is missing or has a wrong type.
    """
    if past not in PAST:
        raise ValueError(f"past must be one of {PAST}, got {past!r}")
    if horizon is not None:
        check_number("horizon", horizon)
    chosen = use(df, columns)
    for name, ours in chosen.misspelt.items():
        logger.warning("the column %s is ignored: is it %s?", name, ours)
    df = chosen.rows
    check_needed(df.columns)
    check_key(df.schema)
    now = time.time_ns() // 1000
    eta = _micros(df, "eta")
    action = named(df, "action").cast("string") if has(df, "action") else _null("string")
    rows = df.select(
        F.col("key").cast("string").alias("key"),
        F.coalesce(action, F.lit(s.PUBLISH)).alias("action"),
        (named(df, "task").cast("string") if has(df, "task") else _null("string")).alias("task"),
        _json(df, "args").alias("args"),
        _json(df, "kwargs").alias("kwargs"),
        eta.alias("eta"),
        _seconds(df, "countdown").alias("countdown"),
        *(
            (named(df, name).cast("string") if has(df, name) else _null("string")).alias(name)
            for name in _NAMES
        ),
        _priority(df, "priority").alias("priority"),
        _micros(df, "expires").alias("expires"),
        _json(df, "headers").alias("headers"),
        unread_reason(df).alias("reason"),
    )
    # That of a cancellation would count from now, not from when its task was published.
    counts = (F.abs("countdown") < 1e12) & (F.col("action") != s.CANCEL)
    seconds = F.when(counts, F.col("countdown"))
    due = F.coalesce("eta", F.lit(now) + F.round(seconds * 1_000_000).cast("bigint"))
    due = F.when(~_is_unread("eta"), due)
    later = F.lit(False)
    if horizon is not None:
        later = (due > now + round(horizon * 1_000_000)) & (F.col("action") == s.PUBLISH)
    rows = rows.withColumns(
        {
            "task_id": _task_id(job_id, F.col("key")),
            "due": due,
            "later": F.coalesce(later, F.lit(False)),
        }
    )
    # What has not been read has no values. Apart from how many rows have the key: Spark computes
    # what is before that where the rows are, and what is after it where it brings them together.
    rows = rows.withColumn("reason", F.coalesce("reason", _reason(ladder, past, horizon, now)))
    same_key = F.count("*").over(Window.partitionBy("key"))
    is_unread = F.startswith("reason", F.lit(CANNOT))
    is_same = F.col("key").isNotNull() & (same_key > 1) & ~F.coalesce(is_unread, F.lit(False))
    reasons = F.concat_ws("; ", F.when(is_same, F.lit("the key is not unique")), "reason")
    return rows.withColumn("reason", F.nullif(reasons, F.lit("")))


def _reason(ladder: Ladder, past: str, horizon: float | None, now: int) -> Column:
    """Return why a row is rejected, whatever the others are; null if it is not."""
    longest = ladder.maximum * 1000
    longer = f"longer than the ladder {ladder.name}"
    # In Spark's SQL, a call of the JVM for all of them: as columns, they take a thousand.
    reasons = {
        _NO_KEY: "key IS NULL",
        "no task is named": "coalesce(trim(task), '') = ''",
        "neither eta nor countdown": "eta IS NULL AND countdown IS NULL",
        "both eta and countdown": "eta IS NOT NULL AND countdown IS NOT NULL",
        "countdown is not a number of seconds": "countdown IS NOT NULL "
        "AND NOT coalesce(abs(countdown) < 1e12, false)",
        "eta is not a time": f"eta = {_UNREAD}",
        "expires is not a time": f"expires = {_UNREAD}",
        _YEARS: f"due NOT BETWEEN {_DUE_FIRST} AND {LAST}",
        "expires outside of the years 1900 to 9999": f"expires != {_UNREAD} "
        f"AND expires NOT BETWEEN {FIRST} AND {LAST}",
        "args is not a JSON array": "args IS NOT NULL AND json_array_length(args) IS NULL",
        **{
            f"{name} is not a JSON object": f"{name} IS NOT NULL "
            f"AND json_object_keys({name}) IS NULL"
            for name in ("kwargs", "headers")
        },
        "priority is not a whole number from 0 to 255": f"priority = {_NONE}",
        # Not the difference, which may overflow 64 bits.
        longer: f"NOT later AND due > {now + longest}",
        f"due longer ago than the ladder {ladder.name} reaches": f"due < {now - longest}",
        "expires before it is due": f"expires != {_UNREAD} AND expires < due",
        "both queue and exchange": "queue IS NOT NULL AND exchange IS NOT NULL",
        **{
            f"{name} is longer than {s.LONGEST_NAME} bytes": f"octet_length({name}) "
            f"> {s.LONGEST_NAME}"
            for name in _NAMES
        },
        **{
            f'headers has "{name}", which is set by the row': "array_contains("
            f"json_object_keys(headers), {literal(name)})"
            for name in s.RESERVED_HEADERS
        },
    }
    if horizon is not None:
        # A countdown starts again with each run, so the row would always be left for a later one.
        beyond = "countdown IS NOT NULL AND eta IS NULL AND later"
        reasons["countdown is longer than the horizon, in every run anew; give eta"] = beyond
    is_past = {"due in the past": f"due <= {now}"}
    if past == "reject":
        reasons |= is_past
    of_action = {
        s.PUBLISH: reasons,
        s.CANCEL: {_NO_KEY: reasons[_NO_KEY]},
        s.RESCHEDULE: {
            **{reason: reasons[reason] for reason in (_NO_KEY, *_OF_TIMES, longer)},
            # A countdown starts again with each run, so each would postpone the task further.
            "a task is rescheduled by eta alone": "eta IS NULL OR countdown IS NOT NULL",
            **is_past,
        },
    }
    # Whatever the row does: Python could not read it.
    actions = ", ".join(map(literal, s.ACTIONS))
    of_all = {
        f"action must be one of {', '.join(s.ACTIONS)}": f"action NOT IN ({actions})",
        **{
            f"{name} is not UTF-8": f"{name} != {readable(name)}"
            for name in ("key", "action", "task", "args", "kwargs", "headers", *_NAMES)
        },
    }
    of_its = " ".join(f"WHEN {literal(name)} THEN {_all(of_action[name])}" for name in of_action)
    return F.expr(f"nullif(concat_ws('; ', {_all(of_all)}, CASE action {of_its} END), '')")


def _all(reasons: dict[str, str]) -> str:
    """Return the reasons that hold, as one text; null if none does."""
    held = (f"if({condition}, {literal(reason)}, NULL)" for reason, condition in reasons.items())
    return f"nullif(concat_ws('; ', {', '.join(held)}), '')"


def _task_id(job_id: str, key: Column) -> Column:
    """Return :func:`task_id` in Spark's functions, so that no row has to pass through Python."""
    job = F.unhex(F.lit(job_uuid(job_id).hex))
    digest = F.sha1(F.concat(job, F.encode(key, "UTF-8")))
    variant = F.translate(F.substring(digest, 17, 1), "0123456789abcdef", "89ab89ab89ab89ab")
    return F.concat(
        F.substring(digest, 1, 8),
        F.lit("-"),
        F.substring(digest, 9, 4),
        F.lit("-5"),
        F.substring(digest, 14, 3),
        F.lit("-"),
        variant,
        F.substring(digest, 18, 3),
        F.lit("-"),
        F.substring(digest, 21, 12),
    )


def _null(kind: str) -> Column:
    return F.lit(None).cast(kind)


def _micros(df: DataFrame, column: str) -> Column:
    if not has(df, column):
        return _null("bigint")
    kind = kind_of(df, column)
    value = named(df, column)
    micros = F.unix_micros(time_of(df, column))
    if isinstance(kind, t.StringType):
        return F.coalesce(micros, F.when(value.isNotNull(), F.lit(_UNREAD)))
    if isinstance(kind, t.DateType):
        # Some dates have no timestamp.
        micros = (
            F.when(F.year(value) > 9999, F.lit(LAST + 1))
            .when(F.year(value) < 1, F.lit(FIRST - 1))
            .otherwise(micros)
        )
    return micros


def _is_unread(column: str) -> Column:
    return F.coalesce(F.col(column) == _UNREAD, F.lit(False))


def _seconds(df: DataFrame, column: str) -> Column:
    """Return a number of seconds; NaN if the value is not a number."""
    if not has(df, column):
        return _null("double")
    unread = F.when(named(df, column).isNotNull(), F.lit(float("nan")))
    return F.coalesce(seconds_of(df, column), unread)


def _priority(df: DataFrame, column: str) -> Column:
    if not has(df, column):
        return _null("int")
    number = tried(df, column, "int")
    is_one = number.between(0, 255) & (tried(df, column, "double") == number)
    value = F.when(is_one, number).otherwise(F.lit(_NONE))
    return F.when(named(df, column).isNotNull(), value)


def _json(df: DataFrame, column: str) -> Column:
    if not has(df, column):
        return _null("string")
    kind = kind_of(df, column)
    if isinstance(kind, (t.StringType, t.NullType)):
        return named(df, column).cast("string")
    if isinstance(kind, (t.ArrayType, t.MapType, t.StructType)):
        value = named(df, column)
        text, json = f"CAST({column} AS STRING)", F.to_json(value, {"ignoreNullFields": "false"})
        # Spark would replace what is not UTF-8. The bytes of binary values need not be UTF-8.
        if "string" not in kind.simpleString() or "binary" in kind.simpleString():
            return json
        return F.when(F.expr(f"{text} != {readable(text)}"), F.expr(text)).otherwise(json)
    raise ValueError(
        f"the column {column} must be JSON, an array, a map or a struct, got {kind.simpleString()}"
    )
