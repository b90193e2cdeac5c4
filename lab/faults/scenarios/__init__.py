"""Stories of faults; each module has its `CASES`."""

from lab.faults.scenarios import bad_destination, broker_killed, cluster

CASES = tuple(case for module in (broker_killed, bad_destination, cluster) for case in module.CASES)
