"""Remove empty queues and exchanges that nothing else removes.

These are direct queues, which hold one delay each (RabbitMQ would delete an expired queue with its
messages), and mirrors and relays whose exchange or queue is gone (RabbitMQ notifies no client when
it deletes an auto-delete one).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from amqp.exceptions import PreconditionFailed, ResourceLocked

from kombu_binary_delay.celery_side.failures import to_raise_a_limit
from kombu_binary_delay.ladder.parts import Binding, Part
from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.wire.executor import unbind

from .declare import declare, delete_empty
from .delivery import orphans, ways
from .errors import OperationError, RefusedError
from .management import Management
from .probe import Probe
from .progress import Notify, ignore
from .reading import delay_queues
from .snapshot import Snapshot
from .teardown import STATS_DELAY, held


@dataclass(frozen=True)
class Pruning:
    """The names of the queues and exchanges that were removed (or would be), and of kept queues."""

    removed: tuple[str, ...]
    kept: tuple[str, ...]
    exchanges: tuple[str, ...] = ()


def prune(  # noqa: PLR0913 - the last three are for callers of different patience
    connection: Any,
    management: Management,
    topology: Topology,
    *,
    delivery_side: bool = True,
    dry_run: bool = False,
    stats_delay: float = STATS_DELAY,
    notify: Notify = ignore,
) -> Pruning:
    """Remove empty direct queues, and empty mirrors and relays whose exchange or queue is gone.

    Each is unbound first: a delay without a direct queue passes the levels, and messages for an
    exchange or a queue that does not exist are parked. If a queue then has a message, or an
    exchange or a queue exists again, its bindings are restored.

    :param delivery_side: whether to look for mirrors and relays, too, which lanes share.
    :raises RefusedError: if an application is declaring such a queue, or a queue's leader does not
        answer, so that it is not known whether the queue is empty.
    :raises OperationError: if the virtual host's queue limit leaves no room for one queue more,
        which keeps applications from declaring direct queues meanwhile.
    """
    snapshot = Snapshot.read(management)
    left_over = orphans(topology, snapshot) if delivery_side else ()
    delays = list(delay_queues(topology, snapshot.queues))
    queues = [*delays, *(name for name in left_over if name in snapshot.queues)]
    filled = held(connection, management, queues)
    empty = [name for name in queues if name not in filled]
    exchanges = [name for name in left_over if name in snapshot.exchanges and name not in filled]
    if dry_run or not (empty or exchanges):
        return Pruning(tuple(empty), _rest(queues, empty), tuple(exchanges))
    going = {*empty, *exchanges}
    bindings = tuple(
        binding
        for binding in snapshot.removable(sorted(snapshot.bindings, key=repr))
        if binding.source in going
        or (binding.destination in going and topology.owns(binding.source))
    )
    with _lock(connection, topology, needed=any(name in empty for name in delays)):
        channel = connection.channel()
        try:
            unbind(channel, bindings)
            notify(
                f"unbound {len(empty)} queues and {len(exchanges)} exchanges; waiting "
                f"{stats_delay:g} s for the broker's statistics"
            )
            time.sleep(stats_delay)
            filled = held(connection, management, empty, stats_current=stats_delay >= STATS_DELAY)
            now = Snapshot.read(management)
            leaves = {*delays, *orphans(topology, now)} - filled.keys()
            # One that was bound again is in use.
            leaves -= {binding.destination for binding in now.bindings} | {
                binding.source for binding in now.bindings
            }
            with Probe(connection) as probe:
                for name in (name for name in empty if name in leaves and name in now.queues):
                    try:
                        delete_empty(channel, probe, now.queues[name])
                    except RefusedError:
                        # A message has come in since. A relay's exchange has the same name.
                        leaves.discard(name)
            _delete_exchanges(channel, [name for name in exchanges if name in leaves])
        finally:
            again = Snapshot.read(management)
            declare(connection, topology, _restored(topology, again, bindings, left_over))
            channel.close()
    return Pruning(
        tuple(name for name in empty if name not in again.queues),
        tuple(name for name in queues if name in again.queues),
        tuple(name for name in exchanges if name not in again.exchanges),
    )


def _rest(names: Iterable[str], without: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in without)


@contextmanager
def _lock(connection: Any, topology: Topology, *, needed: bool) -> Iterator[None]:
    """Hold the lock that applications hold while they declare a direct queue."""
    if not needed:
        yield
        return
    channel = connection.channel()
    lock = f"{topology.direct}.lock"
    try:
        channel.queue_declare(lock, exclusive=True, auto_delete=True)
    except ResourceLocked as exc:
        channel.close()
        raise RefusedError("an application is making a queue for a delay; try again") from exc
    except PreconditionFailed as exc:
        # Without the lock, an application may fill a queue that is about to be deleted.
        remedy = to_raise_a_limit(exc.reply_text, connection.virtual_host or "/")
        raise OperationError(
            f"the queue {lock!r}, which keeps applications from making such queues meanwhile, "
            f"cannot be declared: {exc.reply_text}" + (f"; {remedy}" if remedy else "")
        ) from exc
    try:
        yield
    finally:
        channel.queue_delete(lock)
        channel.close()


def _delete_exchanges(channel: Any, names: Iterable[str]) -> None:
    for name in names:
        # It may just have been bound again.
        with suppress(PreconditionFailed):
            channel.exchange_delete(name, if_unused=True)


def _restored(
    topology: Topology, snapshot: Snapshot, bindings: Iterable[Binding], left_over: Iterable[str]
) -> Part:
    """Return the bindings to restore: of queues that stay, or are in use again."""
    orphaned = set(orphans(topology, snapshot))
    names = {*snapshot.exchanges, *snapshot.queues}
    part = Part(
        bindings=tuple(
            binding
            for binding in bindings
            if binding.source in names
            and binding.destination in names
            # The bindings of a mirror follow from those of its exchange now: below.
            and (binding.source not in left_over or binding.source in orphaned)
        )
    )
    for queue in snapshot.queues:
        if topology.queue_relay_name(queue) in left_over and not snapshot.is_exclusive(queue):
            part += topology.queue_relay(queue)
    came_back = (
        exchange for exchange in snapshot.exchanges if topology.mirror_name(exchange) in left_over
    )
    return part + ways(topology, snapshot, (), came_back)
