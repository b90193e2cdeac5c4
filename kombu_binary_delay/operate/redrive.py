"""Send parked messages on: to their destination, or to another one."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from amqp.exceptions import AccessRefused

from kombu_binary_delay.amendments.parts import takes_records
from kombu_binary_delay.errors import DelayError, TopologyError
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.envelope import HEADERS, carried, due_in, unwrap
from kombu_binary_delay.ladder.recognise import parking_of
from kombu_binary_delay.ladder.returns import RETURNS
from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.wire.received import copy_of

from .errors import OperationError, UnreachableError
from .management import Management
from .migrate import Preview
from .mover import (
    Decision,
    Keep,
    Mover,
    Send,
    as_new,
    key_of,
    max_deliveries,
    why_undecodable,
)
from .probe import Probe
from .progress import Progress, ignore
from .reading import UNREADABLE, read_address
from .snapshot import queues_now, unknown, why_left

_NO_ADDRESS = "without an address: nothing says where it was to go; send it with --to"
_NOT_DUE = "not due yet: parked when a part of the ladder was missing; redrive it when it is due"
_RECORD = (
    "for the streams of amendments: nothing shows any more who wrote it; if it was a cancellation "
    "that was parked on its way, cancel again, and take it out with --to"
)


@dataclass(frozen=True)
class Parked:
    """The messages for one destination: how many were sent on, and how many are still parked."""

    destination: Destination
    sent: int
    stays: int


@dataclass(frozen=True)
class Redrive:
    """The messages by destination, the most first; an empty destination is for no address.

    ``reasons`` says why messages stay, also if it is not known how many.
    """

    parked: tuple[Parked, ...]
    reasons: tuple[str, ...]

    @property
    def sent(self) -> int:
        """The number of messages that were sent on."""
        return sum(parked.sent for parked in self.parked)

    @property
    def stays(self) -> int:
        """The number of messages that are still parked."""
        return sum(parked.stays for parked in self.parked)

    @property
    def unreadable(self) -> int:
        """The number of parked messages without an address."""
        return sum(parked.stays for parked in self.parked if parked.destination == UNREADABLE)


def redrive(  # noqa: PLR0913 - which, and where to
    connect: Callable[[], Any],
    topology: Topology,
    management: Management | None = None,
    *,
    only: Destination | Collection[Destination] | None = None,
    to: Destination | None = None,
    progress: Progress = ignore,
) -> Redrive:
    """Send parked messages on; each leaves the parking queue after the broker's confirm.

    Messages stay parked if their queue does not exist or they are not due yet. Messages without an
    address, and those that cannot be decoded, also stay, unless ``to`` is given.

    :param connect: connects to the broker with Kombu's own transport.
    :param management: to read the parking queue's delivery limit, and whether it has a leader.
        Without an answer, a message that stays parked is published again every second time that it
        is read, and a queue without a leader counts as empty.
    :param only: take only messages for this destination, or these; an empty one is for no address.
    :param to: send them here instead of to their own destination.
    :raises OperationError: if there is no parking queue, or ``to`` is a part of a ladder.
    """
    if isinstance(only, Destination):
        only = {only}
    with (
        # A connection that publishes may be blocked, and would not answer.
        connect() as taking,
        connect() as aside,
        connect() as sending,
        Probe(taking) as probe,
    ):
        count = _parked(probe, topology, to)
        sorter = _Sorter(topology, probe, only, to)
        mover = Mover(taking, aside, sending)
        if count:
            mover.run(
                topology.parking,
                sorter.decide,
                requeue=sorter.requeue,
                max_deliveries=_max_deliveries(topology.parking, management),
                limit=count,
                progress=progress,
            )
        mover.close()
    done = sorter.result(mover.counts, mover.reasons)
    # At the end, since its leader may have gone away meanwhile.
    if count is None or _is_unknown(topology.parking, management):
        return replace(done, reasons=(why_left([topology.parking]), *done.reasons))
    return done


def parked(
    connection: Any,
    topology: Topology,
    management: Management | None = None,
    *,
    to: Destination | None = None,
) -> Preview:
    """Count what :func:`redrive` would read; where it is to go is not known.

    Nothing is taken: a quorum queue counts that, and an interrupt could double a message.

    :raises OperationError: as :func:`redrive`.
    """
    with Probe(connection) as probe:
        count = _parked(probe, topology, to)
    is_known = count is not None and not _is_unknown(topology.parking, management)
    reasons = () if is_known else (why_left([topology.parking]),)
    return Preview(((topology.parking, count or 0),), reasons)


def _parked(probe: Probe, topology: Topology, to: Destination | None) -> int | None:
    """Count what is parked; None if that is not known.

    :raises OperationError: if there is no parking queue, or ``to`` is a part of a ladder.
    """
    count = probe.ready(topology.parking)
    if count is None and not probe.has_queue(topology.parking):
        raise OperationError(
            f"there is no parking queue {topology.parking!r} in this virtual host; check "
            f"the virtual host and the namespace"
        )
    if to is not None:
        _refuse_a_ladder(to, probe)
    return count


def _is_unknown(parking: str, management: Management | None) -> bool:
    try:
        return management is not None and bool(unknown([parking], queues_now(management)))
    except UnreachableError:
        return False


def _max_deliveries(parking: str, management: Management | None) -> int:
    """Return how often a parked message may come back before it must be parked again."""
    if management is None:
        return 1
    try:
        row = management.get("queues", management.vhost, parking)
    except UnreachableError:
        # Assume the lowest possible limit.
        return 1
    return max_deliveries(parking, row)


def _refuse_a_ladder(to: Destination, probe: Probe) -> None:
    """Raise an error for a part of a ladder: messages would be parked silently, or amend."""
    name = to.exchange or to.routing_key
    parking = parking_of(name)
    if takes_records(to) or (parking is not None and probe.has_queue(parking)):
        raise OperationError(
            f"{name!r} is a part of a ladder; name a queue, or an exchange, of your own"
        )


def _most(reasons: Counter[str]) -> tuple[str, ...]:
    """Return the reasons why most messages stay, each with their number."""
    return tuple(
        f"{count:,} {'stays' if count == 1 else 'stay'}: {reason}"
        for reason, count in reasons.most_common(5)
    )


def _obstacle(probe: Probe, place: Destination) -> str:
    """Return why nothing can be published to a destination; empty if it can."""
    if place == UNREADABLE:
        return _NO_ADDRESS
    if takes_records(place):
        return _RECORD
    try:
        return _missing(probe, place)
    except TopologyError as exc:
        return f"{exc}; send them elsewhere with --to"
    except AccessRefused as exc:
        # RabbitMQ 4.3 asks for any permission on the name. Without a queue, it returns the message;
        # without write on an exchange, it would close the channel.
        return place.exchange and (
            f"this user may not ask whether the exchange {place.exchange!r} exists: "
            f"{exc.reply_text}; grant it the permission write on that name, or send them elsewhere "
            f"with --to"
        )


def _missing(probe: Probe, place: Destination) -> str:
    """Return what keeps a message for a destination from it; empty if nothing does.

    :raises TopologyError: if the broker cannot answer.
    :raises AccessRefused: if this user may not ask.
    """
    parking = parking_of(place.exchange)
    if parking is not None and probe.has_queue(parking):
        # It parks messages that it cannot route, and the broker confirms that as well.
        return (
            f"its destination {place.exchange!r} is a part of another ladder, which does not know "
            f"{place.routing_key!r}: say where it is to go with --to"
        )
    if place.exchange:
        kind, name, exists_there = "exchange", place.exchange, probe.has_exchange
    else:
        kind, name, exists_there = "queue", place.routing_key, probe.has_queue
        if not probe.can_ask(name):
            # Without the queue, the broker returns the message.
            return ""
    if exists_there(name):
        return ""
    return f"the {kind} {name!r} does not exist; declare it, or send them elsewhere with --to"


class _Sorter:
    """Reads parked messages, decides where each goes, and counts."""

    def __init__(
        self,
        topology: Topology,
        probe: Probe,
        only: Collection[Destination] | None,
        to: Destination | None,
    ) -> None:
        self._topology = topology
        self._obstacle = cache(partial(_obstacle, probe))
        self._only, self._to = only, to
        self._seen: Counter[Destination] = Counter()

    def decide(self, message: Any) -> Decision:
        destination, unpacked = self._read(message)
        self._seen[destination] += 1
        if self._only is not None and destination not in self._only:
            return Keep("kept")
        if self._is_early(message):
            return Keep("left", _NOT_DUE)
        why = why_undecodable(message, self._topology.parking)
        if why and self._to is None:
            return Keep("left", f"{why}; send it on as it is with --only '' --to QUEUE")
        name = json.dumps([destination.exchange, destination.routing_key])
        place = self._to or destination
        why = self._obstacle(place)
        if why:
            return Keep("left", why)
        return Send(unpacked, place.exchange, place.routing_key, name, mandatory=True)

    def requeue(self, message: Any, count: str) -> Send:
        """Return how to park a message again, with its routing key."""
        parking = self._topology.parking
        return Send(as_new(message), parking, key_of(message), count, mandatory=True)

    def _read(self, message: Any) -> tuple[Destination, Any]:
        """Return the destination of a message, and the message as it was published."""
        if why_undecodable(message, ""):
            return UNREADABLE, as_new(message)
        properties = dict(message.properties)
        headers = properties[HEADERS] = dict(properties.get(HEADERS) or {})
        key = message.delivery_info["routing_key"]
        destination = read_address(self._topology, key, carried(headers))
        if destination == UNREADABLE:
            return destination, as_new(message)
        unwrap(properties, self._topology.owns, is_read=False)
        headers.pop(RETURNS, None)
        return destination, copy_of(message, properties)

    def _is_early(self, message: Any) -> bool:
        """Return whether a message is not due yet."""
        try:
            due = due_in(message.properties.get(HEADERS) or {})
        except DelayError:
            # Another program has written it.
            return False
        return due is not None and due > time.time_ns() // 1_000_000

    def result(self, counts: Mapping[str, int], reasons: Counter[str]) -> Redrive:
        sent = Counter(
            {Destination(*json.loads(name)): counts[name] for name in counts if name[:1] == "["}
        )
        parked = (
            Parked(destination, sent[destination], count - sent[destination])
            for destination, count in self._seen.most_common()
        )
        return Redrive(tuple(parked), _most(reasons))
