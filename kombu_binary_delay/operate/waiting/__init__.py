"""List waiting tasks, from one of two sources, as a table that is searched.

* ``task``: a waiting task, what selects and counts tasks, and what is known of one.
* ``table``: the tasks of one reading, on disk.
* ``journal``: tasks from the journal, over AMQP, from anywhere.
* ``node``: tasks from the quorum queues of the levels, by a command on the broker's host.
* ``script``: the expressions that this command evaluates on the node.

Neither source keeps all tasks in memory, and neither changes anything: messages stay where they
are, and their delivery counts do not change.
"""

from .journal import from_journal, has_journal, judge_of, story_by_journal
from .node import from_node, story_by_node
from .table import TaskTable
from .task import COUNTED, JOURNAL, NODE, Count, Event, Late, Selection, Story, WaitingTask

__all__ = [
    "COUNTED",
    "JOURNAL",
    "NODE",
    "Count",
    "Event",
    "Late",
    "Selection",
    "Story",
    "TaskTable",
    "WaitingTask",
    "from_journal",
    "from_node",
    "has_journal",
    "judge_of",
    "story_by_journal",
    "story_by_node",
]
