"""Three nodes under load: the one that leads the level queues is killed, or frozen; all restart."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from lab.broker import SETTLES_SOON
from lab.faults.lab import Case, Lab, LabError
from lab.faults.ledger import CONFIRMED

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab.broker import Broker

FROZEN = 20.0  # seconds
# Nodes that do not answer are given up after 8 s, instead of 60 s.
NOTICES_SOON = f"{SETTLES_SOON.removesuffix('].')}, {{kernel, [{{net_ticktime, 8}}]}}]."


def leader(lab: Lab) -> Broker:
    """Find the node that leads most of the level queues."""
    leaders = Counter(row.get("leader") for row in lab.queues() if lab.topology.owns(row["name"]))
    name = leaders.most_common(1)[0][0]
    return next(node for node in lab.nodes if node.node == name)


def leader_killed(lab: Lab) -> None:
    """Kill the leader, wait for the others to take over, and let it come back."""
    node = leader(lab)
    node.kill()
    time.sleep(5)
    node.start()


def leader_frozen(lab: Lab) -> None:
    """Freeze the leader: its connections stay open, and nothing answers on them."""
    node = leader(lab)
    node.freeze()
    time.sleep(FROZEN)
    node.thaw()


def rolling_restart(lab: Lab) -> None:
    """Restart node by node, as for an upgrade."""
    if lab.cluster is None:
        raise LabError("this story needs a cluster")
    for node in lab.nodes:
        node.restart()
        lab.cluster.wait_until_whole()


def under_load(fault: Callable[[Lab], None], rounds: int) -> Callable[[Lab], None]:
    """Tell the story of a fault, repeated while messages are published, wait and arrive."""

    def story(lab: Lab) -> None:
        lab.queue("inbox")
        lab.stand("inbox")
        for _ in lab.nodes[:2]:
            lab.consumer("inbox")
        times = 1 if lab.short else rounds
        publisher = lab.publisher(["inbox"], count=times * 300, rate=50)
        for number in range(times):
            lab.wait_for(CONFIRMED, number * 300 + 150, timeout=180)
            fault(lab)
        publisher.wait(180)
        if lab.cluster:
            lab.cluster.wait_until_whole()
        lab.settle(patience=240)
        lab.notes["times"] = times

    return story


CASES = (
    Case("cluster of three", "leader killed", under_load(leader_killed, 3), nodes=3, short=True),
    Case("cluster of three", "leader frozen for 20 s", under_load(leader_frozen, 2), nodes=3),
    Case(
        "cluster of three",
        "leader frozen for 20 s, net_ticktime 8 s",
        under_load(leader_frozen, 2),
        nodes=3,
        advanced=NOTICES_SOON,
        since=(4, 3),
    ),
    Case("cluster of three", "rolling restart", under_load(rolling_restart, 2), nodes=3),
)
