"""The names and labels of the metrics, the same whoever exports them. Pure."""

from __future__ import annotations

#: Of the histogram and the counters.
LATENESS = "messaging.delay.lateness"
DELIVERED = "messaging.delay.delivered"
DROPPED = "messaging.delay.dropped"
#: Of their attributes; the second is that of OpenTelemetry's instrumentation of Celery.
DESTINATION, TASK, REASON = "messaging.destination.name", "celery.task_name", "reason"
WHAT = {
    LATENESS: "Seconds from when a delayed message was due until its consumer had it.",
    DELIVERED: "Delayed messages that came to their consumers.",
    DROPPED: "Messages that were dropped when due: cancelled, superseded or expired.",
}
#: In seconds. One of them is the default tick, so that the share within it is exact.
BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.125, 0.25, 0.5),
    *(1, 1.5, 2, 3, 4, 5, 6, 8, 10, 20, 30, 60, 300, 1800),
)

#: Of each name: anybody who may publish can make up more of them.
MOST_PAIRS = 200
OTHER, TEMPORARY = "(other)", "(temporary)"
#: How RabbitMQ begins the names that it makes.
_MADE = "amq.gen-"


class Labels:
    """Names destinations and tasks, no more than :data:`MOST_PAIRS` pairs of them."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[str, str]] = {}

    def pair(self, queue: str, task: str) -> tuple[str, str]:
        """Return the labels of a message: its destination and its task."""
        labels = self._known.get((queue, task))
        if labels is None:
            labels = TEMPORARY if queue.startswith(_MADE) else queue, task
            if len(self._known) >= MOST_PAIRS:
                return OTHER, OTHER
            self._known[queue, task] = labels
        return labels
