"""The operators' functions, one operation per file; they return frozen values.

They use a :class:`kombu.Connection` to the broker, and a :class:`Management` for its management
API. Nothing here knows the command line.
"""

from .amend import Amended, Chosen, amend, choose
from .arrivals import Arrivals, LastHour
from .check import Check, Finding, check, check_app
from .create import Creation, create
from .delivery import Repair, repair, ways
from .errors import OperationError, RefusedError, UnreachableError
from .explain import Explanation, Wait, explain
from .fix import fix
from .management import Management
from .migrate import Migration, Preview, migrate, plan
from .probe import ready
from .prune import Pruning, prune
from .redrive import Parked, Redrive, parked, redrive
from .scheduled import scheduled
from .snapshot import Snapshot
from .status import AmendmentsStatus, LadderStatus, Status, Waiting, status
from .teardown import Teardown, teardown
from .trouble import Expected
from .verify import Difference, Verification, verify
from .waiting import (
    Count,
    Event,
    Late,
    Selection,
    Story,
    TaskTable,
    WaitingTask,
    from_journal,
    from_node,
    has_journal,
    judge_of,
    story_by_journal,
    story_by_node,
)

__all__ = [
    "Amended",
    "AmendmentsStatus",
    "Arrivals",
    "Check",
    "Chosen",
    "Count",
    "Creation",
    "Difference",
    "Event",
    "Expected",
    "Explanation",
    "Finding",
    "LadderStatus",
    "LastHour",
    "Late",
    "Management",
    "Migration",
    "OperationError",
    "Parked",
    "Preview",
    "Pruning",
    "Redrive",
    "RefusedError",
    "Repair",
    "Selection",
    "Snapshot",
    "Status",
    "Story",
    "TaskTable",
    "Teardown",
    "UnreachableError",
    "Verification",
    "Wait",
    "Waiting",
    "WaitingTask",
    "amend",
    "check",
    "check_app",
    "choose",
    "create",
    "explain",
    "fix",
    "from_journal",
    "from_node",
    "has_journal",
    "judge_of",
    "migrate",
    "parked",
    "plan",
    "prune",
    "ready",
    "redrive",
    "repair",
    "scheduled",
    "status",
    "story_by_journal",
    "story_by_node",
    "teardown",
    "verify",
    "ways",
]
