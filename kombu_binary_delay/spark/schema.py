"""The tables of the pipeline, as Spark writes a schema. It must not import Spark.

One name means the same in all of them: ``task_id`` is Celery's, ``due`` and all other times are
timestamps in microseconds, ``queue`` is the routing key where the exchange is the default one and
``exchange/routing key`` elsewhere.
"""

from __future__ import annotations

#: One row a message: what became of its publish.
RECEIPTS = (
    "job_id string, key string, task_id string, task string, queue string, due timestamp, "
    "published_at timestamp, hops int, partition int, attempt int, status string, detail string"
)
#: What the status of a receipt can be; only the first means that the broker has the message.
PUBLISHED, RETURNED, NACKED, REFUSED = STATUSES = (
    "published",
    "returned",
    "nacked",
    "refused",
)
#: Headers that say what a receipt says: a message whose headers say otherwise is not the receipt's.
RESERVED_HEADERS = ("id", "task", "eta", "retries", "x-delay")
#: The longest name of a queue or an exchange, and the longest routing key, in bytes.
LONGEST_NAME = 255
#: One row for each row that was not even tried, and why.
REJECTS = "job_id string, key string, task string, reason string, rejected_at timestamp"

#: One row an event. ``retries`` is Celery's count: each retry is a message of its own.
JOURNAL = (
    "event string, task_id string, retries int, task string, queue string, at timestamp, "
    "due timestamp, ladder string, hops int, state string, offset bigint"
)
SCHEDULED, RELEASED, EXECUTED, CANCELLED, POSTPONED = EVENTS = (
    "scheduled",
    "released",
    "executed",
    "cancelled",
    "postponed",
)

#: One row a message, with its verdict.
VERDICTS = (
    "task_id string, retries int, key string, task string, queue string, due timestamp, "
    "published_at timestamp, hops int, arrived_at timestamp, lateness double, released int, "
    "executed int, state string, verdict string"
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
    "unknown",
)
