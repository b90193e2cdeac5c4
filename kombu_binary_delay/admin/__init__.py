"""What operators do with a ladder: an operation a file, functions that return frozen values.

They talk to a broker through a :class:`kombu.Connection`, and to its management API through a
:class:`Management`. Nothing here knows the command line.
"""

from .create import Creation, create
from .delivery import Repair, repair, ways
from .errors import OperationError, RefusedError, UnreachableError
from .explain import Explanation, Stay, explain
from .management import Management
from .migrate import Migration, Plan, migrate, plan
from .probe import ready
from .prune import Pruning, prune
from .redrive import Parked, Redrive, Refill, redrive, refill
from .snapshot import Snapshot
from .status import LadderStatus, Status, Waiting, status
from .teardown import Teardown, teardown
from .verify import Difference, Verification, verify

__all__ = [
    "Creation",
    "Difference",
    "Explanation",
    "LadderStatus",
    "Management",
    "Migration",
    "OperationError",
    "Parked",
    "Plan",
    "Pruning",
    "Redrive",
    "Refill",
    "RefusedError",
    "Repair",
    "Snapshot",
    "Status",
    "Stay",
    "Teardown",
    "UnreachableError",
    "Verification",
    "Waiting",
    "create",
    "explain",
    "migrate",
    "plan",
    "prune",
    "ready",
    "redrive",
    "refill",
    "repair",
    "status",
    "teardown",
    "verify",
    "ways",
]
