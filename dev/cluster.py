"""Purpose: a RabbitMQ cluster on one machine, of nodes that can be killed, frozen and restarted.

Each node is a `Broker` with separate data, ports and processes. They share an epmd and a cookie,
and find each other by their names, like nodes on three machines.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from dev.broker import Broker, BrokerError
from dev.service import START, Service, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Cluster(Service):
    """A cluster of nodes, three by default, that start empty.

    root, config, advanced: as for a `Broker`.
    """

    def __init__(
        self,
        root: str | None = None,
        config: Mapping[str, str | int] | None = None,
        advanced: str | None = None,
        *,
        size: int = 3,
    ) -> None:
        self.nodes: list[Broker] = []
        names = [f"env{number}" for number in range(1, size + 1)]
        config = {
            **(config or {}),
            "cluster_formation.peer_discovery_backend": "classic_config",
            **{
                f"cluster_formation.classic_config.nodes.{number}": f"{name}@localhost"
                for number, name in enumerate(names, 1)
            },
        }
        for name in names:
            beside = self.nodes[0] if self.nodes else None
            self.nodes.append(Broker(root, config, advanced, name=name, beside=beside))

    def start(self, timeout: float = START) -> None:
        """Start all nodes, and wait until they are one cluster."""
        for node in self.nodes:
            node.begin_to_start()
        for node in self.nodes:
            node.wait_until_up(timeout)
        self.wait_until_whole(timeout)

    def close(self) -> None:
        """End all nodes, and remove their folders."""
        # The first node's epmd serves them all.
        for node in reversed(self.nodes):
            node.close()

    def __iter__(self) -> Iterator[Broker]:
        return iter(self.nodes)

    def running(self) -> set[str]:
        """Return the running nodes of the cluster, as the first that answers sees it."""
        for node in self.nodes:
            with suppress(OSError, BrokerError):
                rows = node.api("GET", "nodes")
                return {row["name"] for row in rows if row.get("running")}
        return set()

    def wait_until_whole(self, timeout: float = START) -> None:
        """Wait until every node sees every other, and has started completely.

        A virtual host that is created earlier is missing on a node that still starts, and
        RabbitMQ waits 45 s for it (`rabbit_vhost_sup_sup:start_on_all_nodes`).
        """
        deadline = time.monotonic() + timeout
        everyone = {node.node for node in self.nodes}
        try:
            wait_until(lambda: self.running() == everyone, timeout, "not all are up")
        except TimeoutError as late:
            raise BrokerError(f"{late}, only {sorted(self.running())}") from None
        for node in self.nodes:
            node.ctl("await_startup", timeout=max(60, deadline - time.monotonic()))
