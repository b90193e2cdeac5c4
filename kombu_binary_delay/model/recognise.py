"""Which ladder a name or an exchange belongs to: ours, an older one, a foreign one. Pure."""

from __future__ import annotations

import re

from kombu_binary_delay.errors import LadderError

from .foreign import FOREIGN_LADDERS, ForeignLadder
from .topology import Topology
from .v1 import TopologyV1

_NAME = re.compile(
    r"(?P<namespace>[\w-]+)\.(?P<version>v[12])-(?P<ladder>[0-9]+ms[0-9x-]+[0-9])"
    r"(?:-(?P<skip>skip))?(?:-lane(?P<lane>[1-9][0-9]*))?(?:-(?P<urgent>urgent))?"
    r"(?:-(?P<classic>classic))?\.",
    re.ASCII,
)
_DELIVERY_SIDE = re.compile(
    r"([\w-]+\.v[0-9]+(?:-classic)?)\.(?:delivery|to-queues|parking|(?:mirror|relay-to-[a-z]+)\..*)",
    re.ASCII | re.DOTALL,
)
_BY_EXCHANGE: dict[str, ForeignLadder] = {
    exchange.name: each for each in FOREIGN_LADDERS.values() for exchange in each.whole.exchanges
}


def topology_of_name(name: str) -> Topology | None:
    """Return the topology of whose ladder side an exchange or queue is a part, by its name.

    One of an older form is of a class of its own.
    """
    match = _NAME.match(name)
    if match is None:
        return None
    form = TopologyV1 if match["version"] == TopologyV1.version else Topology
    try:
        ladder = form.numerals.from_name(match["ladder"])
    except LadderError:
        return None
    queue_type, layout = match["classic"] or "quorum", match["skip"] or "chain"
    lane, urgent = int(match["lane"] or 0), bool(match["urgent"])
    return form(ladder, match["namespace"], queue_type, layout, lane, urgent)


def ladder_of_exchange(exchange: str, ours: Topology) -> Topology | None:
    """Return the ladder that a message comes from, by the exchange in its delivery.

    A dead letter names the exchange that its *last* wait led to: the delivery exchange, if that was
    at the lowest level, else the exchange of the level below. A message without any wait names the
    exchange that it was published to.

    :returns: ``ours`` for every ladder of its namespace, of whatever form; another system's ladder;
        or None, where the exchange is the user's.
    """
    return ours if ours.owns(exchange) else _BY_EXCHANGE.get(exchange)


def parking_of(name: str) -> str | None:
    """Name the parking queue of the ladder, of whatever namespace, that an exchange is a part of.

    :returns: None where the name is none of a ladder's.
    """
    ladder = topology_of_name(name)
    if ladder is not None:
        return ladder.parking
    match = _DELIVERY_SIDE.fullmatch(name)
    return f"{match[1]}.parking" if match else None
