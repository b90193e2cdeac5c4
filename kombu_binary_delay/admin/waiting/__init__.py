"""What waits, task by task: frozen values, one after the other, from one of two sources.

* ``task``: a waiting task, which of them are asked for, and how they are counted and sorted.
* ``journal``: what the journal knows, over AMQP, from anywhere.
* ``node``: what the quorum queues of the levels hold, by a command on the broker's host.
* ``script``: what that command has the node do.

Neither source holds all that waits in memory, and neither changes anything: a message stays where
it is, and its count of deliveries too.
"""

from .journal import from_journal, has_journal, history
from .node import from_node
from .task import Count, Event, Selection, Waiters, WaitingTask, count_by, earliest

__all__ = [
    "Count",
    "Event",
    "Selection",
    "Waiters",
    "WaitingTask",
    "count_by",
    "earliest",
    "from_journal",
    "from_node",
    "has_journal",
    "history",
]
