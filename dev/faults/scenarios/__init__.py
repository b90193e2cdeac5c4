"""Scenarios of faults; each module has its `CASES`."""

from dev.faults.scenarios import (
    amended,
    bad_destination,
    broker_alarm,
    broker_killed,
    broker_upgraded,
    clock_stepped,
    cluster,
    connection_cut,
    destination_changed,
    ladder_broken,
    programs_killed,
    spark_killed,
)

_FAMILY = (
    broker_killed,
    programs_killed,
    cluster,
    connection_cut,
    ladder_broken,
    broker_alarm,
    clock_stepped,
    bad_destination,
    destination_changed,
    broker_upgraded,
    amended,
    spark_killed,
)
CASES = tuple(case for module in _FAMILY for case in module.CASES)
