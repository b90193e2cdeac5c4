"""Remove a ladder, and its delivery side if no other ladder uses it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from kombu_binary_delay.amendments.parts import IDS, KEYS, exchange_name, stream_name
from kombu_binary_delay.celery_side.failures import BROKER_ERRORS
from kombu_binary_delay.errors import BinaryDelayError, TopologyError
from kombu_binary_delay.journal import stream_name as stream_name_of_journal
from kombu_binary_delay.ladder.parts import Binding, Exchange, Part, Queue
from kombu_binary_delay.ladder.recognise import topology_of_name
from kombu_binary_delay.ladder.topology import Topology

from .declare import delete_empty, delete_exchanges, restore
from .errors import OperationError, RefusedError, UnreachableError
from .management import Management
from .probe import Probe, ready
from .progress import Notify, ignore
from .snapshot import Row, Snapshot, arguments, queues_now, unknown, unseen
from .status import ladder_of
from .text import plural

#: Seconds until statistics of the management API are newer than now: two ticks of a quorum queue.
#: Only these count the messages that a dead-letter worker has.
STATS_DELAY = 11.0
#: Seconds in which what has left a queue gets to the next one, as long as a way leads there.
_ON_THE_WAY = 0.2


@dataclass(frozen=True)
class Teardown:
    """The names of what was removed (or would be), and the number of messages ``lost`` with it.

    ``keeps`` names the ladders that still use the delivery side; ``journal`` is the name of the
    journal's stream, if there is one and no ladder is left that would write to it.
    """

    exchanges: tuple[str, ...]
    queues: tuple[str, ...]
    lost: int
    keeps: tuple[str, ...]
    journal: str = ""


def teardown(  # noqa: PLR0913 - what stays, and for callers of different patience
    connection: Any,
    management: Management,
    topology: Topology,
    *,
    in_use: Iterable[Topology] = (),
    gone: Iterable[Topology] = (),
    amended: Iterable[str] = (),
    force: bool = False,
    dry_run: bool = False,
    stats_delay: float = STATS_DELAY,
    notify: Notify = ignore,
) -> Teardown:
    """Remove an empty ladder or, with ``force``, a ladder with its messages.

    This also removes the delivery side, unless other ladders use it. The last ladder of a namespace
    takes the amendments with it, which then also end for messages in your own queues. The journal
    stays. If nothing of the ladder exists, nothing is removed.

    The exchanges are deleted first, from the highest level down: no more messages can enter, and
    what is on its way gets on. Then each queue is deleted, if it is empty and no exchange leads to
    it. If messages are found, or a publisher that still runs has declared the ladder again,
    everything is restored: stop the publishers before.

    :param in_use: ladders that are in use, even if no message has needed their levels yet.
    :param gone: ladders to take for removed, as what removes several plans it.
    :param amended: namespaces whose amendments are in use without a ladder: programs that delay on
        another system's ladder.
    :param stats_delay: the seconds to wait for statistics that include messages between two levels.
        With fewer, what has left a level and cannot get on is not found, and lost.
    :param notify: called with a text about the wait.
    :raises RefusedError: if messages wait, a publisher has declared the ladder again, or a queue
        has no leader that could report its messages. If the error says so, a message that came in
        at the very moment was deleted.
    :raises UnreachableError: if the management API goes away meanwhile; or if the broker does, or
        refuses to delete a part, so that the ladder may be left half removed, as the message then
        says.
    """
    snapshot = Snapshot.read(management)
    mine = [name for name in snapshot.exchanges if ladder_of(topology, name) == topology.prefix]
    queues = [name for name in snapshot.queues if ladder_of(topology, name) == topology.prefix]
    others = _others(topology, snapshot, in_use, gone)
    if not mine and not queues:
        # The delivery side belongs to another ladder, or was made ahead of one.
        return Teardown((), (), 0, others)
    journal = stream_name_of_journal(topology.namespace)
    journal_stays = not others and journal in snapshot.queues
    if not others:
        side = f"{topology.delivery_prefix}."
        amendments = _amendments(topology)
        # Another system's ladder has none of its own.
        amendments_go = (
            topology.is_ours
            and topology.namespace not in amended
            and not _others(topology, snapshot, in_use, gone, all_sides=True)
        )

        def goes(name: str) -> bool:
            if name in amendments:
                return amendments_go
            return name == topology.delivery or (name.startswith(side) and name != journal)

        mine += [name for name in snapshot.exchanges if goes(name)]
        # Before the ladder's own queues: while one of those exists, the teardown can be repeated.
        queues = [
            *(name for name in snapshot.queues if goes(name) and name not in queues),
            *queues,
        ]
    mine = sorted(set(mine), key=lambda name: (_stage(topology, name), name))
    counted = [name for name in queues if name not in _amendments(topology)]
    waiting = held(connection, management, counted, guess=force)
    lost = sum(waiting.values())
    if lost and not force:
        cancelled = ""
        if not _amendments(topology).isdisjoint(snapshot.queues):
            cancelled = ", those that were cancelled among them: these wait until they are due, too"
        journal_left = (
            f"; the journal, {journal}, stays, with arguments of tasks in it"
            if journal_stays
            else ""
        )
        raise RefusedError(
            f"{_listed(waiting)}{cancelled}; wait until they have left, migrate or redrive them, "
            f"or remove them with --force, and they are lost{journal_left}"
        )
    if not dry_run and force:
        _remove(connection, topology, mine, queues)
    elif not dry_run:
        # The amendments last: put back, they would be empty.
        going = [*counted, *(name for name in queues if name not in counted)]
        _remove_empty(connection, management, topology, snapshot, mine, going, stats_delay, notify)
    left = journal if journal_stays else ""
    return Teardown(tuple(mine), tuple(sorted(queues)), lost, others, left)


def held(
    connection: Any,
    management: Management,
    queues: Iterable[str],
    *,
    stats_current: bool = False,
    guess: bool = False,
) -> dict[str, int]:
    """Return the numbers of messages of non-empty queues, with messages between two levels.

    :param stats_current: whether the API's statistics are recent enough.
    :param guess: whether to treat a queue without a leader as empty.
    :raises RefusedError: if a queue has no leader, and ``guess`` is false.
    """
    queues = list(queues)
    counted = ready(connection, queues)
    rows = queues_now(management)
    down = unknown(queues, rows)
    unclear = [
        name
        for name in queues
        if name in down or (name in rows and _lacks_statistics(rows[name], current=stats_current))
    ]
    if unclear and not guess:
        raise RefusedError(
            f"the number of messages in {', '.join(unclear[:3])}{_more(unclear)} is not known; try "
            f"again when all nodes run and the management API has statistics of each queue"
        )
    sums = {}
    for name, count in counted.items():
        row = rows.get(name, {})
        reported = int(row.get("messages") or 0) if stats_current else 0
        sums[name] = max(count + unseen(row), reported)
    return {name: count for name, count in sums.items() if count}


def _lacks_statistics(row: Row, *, current: bool) -> bool:
    return row.get("state") == "live" or (current and row.get("messages") is None)


def _amendments(topology: Topology) -> set[str]:
    """Return the names of a namespace's exchange and streams of amendments."""
    namespace = topology.namespace
    return {exchange_name(namespace), *(stream_name(namespace, key) for key in (IDS, KEYS))}


def _others(
    topology: Topology,
    snapshot: Snapshot,
    in_use: Iterable[Topology],
    gone: Iterable[Topology],
    *,
    all_sides: bool = False,
) -> tuple[str, ...]:
    """Return the other ladders with the same delivery side, or of the same namespace."""
    existing = filter(None, map(topology_of_name, snapshot.exchanges))
    without = {topology.prefix, *(ladder.prefix for ladder in gone)}
    return tuple(
        dict.fromkeys(
            other.prefix
            for other in (*in_use, *existing)
            if other.prefix not in without
            and (
                other.namespace == topology.namespace
                if all_sides
                else other.delivery == topology.delivery
            )
        )
    )


def _stage(topology: Topology, name: str) -> int:
    """Return when an exchange is deleted: before those to which its queues pass messages on.

    That is the highest level first, which publishers check.
    """
    levels = [topology.level_name(level) for level in range(topology.ladder.levels)]
    if name in levels:
        return len(levels) - levels.index(name)
    if ladder_of(topology, name):
        return 0
    if not topology.is_ours:
        return len(levels) + 1
    last = topology.queue_relay_name(""), topology.exchange_relay_name(""), topology.parking
    return len(levels) + 1 + name.startswith(last)


def _but(lost: Sequence[Binding]) -> str:
    if not lost:
        return ""
    names = list(dict.fromkeys(binding.destination for binding in lost))
    return (
        f", but for the bindings of {', '.join(names[:3])}{_more(names)}, which is gone or belongs "
        f"to another connection alone"
    )


def _ways(topology: Topology, snapshot: Snapshot, exchanges: list[str]) -> str:
    """Return what to add to ``create``, so that the ladder leads to the same queues again."""
    mirrors = {topology.mirror_name(name): name for name in snapshot.exchanges if name}
    names = {
        binding.destination
        for binding in _part(topology, snapshot, exchanges).bindings
        if binding.to_queue
        and not topology.owns(binding.destination)
        and binding.source not in mirrors
    }
    led = {
        "--queue": names,
        "--exchange": {mirrors[exchange] for exchange in exchanges if exchange in mirrors},
    }
    said = [
        f"{option} for each of {', '.join(sorted(led_to)[:3])}{_more(led_to)}"
        for option, led_to in led.items()
        if led_to
    ]
    return f", and 'create' with {' and '.join(said)}, to which it led" if said else ""


def _listed(waiting: dict[str, int]) -> str:
    first = ", ".join(f"{count} in {name}" for name, count in list(waiting.items())[:3])
    count = sum(waiting.values())
    waits = "waits" if count == 1 else "wait"
    return f"{plural(count, 'message')} {waits} ({first}{_more(waiting)})"


def _more(names: Sized) -> str:
    return ", …" if len(names) > 3 else ""


def _remove_empty(  # noqa: PLR0913, PLR0917 - one step of one function, which has all of it
    connection: Any,
    management: Management,
    topology: Topology,
    snapshot: Snapshot,
    exchanges: list[str],
    queues: list[str],
    stats_delay: float,
    notify: Notify,
) -> None:
    deleted: list[str] = []
    gone: list[str] = []
    counted = [name for name in queues if name not in _amendments(topology)]
    if _owned(topology, Snapshot.read(management)) != _owned(topology, snapshot):
        # What it declares now could not be put back.
        raise RefusedError(
            f"a program is declaring parts of {topology.prefix} at this moment; stop the programs "
            f"that publish to it, and try again"
        )
    try:
        for _, stage in groupby(exchanges, key=partial(_stage, topology)):
            _delete_stage(connection, snapshot, list(stage), counted, stats_delay, deleted)
        notify(f"deleted the exchanges; waiting {stats_delay:g} s for the broker's statistics")
        time.sleep(stats_delay)
        _check(held(connection, management, counted, stats_current=stats_delay >= STATS_DELAY))
        _delete(connection, topology, snapshot, exchanges, queues, gone)
    except BaseException as exc:
        if not deleted:
            raise
        # An interrupt must not leave a half-removed ladder. The connection may be broken.
        try:
            with connection.clone() as again:
                lost = restore(again, topology, _part(topology, snapshot, deleted, gone))
        except (BinaryDelayError, *BROKER_ERRORS) as failed:
            half = (
                f"the ladder {topology.prefix} is half removed: its exchanges "
                f"{', '.join(deleted[:3])}{_more(deleted)} are deleted, and could not be put back: "
                f"{str(failed) or type(failed).__name__}; when RabbitMQ answers, run "
                f"'verify --fix --ladder {topology.prefix}'{_ways(topology, snapshot, deleted)}; "
                f"or 'teardown' again"
            )
            if isinstance(exc, Exception):
                kind = RefusedError if isinstance(failed, TopologyError) else UnreachableError
                raise kind(f"{str(exc) or type(exc).__name__}; {half}") from exc
            with suppress(OSError):
                notify(half)
            raise exc from None
        put_back = f"the ladder was put back as it was{_but(lost)}"
        if isinstance(exc, OperationError):
            kind = UnreachableError if isinstance(exc, UnreachableError) else RefusedError
            raise kind(f"{exc}; {put_back}") from exc
        if lost:
            # After a signal, nobody may be there to read it.
            with suppress(OSError):
                notify(put_back)
        raise


def _delete_stage(  # noqa: PLR0913, PLR0917 - one step of one function, which has all of it
    connection: Any,
    snapshot: Snapshot,
    exchanges: list[str],
    queues: Iterable[str],
    stats_delay: float,
    deleted: list[str],
) -> None:
    """Delete exchanges, and wait until what was in their queues is in those of later stages.

    :raises RefusedError: if a message is to stay there for longer.
    """
    delete_exchanges(connection, exchanges, deleted)
    led = {binding.destination for binding in snapshot.bindings if binding.source in exchanges}
    closed = [name for name in queues if name in led]
    _check(_ready(connection, closed))
    time.sleep(min(_ON_THE_WAY, stats_delay))
    _check(_ready(connection, closed))


def _ready(connection: Any, queues: Iterable[str]) -> dict[str, int]:
    return {name: count for name, count in ready(connection, queues).items() if count}


def _check(waiting: dict[str, int]) -> None:
    if waiting:
        raise RefusedError(
            f"{_listed(waiting)}: they came in meanwhile; stop the programs that publish to it, "
            f"and wait until it is empty"
        )


def _delete(  # noqa: PLR0913, PLR0917 - one step of one function, which has all of it
    connection: Any,
    topology: Topology,
    snapshot: Snapshot,
    exchanges: list[str],
    queues: list[str],
    deleted: list[str],
) -> None:
    """Delete queues one by one, each as long as it is empty and nothing leads to it.

    :param deleted: gets the name of each that may be deleted.
    """
    # A relay and an entry exchange have their queue's name. A publisher may just have begun to
    # declare the ladder when the snapshot was taken.
    ways = {name: {name} for name in queues}
    for binding in (*snapshot.bindings, *topology.whole.bindings):
        if binding.destination in ways and (
            binding.source in exchanges or topology.owns(binding.source)
        ):
            ways[binding.destination].add(binding.source)
    channel = connection.channel()
    with Probe(connection) as probe:
        for name in queues:
            # Before: an interrupt may come when the broker has done it.
            deleted.append(name)
            if name in _amendments(topology):
                channel.queue_delete(name)
            else:
                delete_empty(channel, probe, snapshot.queues[name], sorted(ways[name]))
    channel.close()


def _owned(topology: Topology, snapshot: Snapshot) -> tuple[set[Any], ...]:
    """Return what a namespace has in a snapshot, to compare it."""
    return (
        set(filter(topology.owns, snapshot.exchanges)),
        set(filter(topology.owns, snapshot.queues)),
        {binding for binding in snapshot.bindings if topology.owns(binding.source)},
    )


def _part(
    topology: Topology, snapshot: Snapshot, exchanges: Sequence[str], queues: Sequence[str] = ()
) -> Part:
    """Return exchanges and queues with all their bindings, to restore them.

    These are the bindings of the snapshot, and those of the topology between what it has: all that
    a program that declares the ladder at the same time takes to exist.
    """
    names = snapshot.exchanges.keys() | snapshot.queues.keys()
    meant = {
        binding
        for binding in topology.whole.bindings
        if {binding.source, binding.destination} <= names
    }
    bindings: list[Binding] = [
        binding
        for binding in sorted(snapshot.bindings | meant, key=repr)
        if binding.source in exchanges
        or binding.destination in (queues if binding.to_queue else exchanges)
    ]
    rows = [snapshot.exchanges[name] for name in exchanges]
    return Part(
        tuple(Exchange(row["name"], row["type"], tuple(arguments(row).items())) for row in rows),
        tuple(Queue(name, tuple(arguments(snapshot.queues[name]).items())) for name in queues),
        tuple(bindings),
    )


def _remove(connection: Any, topology: Topology, exchanges: list[str], queues: list[str]) -> None:
    deleted: list[str] = []
    try:
        delete_exchanges(connection, exchanges, deleted)
        channel = connection.channel()
        for name in queues:
            channel.queue_delete(name)
            deleted.append(name)
        channel.close()
    except (UnreachableError, *BROKER_ERRORS) as exc:
        if not deleted:
            raise
        raise UnreachableError(
            f"{str(exc) or type(exc).__name__}; the ladder {topology.prefix} is half removed: run "
            f"the same 'teardown' again"
        ) from exc
