"""Stories of faults; each module has its `CASES`."""

from lab.faults.scenarios import (
    bad_destination,
    broker_killed,
    cluster,
    connection_cut,
    parties_killed,
)

_FAMILY = (broker_killed, parties_killed, cluster, connection_cut, bad_destination)
CASES = tuple(case for module in _FAMILY for case in module.CASES)
