"""The schemas of the pipeline's tables, as Spark's DDL. Must not import Spark.

A name means the same in all tables: ``task_id`` is Celery's, ``due`` and all other times are
timestamps in microseconds, ``queue`` is the routing key for the default exchange and
``exchange/routing key`` for others.

Times are ``timestamp_ltz``: the setting ``spark.sql.timestampType`` can make ``timestamp`` a local
time without a zone.
"""

from __future__ import annotations

#: What a row does. In a receipt, null means the first: older receipts have no action.
PUBLISH, CANCEL, RESCHEDULE = ACTIONS = ("publish", "cancel", "reschedule")
#: One row per message or amendment: the outcome of its publish.
RECEIPTS = (
    "job_id string, key string, task_id string, task string, queue string, due timestamp_ltz, "
    "published_at timestamp_ltz, hops int, partition int, attempt int, status string, "
    "detail string, action string"
)
#: The possible statuses of a receipt. Only the first means that the broker has the message, and
#: only the second that it has the amendment.
PUBLISHED, RECORDED, RETURNED = "published", "recorded", "returned"
NACKED, REFUSED = "nacked", "refused"
#: Headers with values of the receipt: if they differ, the message is not the receipt's.
RESERVED_HEADERS = ("id", "task", "eta", "retries", "x-delay")
#: The longest name of a queue or an exchange, and the longest routing key, in bytes.
LONGEST_NAME = 255
#: One row per invalid row, which was not published, and why.
REJECTS = "job_id string, key string, task string, reason string, rejected_at timestamp_ltz"

#: One row per event. ``retries`` is Celery's count: each retry is a separate message.
JOURNAL = (
    "event string, task_id string, retries int, task string, queue string, at timestamp_ltz, "
    "due timestamp_ltz, ladder string, hops int, state string, offset bigint"
)
SCHEDULED, RELEASED, EXECUTED, CANCELLED, POSTPONED = EVENTS = (
    "scheduled",
    "released",
    "executed",
    "cancelled",
    "postponed",
)
#: Not an event of a message: an export has found all that happened until ``at``.
COMPLETE = "complete"

#: One row per message, with its verdict.
VERDICTS = (
    "task_id string, retries int, key string, task string, queue string, due timestamp_ltz, "
    "published_at timestamp_ltz, hops int, arrived_at timestamp_ltz, lateness double, "
    "released int, executed int, state string, postponed int, misdated int, verdict string"
)
(
    OK,
    EARLY,
    LATE,
    DUPLICATE,
    LOST_IN_THE_LADDER,
    LOST_AFTER_RELEASE,
    STILL_WAITING,
    NOT_PUBLISHED,
    TAKEN_BACK,
    PUT_OFF,
    REPLACED,
    RAN_AFTER_CANCEL,
    RESCHEDULE_IGNORED,
    UNDECIDED,
) = VERDICT_NAMES = (
    "ok",
    "early",
    "late",
    "duplicate",
    "lost in the ladder",
    "lost after release",
    "still waiting",
    "not published",
    "cancelled",
    "postponed",
    "replaced",
    "ran after cancel",
    "reschedule ignored",
    "unknown",
)

#: The verdicts of a continuous audit: the latest one of a message counts.
FOLLOWED = f"{VERDICTS}, judged_at timestamp_ltz"
#: One row for each minute in which something is published or due. ``waiting`` and ``bytes`` are at
#: the end of the minute, ``most_due`` is the largest second's, and ``hops`` are of what is due.
PLAN = (
    "minute timestamp_ltz, published bigint, due bigint, most_due bigint, waiting bigint, "
    "bytes bigint, hops bigint, beyond bigint, undated bigint"
)


def columns_of(schema: str) -> dict[str, str]:
    """Return the types of a schema's columns, by their names."""
    return dict(column.split() for column in schema.split(", "))
