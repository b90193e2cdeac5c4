"""Remove queues that each serve one delay, where they are idle and empty.

Such a queue must not expire by itself: RabbitMQ would delete it with what waits in it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from amqp.exceptions import ResourceLocked

from kombu_binary_delay.executor import Executor, declare
from kombu_binary_delay.model.parts import Part
from kombu_binary_delay.model.topology import Topology

from .errors import RefusedError
from .management import Management
from .snapshot import Live, Say, silent
from .teardown import SETTLE, held


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
    settle: float = SETTLE,
    say: Say = silent,
) -> Pruning:
    """Remove the ladder's queues for one delay that hold nothing.

    Each is unbound first: a delay without a queue walks down the levels, as any other does. One in
    which a message is found then is bound again.

    :raises RefusedError: where an application makes such a queue at this moment, or a queue cannot
        tell whether it is empty.
    """
    live = Live.read(management)
    direct = f"{topology.direct}."
    names = [name for name in live.queues if name.startswith(direct) and name.endswith("ms")]
    filled = held(connection, management, names)
    empty = [name for name in names if name not in filled]
    if not empty or dry_run:
        return Pruning(tuple(empty), tuple(name for name in names if name not in empty))
    bindings = [
        each
        for each in live.bindings
        if each.source == topology.direct and each.to_queue and each.destination in empty
    ]
    channel = connection.channel()
    try:
        # Applications hold this lock while they make such a queue.
        channel.queue_declare(f"{topology.direct}.lock", exclusive=True, auto_delete=True)
    except ResourceLocked as exc:
        raise RefusedError("an application is making a queue for a delay; try again") from exc
    try:
        for each in bindings:
            channel.queue_unbind(each.destination, each.source, each.key)
        say(f"unbound {len(empty)} queues; waiting {settle:g} s for the broker's figures")
        time.sleep(settle)
        filled = held(connection, management, empty, settled=settle >= SETTLE)
        for name in empty:
            if name not in filled:
                channel.queue_delete(name)
    finally:
        with Executor(connection.connection, topology.namespace).channel("the queues") as lent:
            standing = {row["name"] for row in management.here("queues")}
            again = tuple(each for each in bindings if each.destination in standing)
            declare(lent, Part(bindings=again))
        channel.queue_delete(f"{topology.direct}.lock")
        channel.close()
    removed = tuple(name for name in empty if name not in standing)
    return Pruning(removed, tuple(name for name in names if name in standing))
