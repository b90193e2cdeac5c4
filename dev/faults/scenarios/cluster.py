"""Three nodes under load: the one that leads the level queues is killed, or frozen; all restart."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from dev.faults.environment import Case, Environment, ScenarioError
from dev.faults.ledger import CONFIRMED

if TYPE_CHECKING:
    from collections.abc import Callable

    from dev.broker import Broker

FROZEN = 20.0  # seconds
AWAY = 60.0
# Nodes that do not answer are given up after 8 s, instead of 60 s.
NOTICES_SOON = {"net_ticktime": 8}


def leader(env: Environment) -> Broker:
    """Find the node that leads most of the level queues."""
    nodes = {node.node: node for node in env.nodes}
    leaders: list[str] = []

    def are_known() -> bool:
        # The statistics come late, and a queue without a leader has none in them.
        rows = env.queues()
        leaders[:] = [row.get("leader", "") for row in rows if env.topology.owns(row["name"])]
        return bool(leaders) and nodes.keys() >= set(leaders)

    env.wait_until(are_known, "a leader of each level")
    return nodes[Counter(leaders).most_common(1)[0][0]]


def leader_killed(env: Environment) -> None:
    """Kill the leader, wait for the others to take over, and let it come back."""
    node = leader(env)
    node.kill()
    time.sleep(5)
    node.start()


def leader_away(env: Environment) -> None:
    """Kill the leader, and let it come back after a minute."""
    node = leader(env)
    node.kill()
    time.sleep(AWAY)
    node.start()


def others_restarted(env: Environment) -> None:
    """Kill the leader, and restart the others, one after the other, before it comes back."""
    if env.cluster is None:
        raise ScenarioError("this scenario needs a cluster")
    lost = leader(env)
    lost.kill()
    time.sleep(5)
    for node in env.nodes:
        if node is not lost:
            node.restart()
    time.sleep(AWAY)
    lost.start()


def leader_frozen(env: Environment) -> None:
    """Freeze the leader: its connections stay open, and nothing answers on them."""
    node = leader(env)
    node.freeze()
    time.sleep(FROZEN)
    node.thaw()


def rolling_restart(env: Environment) -> None:
    """Restart node by node, as for an upgrade."""
    if env.cluster is None:
        raise ScenarioError("this scenario needs a cluster")
    for node in env.nodes:
        node.restart()
        env.cluster.wait_until_whole()


def under_load(fault: Callable[[Environment], None], rounds: int) -> Callable[[Environment], None]:
    """Make the scenario of a fault, repeated while messages are published, wait and arrive."""

    def scenario(env: Environment) -> None:
        env.queue("inbox")
        env.declare_ladder("inbox")
        for _ in env.nodes[:2]:
            env.consumer("inbox")
        times = 1 if env.short else rounds
        publisher = env.publisher(["inbox"], count=times * 300, rate=50)
        for number in range(times):
            env.wait_for(CONFIRMED, number * 300 + 150, timeout=180)
            fault(env)
        publisher.wait(180)
        if env.cluster:
            env.cluster.wait_until_whole()
        env.wait_until_done(patience=240)
        env.notes["times"] = times

    return scenario


CASES = (
    Case("cluster of three", "leader killed", under_load(leader_killed, 3), nodes=3, short=True),
    Case(
        "cluster of three", "leader killed, away for a minute", under_load(leader_away, 1), nodes=3
    ),
    Case(
        "cluster of three",
        "leader killed, away for a minute, the others restarted",
        under_load(others_restarted, 1),
        nodes=3,
    ),
    Case("cluster of three", "leader frozen for 20 s", under_load(leader_frozen, 2), nodes=3),
    Case(
        "cluster of three",
        "leader frozen for 20 s, net_ticktime 8 s",
        under_load(leader_frozen, 2),
        nodes=3,
        config=NOTICES_SOON,
        since=(4, 3),
    ),
    Case("cluster of three", "rolling restart", under_load(rolling_restart, 2), nodes=3),
)
