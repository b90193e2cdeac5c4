"""Remove queues that each serve one delay, where they are idle and empty.

Such a queue must not expire by itself: RabbitMQ would delete it with what waits in it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from amqp.exceptions import ResourceLocked

from kombu_binary_delay.model.topology import Part, Topology

from .declare import declare
from .errors import RefusedError
from .management import Management
from .progress import Notify, ignore
from .snapshot import Snapshot
from .teardown import STATS_DELAY, held


@dataclass(frozen=True)
class Pruning:
    """Names of the queues that were removed, or would be, and of those that stay."""

    removed: tuple[str, ...]
    kept: tuple[str, ...]


def prune(  # noqa: PLR0913 - the last three are for callers of different patience
    connection: Any,
    management: Management,
    topology: Topology,
    *,
    dry_run: bool = False,
    stats_delay: float = STATS_DELAY,
    notify: Notify = ignore,
) -> Pruning:
    """Remove the ladder's queues for one delay that hold nothing.

    Each is unbound first: a delay without a queue walks down the levels, as any other does. One in
    which a message is found then is bound again.

    :raises RefusedError: where an application makes such a queue at this moment, or a queue cannot
        tell whether it is empty.
    """
    snapshot = Snapshot.read(management)
    own = f"{topology.own}."
    names = [name for name in snapshot.queues if name.startswith(own) and name.endswith("ms")]
    filled = held(connection, management, names)
    empty = [name for name in names if name not in filled]
    if not empty or dry_run:
        return Pruning(tuple(empty), tuple(name for name in names if name not in empty))
    bindings = [
        each
        for each in snapshot.bindings
        if each.source == topology.own and each.to_queue and each.destination in empty
    ]
    channel = connection.channel()
    try:
        # Applications hold this lock while they make such a queue.
        channel.queue_declare(f"{topology.own}.lock", exclusive=True, auto_delete=True)
    except ResourceLocked as exc:
        raise RefusedError("an application is making a queue for a delay; try again") from exc
    try:
        for each in bindings:
            channel.queue_unbind(each.destination, each.source, each.key)
        notify(f"unbound {len(empty)} queues; waiting {stats_delay:g} s for the broker's figures")
        time.sleep(stats_delay)
        filled = held(connection, management, empty, stats_current=stats_delay >= STATS_DELAY)
        for name in empty:
            if name not in filled:
                channel.queue_delete(name)
    finally:
        existing = {row["name"] for row in management.here("queues")}
        again = tuple(each for each in bindings if each.destination in existing)
        declare(connection, topology, Part(bindings=again))
        channel.queue_delete(f"{topology.own}.lock")
        channel.close()
    removed = tuple(name for name in empty if name not in existing)
    return Pruning(removed, tuple(name for name in names if name in existing))
