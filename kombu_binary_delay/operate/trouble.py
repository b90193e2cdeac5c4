"""Find what an operator must see first: alarms of nodes, and missing parts of a ladder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kombu_binary_delay.ladder.topology import LEAST_DISK, Topology

from .delivery import faults
from .errors import UnreachableError
from .management import Management
from .snapshot import Row, Snapshot
from .verify import compare


@dataclass(frozen=True)
class Expected:
    """What should exist.

    :param lanes: the ladders to look at: those in use, or one that was asked for.
    :param declares: whether programs declare missing parts, so that levels that no message has
        needed yet may be missing.
    :param relays: glob patterns of the queues that need a relay, as in the setting.
    :param direct: whether programs publish to direct queues, with ``queue_per_delay``.
    :param drained: those of ``lanes`` that programs do not publish to: what no message has needed
        may be missing there.
    """

    lanes: tuple[Topology, ...] = ()
    declares: bool = True
    relays: tuple[str, ...] = ()
    direct: bool = False
    drained: tuple[Topology, ...] = ()


def alarms(management: Management) -> Iterator[str]:
    """Yield a sentence for each node that is down, or that blocks publishers or soon will.

    Yields nothing if the user lacks the tag 'monitoring'.
    """
    try:
        nodes = management.get("nodes")
    except UnreachableError:
        return
    for node in nodes:
        name = node["name"]
        if not node.get("running", True):
            yield f"the node {name} is down"
        if node.get("mem_alarm"):
            yield f"the node {name} is short of memory, and blocks all publishers"
        if node.get("disk_free_alarm"):
            yield f"the node {name} is short of disk space, and blocks all publishers"
        elif (left := _disk_left(node)) < LEAST_DISK:
            yield (
                f"the node {name} has {left / 1e6:,.0f} MB of disk left before its limit, "
                f"disk_free_limit; below that, it blocks all publishers"
            )
        if node.get("partitions"):
            yield f"the node {name} does not see the nodes {', '.join(node['partitions'])}"


def _disk_left(node: Row) -> float:
    free, limit = node.get("disk_free"), node.get("disk_free_limit")
    # A node that is down reports neither, and one that cannot know reports a word.
    return free - limit if isinstance(free, int) and isinstance(limit, int) else math.inf


def missing(expected: Expected, management: Management, snapshot: Snapshot) -> Iterator[str]:
    """Yield a sentence for each ladder in use that has missing or different parts, with a count."""
    if not any(_errors(lane, expected, snapshot) for lane in expected.lanes):
        return
    # A level may have been declared between two requests.
    snapshot = Snapshot.read(management)
    for topology in expected.lanes:
        if errors := _errors(topology, expected, snapshot):
            more = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
            which = f"{topology.prefix}: " if len(expected.lanes) > 1 else ""
            yield f"{which}{errors[0]}{more}: 'verify' says what to do"


def _errors(topology: Topology, expected: Expected, snapshot: Snapshot) -> list[str]:
    declares = expected.declares or topology in expected.drained
    compared = compare(topology, snapshot, declares=declares, direct=expected.direct)
    shared: Iterable[Topology] = expected.lanes[:1]
    led = faults(topology, snapshot, expected.relays) if topology in shared else ()
    return [
        f"{difference.what}: {difference.found}"
        for difference in (*compared, *led)
        if difference.severity == "error"
    ]
