"""Count delayed messages, level by level, on every ladder of a namespace; also parked and stuck."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from amqp.exceptions import AccessRefused, RecoverableConnectionError

from kombu_binary_delay.amendments.parts import IDS, stream_name
from kombu_binary_delay.ladder.parts import Binding
from kombu_binary_delay.ladder.recognise import topology_of_name
from kombu_binary_delay.ladder.topology import QUEUE_TYPES, Topology
from kombu_binary_delay.settings import Settings

from .arrivals import Arrivals, LastHour
from .management import Management
from .probe import Probe, ready
from .reading import Source, sources
from .snapshot import NOT_UP, Row, Snapshot, arguments, is_held_up, is_up, leaving
from .text import plural
from .trouble import Expected, alarms, missing


@dataclass(frozen=True)
class Waiting:
    """One queue in which messages wait.

    ``level`` is the level that it belongs to; None for a queue that serves one delay only.
    ``wait`` is how long messages wait in it, and ``latest`` the time after which all its present
    messages have left the ladder, both in milliseconds. ``leaving`` is how many of its messages are
    due and about to leave it.
    """

    queue: str
    wait: int
    latest: int
    messages: int
    leaving: int
    trouble: str | None = None
    level: int | None = None


@dataclass(frozen=True)
class LadderStatus:
    """One ladder: its queues by their waits, and its messages per second in the last minute.

    The rates are None if they are not known.
    """

    name: str
    current: bool
    queues: tuple[Waiting, ...]
    rate_in: float | None
    rate_out: float | None

    @property
    def messages(self) -> int:
        """How many messages wait."""
        return sum(queue.messages for queue in self.queues)

    def within(self, milliseconds: int) -> tuple[int, int]:
        """Return how many of them leave within a time: at least, and probably.

        A level bounds how long its messages stay. The probable figure assumes that the remaining
        times are spread evenly below that.
        """
        surely = sum(queue.messages for queue in self.queues if queue.latest <= milliseconds)
        probably = sum(
            queue.messages * min(1.0, milliseconds / queue.latest if queue.latest else 1.0)
            for queue in self.queues
        )
        return surely, round(probably)


@dataclass(frozen=True)
class AmendmentsStatus:
    """The amendments recorded for delayed messages.

    :param active: how many ids and keys have active amendments; None if they could not be read.
    """

    active: int | None


@dataclass(frozen=True)
class Figure:
    """A figure of a whole virtual host, as the terminal and the pages show it.

    :param count: None if it could not be read.
    :param is_bad: whether it needs somebody's attention.
    """

    name: str
    count: int | None
    is_bad: bool = False


@dataclass(frozen=True)
class Status:
    """What a virtual host has now; ``at`` is in seconds since the epoch.

    ``amendments`` is None if there have been none yet, or they were not read. ``in_relays`` has the
    relays that hold messages, and how many; ``relays`` is None if that could not be read.
    ``arrivals`` is None if there is no journal, or it was not read.
    """

    at: float
    broker: str
    vhost: str
    ladders: tuple[LadderStatus, ...]
    parked: int
    relays: int | None
    troubles: tuple[str, ...]
    amendments: AmendmentsStatus | None = None
    in_relays: tuple[tuple[str, int], ...] = ()
    arrivals: Arrivals | None = None

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The figures of the whole virtual host: a further one is added here, and shown by all."""
        figures = [
            Figure("parked", self.parked, bool(self.parked)),
            Figure("in relays", self.relays),
        ]
        if self.amendments is not None:
            figures.append(Figure("amendments", self.amendments.active))
        return tuple(figures)


def status(  # noqa: PLR0913, PLR0917 - of what to read, the last two are optional
    connection: Any,
    management: Management,
    topology: Topology,
    expected: Expected | None = None,
    amending: Any = None,
    last_hour: LastHour | None = None,
) -> Status:
    """Return the status of every ladder in the namespace of ``topology``.

    :param connection: a :class:`kombu.Connection`, which counts ready messages exactly; the other
        values, such as rates, come from the management API and are up to ten seconds old.
    :param expected: the ladders in use, whose missing parts are reported; by default, ``topology``
        is in use, and missing parts are not reported.
    :param amending: a connection by our transport, which reads the amendments; if you reuse it, it
        reads them once. None does not read amendments.
    :param last_hour: reads the journal, if there is one; reused, it reads on. None does not.
    :raises UnreachableError: if the API does not answer.
    """
    snapshot = Snapshot.read(management, rates=True)
    overview = management.get("overview")
    mine = [name for name in snapshot.queues if topology.owns(name)]
    counted = ready(connection, mine)
    groups: dict[str, list[str]] = defaultdict(list)
    troubles: list[str] = []
    relays: dict[str, int] = {}
    parked: dict[str, int] = {}
    for name in mine:
        ladder = ladder_of(topology, name)
        kind = _kind(topology, name)
        if kind and not is_up(snapshot.queues[name]):
            troubles.append(f"{name}: {NOT_UP}")
        if ladder is not None:
            groups[ladder].append(name)
        elif kind == "parking":
            parked[name] = counted.get(name, 0)
        elif kind == "poison" and counted.get(name):
            unreadable = plural(counted[name], "message")
            troubles.append(f"{name}: {unreadable} in it could not be read")
        elif kind == "relay":
            relays[name] = counted.get(name, 0) + leaving(snapshot.queues[name])
            if is_held_up(snapshot.queues[name]):
                troubles.append(
                    f"{name}: {plural(leaving(snapshot.queues[name]), 'message')} due, and refused "
                    f"by what it leads to, which is full or does not confirm; no others are held up"
                )
    longest = _Longest(topology, snapshot, _sources(topology, snapshot, groups.values()))
    in_use = {ladder.prefix for ladder in (topology, *(expected.lanes if expected else ()))}
    ladders = [
        _ladder_status(name, queues, snapshot, counted, longest, current=name in in_use)
        for name, queues in groups.items()
    ]
    troubles += [
        f"{queue.queue}: {queue.trouble}"
        for ladder in ladders
        for queue in ladder.queues
        if queue.trouble
    ]
    troubles += [
        f"{plural(count, 'message')} parked, whose destination was gone when due; see and send on "
        f"with '{_redrive(topology, name)}'"
        for name, count in parked.items()
        if count
    ]
    if overview.get("disable_stats"):
        troubles.append(
            "this broker gives no statistics (management_agent.disable_metrics_collector is true): "
            "levels that are stuck, relays that are full and alarms are not seen"
        )
    if expected is not None:
        troubles[:0] = [*alarms(management), *missing(expected, management, snapshot)]
    return Status(
        time.time(),
        str(overview.get("rabbitmq_version", "")),
        management.vhost,
        tuple(sorted(ladders, key=lambda ladder: (not ladder.current, ladder.name))),
        sum(parked.values()),
        sum(relays.values()),
        tuple(troubles),
        _amendments(amending, snapshot),
        tuple((name, count) for name, count in sorted(relays.items()) if count),
        last_hour.read(connection.connection)
        if last_hour is not None and last_hour.stream in snapshot.queues
        else None,
    )


def _amendments(amending: Any, snapshot: Snapshot) -> AmendmentsStatus | None:
    if amending is None:
        return None
    # ``topology`` may be another system's ladder, with a namespace of its own.
    namespace = Settings.from_transport_options(amending.transport_options).namespace
    if stream_name(namespace, IDS) not in snapshot.queues:
        return None
    reader = amending.connection.delay_mechanism.amendments.reader
    try:
        reader.refresh()
    except RecoverableConnectionError:
        # It does not answer; the status is still shown.
        return AmendmentsStatus(None)
    return AmendmentsStatus(len(reader.memory) if reader.is_reading else None)


def ladder_of(topology: Topology, name: str) -> str | None:
    """Return the ladder of a level's exchange or queue; None for the delivery side."""
    named = topology_of_name(name)
    if named is not None:
        return named.prefix
    names = {exchange.name for part in topology.levels for exchange in part.exchanges}
    names |= {queue.name for part in topology.levels for queue in part.queues}
    return topology.prefix if name in names else None


def _kind(topology: Topology, name: str) -> str:
    """Return the kind of a queue on the delivery side: parking, poison or relay; else ""."""
    for side in _sides(topology):
        if name in (side.parking, f"{side.delivery_prefix}.poison"):
            return name.rpartition(".")[2]
        relays = (side.exchange_relay_name(""), side.queue_relay_name(""))
        if name.startswith(relays) and name not in relays:
            return "relay"
    return ""


def _sides(topology: Topology) -> Iterator[Topology]:
    """Yield a ladder for each delivery side of a namespace."""
    for queue_type in QUEUE_TYPES:
        yield replace(topology, queue_type=queue_type)


def parked_by_side(connection: Any, topology: Topology) -> dict[Topology, int]:
    """Return the count of each parking queue of a namespace, by a ladder that parks there.

    The count of a queue that has no leader, or whose node is down, is 0.

    :param connection: a :class:`kombu.Connection`.
    """
    counts = {}
    with Probe(connection) as probe:
        for side in _sides(topology):
            # RabbitMQ 4.3 refuses to say that a queue does not exist, without a permission for it.
            with suppress(AccessRefused):
                # Another system's ladder has none.
                if side.parking and probe.has_queue(side.parking):
                    counts[side] = probe.ready(side.parking) or 0
    return counts


def _redrive(topology: Topology, parking: str) -> str:
    """Return the command for a parking queue, whatever ladder the settings name."""
    ladder = next(side for side in _sides(topology) if side.parking == parking)
    return f"redrive --ladder {ladder.prefix}"


def _ladder_status(  # noqa: PLR0913 - the last ones are what all ladders share
    name: str,
    queues: Iterable[str],
    snapshot: Snapshot,
    counted: Mapping[str, int],
    longest: _Longest,
    *,
    current: bool,
) -> LadderStatus:
    waiting = []
    growth = rate_in = 0.0
    for queue in queues:
        row = snapshot.queues[queue]
        held = leaving(row)
        source = longest.sources.get(queue)
        wait, level = (source.wait, source.level) if source else (0, None)
        if source and source.topology and queue.startswith(f"{source.topology.direct}."):
            level = None
        messages = counted.get(queue, 0) + held
        waiting.append(
            Waiting(queue, wait, longest.queue(queue), messages, held, _trouble(row, held), level)
        )
        growth += _rate(row, "messages_details")
        # This counts only messages from publishers, not those from the level above.
        rate_in += _rate(row.get("message_stats") or {}, "publish_details")
    waiting.sort(key=lambda waiting: (waiting.wait, waiting.queue))
    return LadderStatus(name, current, tuple(waiting), rate_in, max(rate_in - growth, 0.0))


def _rate(row: Row, name: str) -> float:
    details = row.get(name) or {}
    return float(details.get("avg_rate", details.get("rate")) or 0.0)


def _trouble(row: Row, held: int) -> str | None:
    if not is_up(row):
        return NOT_UP
    members, online = row.get("members") or (), row.get("online") or ()
    if members and len(online) * 2 <= len(members):
        return (
            f"{len(online)} of its {len(members)} members are online, no majority: "
            f"what waits in it waits on"
        )
    if row.get("consumers"):
        by = plural(row["consumers"], "consumer")
        return f"messages are taken from it before they are due, by {by}"
    if is_held_up(row):
        return (
            f"{plural(held, 'message')} due and not taken: what it leads to is gone, full, or does "
            f"not confirm, and holds up all behind"
        )
    return None


def _sources(
    topology: Topology, snapshot: Snapshot, ladders: Iterable[Sequence[str]]
) -> dict[str, Source]:
    """Return the source of each queue of some ladders."""
    return {
        source.name: source
        for queues in ladders
        for source in sources(topology_of_name(queues[0]) or topology, snapshot.queues)
    }


class _Longest:
    """The longest way from an exchange to the end of its ladder, in milliseconds.

    It ends where it leaves the ladder: a user's queue, whatever its wait, is a destination.
    """

    def __init__(
        self, topology: Topology, snapshot: Snapshot, sources: Mapping[str, Source]
    ) -> None:
        self._owns = topology.owns
        self._live = snapshot
        self.sources = sources
        self._found: dict[str, int] = {}
        self._from: dict[str, list[Binding]] = defaultdict(list)
        for binding in snapshot.bindings:
            self._from[binding.source].append(binding)

    def queue(self, name: str) -> int:
        if name not in self.sources:
            return 0
        below = arguments(self._live.queues[name]).get("x-dead-letter-exchange")
        return self.sources[name].wait + self.exchange(str(below or ""))

    def exchange(self, name: str) -> int:
        if name not in self._found:
            self._found[name] = 0  # also if a user has bound a circle
            self._found[name] = max(
                (
                    self.queue(binding.destination)
                    if binding.to_queue
                    else self.exchange(binding.destination)
                    for binding in self._from[name]
                    if self._owns(binding.destination)
                ),
                default=0,
            )
        return self._found[name]
