"""Find the ladder that a name or an exchange belongs to: ours or a foreign one. Pure."""

from __future__ import annotations

import re

from kombu_binary_delay.errors import LadderError

from .foreign import ladder_of_name
from .ladder import Ladder
from .topology import VERSION, Topology

_NAME = re.compile(
    rf"(?P<namespace>[\w-]+)\.{VERSION}-(?P<ladder>[0-9]+ms[0-9x-]+[0-9])"
    r"(?:-(?P<skip>skip))?(?:-lane(?P<lane>[1-9][0-9]*))?(?:-(?P<urgent>urgent))?"
    r"(?:-(?P<classic>classic))?\.",
    re.ASCII,
)
_DELIVERY_SIDE = re.compile(
    r"([\w-]+\.v[0-9]+(?:-classic)?)\.(?:delivery|to-queues|parking|poison|(?:mirror|relay-to-[a-z]+)\..*)",
    re.ASCII | re.DOTALL,
)


def topology_of_name(name: str) -> Topology | None:
    """Return the topology whose ladder side has an exchange or queue of this name."""
    match = _NAME.match(name)
    if match is None:
        return None
    try:
        ladder = Ladder.from_name(match["ladder"])
    except LadderError:
        return None
    queue_type, layout = match["classic"] or "quorum", match["skip"] or "chain"
    lane, urgent = int(match["lane"] or 0), bool(match["urgent"])
    return Topology(ladder, match["namespace"], queue_type, layout, lane, urgent)


def ladder_of_exchange(exchange: str, ours: Topology) -> Topology | None:
    """Return the ladder that a message comes from, by the exchange in its delivery.

    A dead letter has the exchange that its *last* wait led to: the delivery exchange if that wait
    was at the lowest level, otherwise the exchange of the level below. A message that did not wait
    has the exchange that it was published to.

    :returns: ``ours`` for every ladder of its namespace; another system's ladder; or
        None if the exchange belongs to no ladder.
    """
    return ours if ours.owns(exchange) else ladder_of_name(exchange)


def parking_of(name: str) -> str | None:
    """Return the parking queue of the ladder, of any namespace, that an exchange belongs to.

    :returns: None if the name belongs to no ladder.
    """
    ladder = topology_of_name(name)
    if ladder is not None:
        return ladder.parking
    match = _DELIVERY_SIDE.fullmatch(name)
    return f"{match[1]}.parking" if match else None
