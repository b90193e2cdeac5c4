"""Which rows can be published, and why not the others: pure transforms, all in Spark's own words.

The task id is computed here, from the job and the key alone, so that whoever publishes a row again
publishes the same task. It must not touch a broker.
"""

from __future__ import annotations

import time
from uuid import NAMESPACE_URL, UUID, uuid5

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql import types as t

from kombu_binary_delay.model.ladder import Ladder

from .columns import check_needed, has

#: What is done with a row whose time has passed.
PAST = ("send", "reject")
#: What a datetime can say, in microseconds since the epoch.
FIRST, LAST = -62_135_596_800_000_000, 253_402_300_799_999_999
_NAMESPACE = uuid5(NAMESPACE_URL, "kombu-binary-delay:job")
_OPTIONAL = {"queue": "string", "exchange": "string", "routing_key": "string", "priority": "int"}


def job_uuid(job_id: str) -> UUID:
    """Return the UUID of a job, whatever its id is made of."""
    return uuid5(_NAMESPACE, job_id)


def task_id(job_id: str, key: str) -> str:
    """Return the task id of a key in a job: the version 5 UUID of the key in that of the job."""
    return str(uuid5(job_uuid(job_id), key))


def prepare(
    df: DataFrame,
    *,
    job_id: str,
    key: str = "key",
    ladder: Ladder,
    past: str = "send",
    horizon: float | None = None,
) -> DataFrame:
    """Bring rows into the shape that is published, and say what is wrong with each.

    :param df: ``key`` (or the column named so), ``task``, ``eta`` (timestamp) or ``countdown``
        (seconds); optionally ``args`` and ``kwargs`` (JSON, or arrays, maps and structs),
        ``queue``, ``exchange``, ``routing_key``, ``priority``, ``expires`` (timestamp) and
        ``headers`` (JSON, or a map or struct).
    :param ladder: whose range the delays must be in.
    :param past: ``"send"`` sends at once what should have been sent before now; ``"reject"`` does
        not send it.
    :param horizon: seconds; what is due beyond it is for a later run, and its delay not yet judged.
    :returns: the same columns under the same names with times as microseconds and JSON as text;
        ``task_id``; ``due``, microseconds as of now; ``later``, whether that is beyond the horizon;
        and ``reason``, null where nothing is wrong.
    :raises ValueError: where a column is missing or of a wrong type.
    """
    if past not in PAST:
        raise ValueError(f"past must be one of {PAST}, got {past!r}")
    check_needed(df.columns, key)
    now = time.time_ns() // 1000
    eta = _micros(df, "eta")
    countdown = F.col("countdown").cast("double") if has(df, "countdown") else _null("double")
    rows = df.select(
        F.col(key).cast("string").alias("key"),
        F.col("task").cast("string").alias("task"),
        _json(df, "args").alias("args"),
        _json(df, "kwargs").alias("kwargs"),
        eta.alias("eta"),
        countdown.alias("countdown"),
        *(
            (F.col(name).cast(kind) if has(df, name) else _null(kind)).alias(name)
            for name, kind in _OPTIONAL.items()
        ),
        _micros(df, "expires").alias("expires"),
        _json(df, "headers").alias("headers"),
    )
    seconds = F.when(F.abs("countdown") < 1e12, F.col("countdown"))
    due = F.coalesce("eta", F.lit(now) + F.round(seconds * 1_000_000).cast("bigint"))
    later = F.lit(False) if horizon is None else due > now + round(horizon * 1_000_000)
    rows = rows.withColumns(
        {
            "task_id": _task_id(job_id, F.col("key")),
            "due": due,
            "later": F.coalesce(later, F.lit(False)),
        }
    )
    reasons = F.array_compact(F.array(*_reasons(ladder, past, horizon, now)))
    return rows.withColumn("reason", F.when(F.size(reasons) > 0, F.array_join(reasons, "; ")))


def _reasons(ladder: Ladder, past: str, horizon: float | None, now: int) -> list[Column]:
    key, eta, countdown = F.col("key"), F.col("eta"), F.col("countdown")
    same_key = F.count("*").over(Window.partitionBy("key"))
    longest = ladder.maximum * 1000
    found = {
        "the key is null": key.isNull(),
        "the key is not unique": key.isNotNull() & (same_key > 1),
        "no task is named": F.coalesce(F.trim("task"), F.lit("")) == "",
        "neither eta nor countdown": eta.isNull() & countdown.isNull(),
        "both eta and countdown": eta.isNotNull() & countdown.isNotNull(),
        "countdown is not a number of seconds": countdown.isNotNull()
        & ~F.coalesce(F.abs(countdown) < 1e12, F.lit(False)),
        "due outside of the years 1 to 9999": ~F.col("due").between(FIRST, LAST),
        "expires outside of the years 1 to 9999": ~F.col("expires").between(FIRST, LAST),
        "args is not a JSON array": F.col("args").isNotNull()
        & F.json_array_length("args").isNull(),
        "kwargs is not a JSON object": F.col("kwargs").isNotNull()
        & F.json_object_keys("kwargs").isNull(),
        "headers is not a JSON object": F.col("headers").isNotNull()
        & F.json_object_keys("headers").isNull(),
        f"longer than the ladder {ladder.name}": ~F.col("later") & (F.col("due") - now > longest),
    }
    if horizon is not None:
        # It begins anew with each run, and would be for a later one for ever.
        beyond = countdown.isNotNull() & eta.isNull() & F.col("later")
        found["countdown is longer than the horizon, in every run anew; give eta"] = beyond
    if past == "reject":
        found["due in the past"] = F.col("due") <= now
    return [F.when(condition, F.lit(reason)) for reason, condition in found.items()]


def _task_id(job_id: str, key: Column) -> Column:
    """Write :func:`task_id` in Spark's words, so that no row has to pass through Python for it."""
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
    kind = df.schema[column].dataType
    if not isinstance(kind, (t.TimestampType, t.TimestampNTZType, t.DateType, t.NullType)):
        raise ValueError(
            f"the column {column} must be a timestamp, got {kind.simpleString()}; use to_timestamp"
        )
    return F.unix_micros(F.col(column).cast("timestamp"))


def _json(df: DataFrame, column: str) -> Column:
    if not has(df, column):
        return _null("string")
    kind = df.schema[column].dataType
    if isinstance(kind, (t.StringType, t.NullType)):
        return F.col(column).cast("string")
    if isinstance(kind, (t.ArrayType, t.MapType, t.StructType)):
        return F.to_json(column, {"ignoreNullFields": "false"})
    raise ValueError(
        f"the column {column} must be JSON, an array, a map or a struct, got {kind.simpleString()}"
    )
