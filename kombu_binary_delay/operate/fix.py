"""Declare the missing parts of a ladder, and repair its delivery side.

It deletes or changes no exchange and no queue, so no messages are lost. It removes only stale
bindings on the delivery side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kombu_binary_delay.ladder.parts import Part
from kombu_binary_delay.ladder.topology import Topology

from .create import Creation, create
from .delivery import repair
from .management import Management
from .snapshot import Snapshot
from .verify import levels_made


def fix(  # noqa: PLR0913 - the last ones are what the settings say
    connection: Any,
    management: Management,
    lanes: Sequence[Topology],
    *,
    declares: bool = True,
    direct: bool = False,
    relays: Sequence[str] = (),
    must_exist: bool = False,
    drained: bool = False,
    amendments: Part,
    journal: Part,
) -> Creation:
    """Declare the parts that :func:`~.verify` finds missing, without changes to existing ones.

    :param connection: a :class:`kombu.Connection`.
    :param lanes: the ladders that lead to one delivery side.
    :param declares: as in ``verify``; the same holds for the other parameters.
    :raises TopologyError: if the broker refuses.
    """
    snapshot = Snapshot.read(management)
    wanted = Part()
    for topology in lanes:
        wanted += _ladder(
            topology,
            snapshot,
            declares=declares or drained,
            direct=direct,
            must_exist=must_exist,
        )
    named = {exchange.name for exchange in amendments.exchanges}
    named |= {queue.name for queue in amendments.queues}
    if not declares:
        wanted += journal
    if not declares or named & (snapshot.exchanges.keys() | snapshot.queues.keys()):
        wanted += amendments
    mended = repair(lanes[0], snapshot, relays)
    part = absent(wanted + mended.missing, snapshot)
    if part == Part() and not mended.stale:
        return Creation((), (), (), 0)
    return create(connection, lanes[0], part, mended.stale)


def absent(part: Part, snapshot: Snapshot) -> Part:
    """Return the missing objects of a part, without bindings that cannot be declared."""
    exchanges = tuple(
        exchange for exchange in part.exchanges if exchange.name not in snapshot.exchanges
    )
    queues = tuple(queue for queue in part.queues if queue.name not in snapshot.queues)
    sources = snapshot.exchanges.keys() | {exchange.name for exchange in exchanges}
    targets = snapshot.queues.keys() | {queue.name for queue in queues}
    bindings = tuple(
        binding
        for binding in part.bindings
        if binding not in snapshot.bindings
        and binding.source in sources
        and binding.destination in (targets if binding.to_queue else sources)
    )
    return Part(exchanges, queues, bindings).distinct()


def _ladder(
    topology: Topology, snapshot: Snapshot, *, declares: bool, direct: bool, must_exist: bool
) -> Part:
    """Return the required part of a ladder: up to its highest existing level, or all of it."""
    top = levels_made(topology, snapshot)
    if must_exist and top < 0:
        return Part()
    parts = topology.parts(direct=direct and not declares)
    part = sum((part for level, part in parts.items() if level <= top or not declares), Part())
    if declares:
        return part
    # Programs that declare nothing enter by the levels.
    entries = part.entry_exchanges - snapshot.exchanges.keys()
    return Part(
        tuple(exchange for exchange in part.exchanges if exchange.name not in entries),
        part.queues,
        part.bindings,
    )
