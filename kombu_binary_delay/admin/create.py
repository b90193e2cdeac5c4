"""Make a ladder ahead of its first message, and the ways to its destinations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kombu_binary_delay.model.topology import IMITABLE, Part, Topology

from .declare import declare
from .errors import OperationError
from .probe import Probe
from .snapshot import Snapshot, arguments


@dataclass(frozen=True)
class Creation:
    """Names of what was made, or would be, and of what existed before."""

    exchanges: tuple[str, ...]
    queues: tuple[str, ...]
    existing: tuple[str, ...]
    bindings: int


def create(connection: Any, topology: Topology, part: Part, *, dry_run: bool = False) -> Creation:
    """Declare a part; what stands already stays as it is.

    :param connection: a :class:`kombu.Connection`.
    :raises TopologyError: where the broker refuses.
    """
    with Probe(connection) as probe:
        exchanges = {each.name: probe.has_exchange(each.name) for each in part.exchanges}
        queues = {each.name: probe.has_queue(each.name) for each in part.queues}
    if not dry_run:
        declare(connection, topology, part)
    existing = [name for name, exists in (*exchanges.items(), *queues.items()) if exists]
    return Creation(
        tuple(name for name, exists in exchanges.items() if not exists),
        tuple(name for name, exists in queues.items() if not exists),
        tuple(dict.fromkeys(existing)),
        len(part.bindings),
    )


def ways(
    topology: Topology,
    snapshot: Snapshot,
    queues: Iterable[str],
    exchanges: Iterable[str],
    relays: Iterable[str] = (),
) -> Part:
    """Compute the ways from delivery to queues, by their names, and to exchanges, as bound now.

    :param relays: patterns of the names of queues that need a relay, as the setting has them.
    :raises OperationError: for an exchange that does not exist, or that delayed messages cannot
        reach.
    """
    refuses = partial(_refuses, topology, snapshot, tuple(relays))
    part = Part()
    for queue in queues:
        if queue not in snapshot.queues:
            raise OperationError(
                f"the queue {queue!r} does not exist in this virtual host; make it first"
            )
        part += to_queue(topology, queue, relay=refuses(queue))
    for exchange in exchanges:
        part += _way(topology, snapshot, exchange, refuses)
    return part


def to_queue(topology: Topology, queue: str, *, relay: bool) -> Part:
    """Lead to a queue, also where it has a relay: a publisher may not know."""
    way = topology.to_queue(queue)
    return way + topology.queue_relay(queue) if relay else way


def _way(
    topology: Topology, snapshot: Snapshot, exchange: str, refuses: Callable[[str], bool]
) -> Part:
    if not topology.mirrors:
        raise OperationError(
            f"the ladder {topology.prefix}* leads to queues by their names, and does not know the "
            f"exchange {exchange!r}; lead to its queues by their names instead"
        )
    kind = snapshot.exchanges.get(exchange, {}).get("type")
    if kind == "headers":
        return topology.exchange_relay(exchange)
    if kind not in IMITABLE:
        raise OperationError(
            f"the exchange {exchange!r} "
            + ("does not exist" if kind is None else f"is of the type {kind!r}")
            + f" in this virtual host; delayed messages reach {', '.join(IMITABLE)} and headers"
        )
    part = topology.mirror(exchange)
    for each in sorted(snapshot.bindings, key=repr):
        if each.source != exchange or topology.owns(each.destination):
            continue
        target = each.destination
        if each.to_queue and refuses(target):
            part += topology.queue_relay(target)
            target = topology.queue_relay_name(target)
        mirrors = topology.mirror_bindings(exchange, kind, target, each.key, to_queue=each.to_queue)
        part += Part(bindings=mirrors)
    return part


def _refuses(topology: Topology, snapshot: Snapshot, relays: Iterable[str], queue: str) -> bool:
    """Whether a queue may refuse messages, and so is led to by a relay."""
    if not topology.can_have_relays:
        return False
    row = snapshot.queues[queue]
    policy = row.get("effective_policy_definition") or {}
    # Which of them counts depends on the type of the queue.
    overflow = (arguments(row).get("x-overflow"), policy.get("overflow"))
    return (
        topology.wants_relay(queue, relays)
        or topology.queue_relay_name(queue) in snapshot.queues
        or any(str(each).startswith("reject-publish") for each in overflow)
    )
