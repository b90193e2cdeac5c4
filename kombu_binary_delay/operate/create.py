"""Declare a part of a topology: a new ladder, or the missing parts of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kombu_binary_delay.ladder.parts import Binding, Part
from kombu_binary_delay.ladder.topology import Topology

from .declare import declare
from .probe import Probe


@dataclass(frozen=True)
class Creation:
    """The names of what was declared (or would be, in a dry run), and of what existed before.

    :param other_age: those of streams that exist, and keep records for another time than the
        settings say; a dry run does not know.
    """

    exchanges: tuple[str, ...]
    queues: tuple[str, ...]
    existing: tuple[str, ...]
    bindings: int
    removed_bindings: int = 0
    other_age: tuple[str, ...] = ()


def create(
    connection: Any,
    topology: Topology,
    part: Part,
    stale: Sequence[Binding] = (),
    *,
    dry_run: bool = False,
) -> Creation:
    """Declare a part; what exists already stays as it is.

    :param connection: a :class:`kombu.Connection`.
    :param stale: bindings to remove after that, such as a repair has.
    :raises TopologyError: if the broker refuses.
    """
    with Probe(connection) as probe:
        exchanges = {
            exchange.name: probe.has_exchange(exchange.name) for exchange in part.exchanges
        }
        queues = {queue.name: probe.has_queue(queue.name) for queue in part.queues}
    other_age = () if dry_run else declare(connection, topology, part, stale)
    existing = [name for name, exists in (*exchanges.items(), *queues.items()) if exists]
    return Creation(
        tuple(name for name, exists in exchanges.items() if not exists),
        tuple(name for name, exists in queues.items() if not exists),
        tuple(dict.fromkeys(existing)),
        len(part.bindings),
        len(stale),
        other_age,
    )
