"""What waits, task by task: frozen values, one after the other, from one of two sources.

* ``task``: a waiting task, which of them are asked for, and how they are counted and sorted.
* ``journal``: what the journal knows, over AMQP, from anywhere.
* ``node``: what the quorum queues of the levels hold, by a command on the broker's host.
* ``script``: what that command has the node do.

Neither source holds all that waits in memory, and neither changes anything: a message stays where
it is, and its count of deliveries too.
"""

from .journal import from_journal, has_journal, judge_of, story_by_journal
from .node import from_node, story_by_node
from .task import (
    COUNTED,
    JOURNAL,
    NODE,
    Count,
    Event,
    Selection,
    Story,
    Tally,
    Waiters,
    WaitingTask,
    count_by,
    earliest,
)

__all__ = [
    "COUNTED",
    "JOURNAL",
    "NODE",
    "Count",
    "Event",
    "Selection",
    "Story",
    "Tally",
    "Waiters",
    "WaitingTask",
    "count_by",
    "earliest",
    "from_journal",
    "from_node",
    "has_journal",
    "judge_of",
    "story_by_journal",
    "story_by_node",
]
