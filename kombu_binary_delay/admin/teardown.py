"""Remove a ladder, and the delivery side with it if no other ladder leads there."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Any

from kombu_binary_delay.amendments.parts import IDS, KEYS, exchange_name, stream_name
from kombu_binary_delay.model.parts import Binding, Exchange, Part
from kombu_binary_delay.model.recognise import topology_of_name
from kombu_binary_delay.model.topology import Topology

from .declare import declare, delete_exchanges
from .errors import OperationError, RefusedError
from .management import Management
from .probe import ready
from .progress import Notify, ignore
from .snapshot import Snapshot, arguments, is_up, unseen
from .status import ladder_of

#: Seconds after which a figure of the management API is from after now: two ticks of a quorum
#: queue. Only there are messages counted that are in the hands of a dead-letter worker.
STATS_DELAY = 11.0


@dataclass(frozen=True)
class Teardown:
    """Names of what was removed, or would be; ``lost`` messages went with it.

    ``keeps`` names the ladders for which the delivery side stays.
    """

    exchanges: tuple[str, ...]
    queues: tuple[str, ...]
    lost: int
    keeps: tuple[str, ...]


def teardown(  # noqa: PLR0913 - the last three are for callers of different patience
    connection: Any,
    management: Management,
    topology: Topology,
    *,
    in_use: Iterable[Topology] = (),
    force: bool = False,
    dry_run: bool = False,
    stats_delay: float = STATS_DELAY,
    notify: Notify = ignore,
) -> Teardown:
    """Remove a ladder while nothing waits in it, or, with ``force``, with what waits in it.

    The delivery side goes with it, unless other ladders lead there; and with the last ladder of the
    namespace what was amended, which then counts no more, for what is in your queues neither. Where
    nothing of the ladder exists, nothing is removed.

    First the exchanges go, so that nothing more can come in; what is then found to have come in
    before lets all be put back as it was. Publishers should have stopped: one that is still at work
    notices, and makes the ladder anew.

    :param in_use: ladders that are in use, also if no message has needed any of their levels yet.
    :param stats_delay: the seconds to wait for figures that include messages between two levels.
    :param notify: called with a text that says what is being waited for.
    :raises RefusedError: where messages wait, or a queue has no leader that could say so.
    """
    snapshot = Snapshot.read(management)
    mine = [name for name in snapshot.exchanges if ladder_of(topology, name) == topology.prefix]
    queues = [name for name in snapshot.queues if ladder_of(topology, name) == topology.prefix]
    others = _others(topology, snapshot, in_use)
    if not mine and not queues:
        # What exists of the delivery side was made for another ladder, or for one to come.
        return Teardown((), (), 0, others)
    if not others:
        side = f"{topology.delivery_prefix}."
        amendments = _amendments(topology)
        last = topology.mirrors and not _others(topology, snapshot, in_use, all_sides=True)

        def goes(name: str) -> bool:
            if name in amendments:
                return last
            return name == topology.delivery or name.startswith(side)

        mine += [name for name in snapshot.exchanges if goes(name)]
        # Ahead of the ladder's own: as long as one of those exists, this can be done again.
        queues = [
            *(name for name in snapshot.queues if goes(name) and name not in queues),
            *queues,
        ]
    mine = list(dict.fromkeys(sorted(mine, key=lambda name: _order(topology, name))))
    counted = [name for name in queues if name not in _amendments(topology)]
    waiting = held(connection, management, counted, guess=force)
    lost = sum(waiting.values())
    if lost and not force:
        raise RefusedError(
            f"{_listed(waiting)}; wait until they have left, or migrate or redrive them"
        )
    if not dry_run:
        if not force:
            _close(connection, management, topology, snapshot, mine, counted, stats_delay, notify)
        _remove(connection, mine, queues)
    return Teardown(tuple(mine), tuple(sorted(queues)), lost, others)


def held(
    connection: Any,
    management: Management,
    queues: Iterable[str],
    *,
    stats_current: bool = False,
    guess: bool = False,
) -> dict[str, int]:
    """Count the messages in queues that have any, those between two levels included.

    :param stats_current: whether the API's own figures are recent enough to be read for each queue.
    :param guess: whether to take a queue without a leader for empty.
    :raises RefusedError: else, where there is one.
    """
    queues = list(queues)
    counted = ready(connection, queues)
    rows = {row["name"]: row for row in management.here("queues")}
    unknown = [
        name
        for name in queues
        if name in rows
        and (not is_up(rows[name]) or (stats_current and rows[name].get("messages") is None))
    ]
    if unknown and not guess:
        raise RefusedError(
            f"nothing says what {', '.join(unknown[:3])}{_more(unknown)} hold; try again when all "
            f"nodes are up and the management API gives figures of each queue"
        )
    sums = {}
    for name, count in counted.items():
        row = rows.get(name, {})
        reported = int(row.get("messages") or 0) if stats_current else 0
        sums[name] = max(count + unseen(row), reported)
    return {name: count for name, count in sums.items() if count}


def _amendments(topology: Topology) -> set[str]:
    """Name what all ladders of a namespace share, whatever their delivery side."""
    namespace = topology.namespace
    return {exchange_name(namespace), *(stream_name(namespace, key) for key in (IDS, KEYS))}


def _others(
    topology: Topology,
    snapshot: Snapshot,
    in_use: Iterable[Topology],
    *,
    all_sides: bool = False,
) -> tuple[str, ...]:
    """Name the other ladders that lead to the same delivery side, or of the same namespace."""
    existing = filter(None, map(topology_of_name, snapshot.exchanges))
    return tuple(
        dict.fromkeys(
            other.prefix
            for other in (*in_use, *existing)
            if other.prefix != topology.prefix
            and (
                other.namespace == topology.namespace
                if all_sides
                else other.delivery == topology.delivery
            )
        )
    )


def _order(topology: Topology, name: str) -> tuple[int, str]:
    """Order the highest level first: a publisher takes its presence for that of all below it."""
    levels = [topology.level_name(level) for level in range(topology.ladder.levels)]
    if name in levels:
        return len(levels) - levels.index(name), name
    return (0 if ladder_of(topology, name) else len(levels) + 1), name


def _listed(waiting: dict[str, int]) -> str:
    first = ", ".join(f"{count} in {name}" for name, count in list(waiting.items())[:3])
    return f"{sum(waiting.values())} messages wait ({first}{_more(waiting)})"


def _more(names: Sized) -> str:
    return ", …" if len(names) > 3 else ""


def _close(  # noqa: PLR0913, PLR0917 - one step of one function, which has all of it
    connection: Any,
    management: Management,
    topology: Topology,
    snapshot: Snapshot,
    exchanges: list[str],
    queues: list[str],
    stats_delay: float,
    notify: Notify,
) -> None:
    try:
        delete_exchanges(connection, exchanges)
        notify(f"closed the way in; waiting {stats_delay:g} s for the broker's figures")
        time.sleep(stats_delay)
        # Where a publisher made it anew meanwhile, what it sent is counted, and no more comes.
        delete_exchanges(connection, exchanges)
        waiting = held(connection, management, queues, stats_current=stats_delay >= STATS_DELAY)
        if waiting:
            raise RefusedError(  # noqa: TRY301 - put back as for any other reason
                f"{_listed(waiting)}: they came in meanwhile; stop the programs that delay on it, "
                f"and let it run empty"
            )
    except BaseException as exc:
        # Whoever interrupts is not to leave it half removed. The connection may be what broke.
        with connection.clone() as again:
            declare(again, topology, _part(snapshot, exchanges))
        if isinstance(exc, OperationError):
            raise RefusedError(f"{exc}; the ladder was put back as it was") from exc
        raise


def _part(snapshot: Snapshot, exchanges: list[str]) -> Part:
    """Read exchanges, and all bindings from and to them, out of what was there."""
    bindings: list[Binding] = [
        each
        for each in sorted(snapshot.bindings, key=repr)
        if each.source in exchanges or (not each.to_queue and each.destination in exchanges)
    ]
    rows = [snapshot.exchanges[name] for name in exchanges]
    return Part(
        tuple(Exchange(row["name"], row["type"], tuple(arguments(row).items())) for row in rows),
        (),
        tuple(bindings),
    )


def _remove(connection: Any, exchanges: list[str], queues: list[str]) -> None:
    delete_exchanges(connection, exchanges)
    channel = connection.channel()
    for name in queues:
        channel.queue_delete(name)
    channel.close()
