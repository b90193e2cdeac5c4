"""Find limits of the broker that leave the ladder no room, and a ladder that needs less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kombu_binary_delay.errors import LadderError
from kombu_binary_delay.ladder.ladder import Ladder
from kombu_binary_delay.ladder.topology import Topology

from .management import Management
from .snapshot import Snapshot
from .text import plural

#: The radices to propose, the one with the most queues, and the fewest waits, first.
_RADICES = (4, 2)
#: How many channels the transport opens on one connection beside those of the program: one to
#: declare, one to write amendments, and one to read them.
OUR_CHANNELS = 3


class Limit(NamedTuple):
    """A limit that is close: its name, what it allows and has, what fails, and what to do."""

    name: str
    found: str
    causes: str
    remedy: str


def fewer(topology: Topology, room: float) -> str:
    """Return what to set for a ladder with fewer queues than this one; empty if there is none.

    :param room: the most queues that it may have.
    """
    if not topology.is_ours:
        return ""
    for radix in _RADICES:
        try:
            ladder = Ladder.uniform(radix, None, topology.ladder.tick)
        except LadderError:
            continue
        queues = len(replace(topology, ladder=ladder).whole.queues)
        if queues < len(topology.whole.queues) and queues <= room:
            return f"set radix to {radix}, for a ladder of {plural(queues, 'queue')}"
    return ""


def limits(
    management: Management, lanes: Sequence[Topology], snapshot: Snapshot, user: str
) -> Iterator[Limit]:
    """Yield the limits of the virtual host and the user that leave no room for what is needed.

    :param lanes: the ladders that programs use side by side.
    :raises UnreachableError: if the API does not let its user read them.
    """
    most = _values(management.here("vhost-limits")).get("max-queues", -1)
    needed = {queue.name for lane in lanes for queue in lane.whole.queues}
    missing, room = len(needed - snapshot.queues.keys()), most - len(snapshot.queues)
    if most >= 0 and missing > room:
        instead = fewer(lanes[0], room / len(lanes))
        yield Limit(
            "max-queues of the virtual host",
            f"{most}, of which {len(snapshot.queues)} exist; {plural(missing, 'more queue')} of "
            f"the ladder may be needed",
            "a publish fails if its delay needs a level that is not made yet",
            f"raise it with rabbitmqctl set_vhost_limits{f'; or {instead}' if instead else ''}",
        )
    most = _values(management.get("user-limits", user)).get("max-channels", -1)
    if most >= 0:
        rows = management.get("connections")
        used = sum(row.get("channels", 0) for row in rows if row.get("user") == user)
        if most - used < OUR_CHANNELS:
            yield Limit(
                f"max-channels of the user {user}",
                f"{most}, of which {used} are open",
                f"this transport opens up to {OUR_CHANNELS} channels on a connection beside those "
                f"of the program, and what needs another fails",
                "raise it with rabbitmqctl set_user_limits",
            )


def _values(rows: Any) -> dict[str, int]:
    """Return the limits in an answer of the API, which has a row if there are any."""
    return dict(rows[0]["value"]) if rows else {}
