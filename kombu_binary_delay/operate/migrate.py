"""Move waiting messages from a ladder or a queue to a ladder, on this or another broker."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from amqp.exceptions import AccessRefused

from kombu_binary_delay.amendments.parts import exchange_name, way_of_records
from kombu_binary_delay.amendments.record import Cancel, from_line
from kombu_binary_delay.errors import AddressError, AmendmentError, DelayError, TopologyError
from kombu_binary_delay.ladder.address import Destination, route
from kombu_binary_delay.ladder.delay import X_DELAY, keep_due
from kombu_binary_delay.ladder.envelope import HEADERS, further_keys
from kombu_binary_delay.ladder.foreign import ladder_of_name
from kombu_binary_delay.ladder.parts import Binding, Part, Queue
from kombu_binary_delay.ladder.recognise import parking_of
from kombu_binary_delay.ladder.returns import RETURNS
from kombu_binary_delay.ladder.simulate import matches_topic
from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.publishing.way_out import onto
from kombu_binary_delay.wire.executor import unbind
from kombu_binary_delay.wire.mechanism import mechanism_of, without_transport
from kombu_binary_delay.wire.received import copy_of
from kombu_binary_delay.wire.undecodable import undecodable

from .create import create
from .delivery import known
from .errors import OperationError, UnreachableError
from .management import Management
from .mover import Done, Keep, Mover, Send, as_new, key_of, max_deliveries, why_undecodable
from .probe import Probe, cluster_name, ready
from .progress import Progress, ignore
from .raw import raw_copy
from .reading import (
    UNREADABLE_ERRORS,
    Reading,
    Source,
    put_back,
    read,
    sources,
)
from .snapshot import Row, Snapshot, queues_now, unknown, why_left

_RETURNS = 2.0  # seconds
_NOT_SHOWN = (
    "a cancellation has left its first level, and nothing shows any more who wrote it: it arrives "
    "by its own ladder when it is due; cancel again what you move to another broker or namespace"
)
#: The header with the origin of a message in the poison queue, the error, and what was removed.
POISON_HEADER = "x-binary-delay-poison"


@dataclass(frozen=True)
class Preview:
    """The queues to move messages from, in order, with the number of messages in each.

    ``reasons`` names those whose number of messages is not known.
    """

    queues: tuple[tuple[str, int], ...]
    reasons: tuple[str, ...] = ()

    @property
    def messages(self) -> int:
        """The number of messages."""
        return sum(count for _, count in self.queues)


@dataclass(frozen=True)
class Migration:
    """The numbers of messages that were moved, kept on purpose, and left because of ``reasons``.

    ``poison`` messages could not be read, and are in the queue ``poison_queue``. ``reasons`` also
    names the queues whose number of messages is not known: it is not in ``left``.
    """

    moved: int
    kept: int
    left: int
    poison: int
    poison_queue: str
    reasons: tuple[str, ...]
    seconds: float


def plan(
    connection: Any, snapshot: Snapshot, source: Topology | Sequence[Topology] | str
) -> Preview:
    """Return what would be moved from ladders or from an ordinary queue, without a change.

    Of an ordinary queue, all messages are counted, and only tasks with a future ``eta`` are moved.
    """
    names = [queue.name for queue in _sources(source, snapshot)]
    counts = ready(connection, names)
    queues = tuple((name, counts.get(name, 0)) for name in names)
    return Preview(queues, _left(names, snapshot.queues))


def _left(names: Sequence[str], rows: Mapping[str, Row]) -> tuple[str, ...]:
    left = unknown(names, rows)
    return (why_left(left),) if left else ()


def _left_at_the_end(names: Sequence[str], management: Management) -> tuple[str, ...]:
    """Return why something is left: a leader may have gone away during a move."""
    try:
        return _left(names, queues_now(management))
    except UnreachableError as exc:
        return (f"it is not known whether all queues have a leader, so run it again: {exc}",)


def migrate(  # noqa: PLR0913 - where from, where to, and how
    source: Any,
    target: Any,
    management: Management,
    what: Topology | Sequence[Topology] | str,
    to: Topology | Sequence[Topology],
    *,
    there: Management | None = None,
    exchange: str | None = None,
    namespace: str = Topology.namespace,
    progress: Progress = ignore,
) -> Migration:
    """Move messages from ladders, or the tasks with a future ``eta`` in a queue, to a ladder.

    The remaining delay is computed from the absolute due time in the message; otherwise from the
    headers of NServiceBus; otherwise it is the whole wait of its level and of those below. Messages
    that are already due wait one tick. Publishers may run at the same time.

    :param source: a function that connects, with Kombu's own transport, to the broker to take from.
    :param target: a function that connects to the broker to send to, with our transport or, if
        ``to`` is a foreign ladder, with Kombu's own.
    :param management: of the broker to take from.
    :param what: a ladder, all the lanes of one, or the name of an ordinary queue.
    :param to: a ladder, or all the lanes among which the connections of ``target`` choose.
    :param there: the management API of the broker to send to, if that is another one and ``to`` is
        a foreign ladder, whose bindings define what it leads to.
    :param exchange: the exchange of messages of Celery's native ladder, if its bindings do not
        determine it.
    :param namespace: of the poison queue, if neither ladder is one of ours.
    :raises OperationError: if the bindings do not determine it, and ``exchange`` is not given: the
        messages moved until then stay moved, the others stay where they are. Also if the queue does
        not exist, source and target are the same ladder, or ``target`` connects by another
        transport than ours to one of ours; then nothing is moved.
    :raises UnreachableError: if a broker goes away: as above, and you can run it again.
    """
    begun = time.monotonic()
    snapshot = Snapshot.read(management)
    queues = _sources(what, snapshot)
    limits = {
        queue.name: max_deliveries(queue.name, snapshot.queues[queue.name]) for queue in queues
    }
    filled, emptied = _ladders(to), _ladders(what)
    to = filled[0]
    # Queues of two types cannot have one name.
    ours = next((ladder.namespace for ladder in (to, *emptied) if ladder.is_ours), namespace)
    side = Topology(namespace=ours, queue_type=to.queue_type)
    poison = f"{side.delivery_prefix}.poison"
    with (
        # A connection that publishes may be blocked, and would not answer: others declare and ask.
        source() as taking,
        source() as aside,
        target() as sending,
        target() as asking,
        Probe(taking) as probe,
        Probe(asking) as probe_there,
    ):
        mechanism = mechanism_of(sending.connection)
        if to.is_ours and mechanism is None:
            # It would publish what is moved without its delay.
            raise OperationError(without_transport(sending))
        refuse_a_circle(taking, sending, what, filled)
        if not to.is_ours:
            create(sending, to, to.whole)
        elif mechanism is not None and _place(taking) == _place(sending):
            # What is known to refuse nothing gets no relay, which would stay.
            for queue, refuses, temporary in known(to, snapshot):
                mechanism.router.knows_queue(queue, refuses=refuses, temporary=temporary)
        mover = Mover(taking, aside, sending)
        bindings = snapshot.bindings
        if there is not None and not to.is_ours:
            bindings = Snapshot.read(there).bindings
        sorter = _Sorter(
            emptied, to, snapshot, bindings, poison, taking, asking, probe_there, exchange
        )
        moved = -1
        left: dict[str, int] = {}
        while moved:
            # Repeat for messages between two levels, until a round finds none.
            moved = 0
            sorter.begin_round()
            again = {name for name, count in left.items() if count}
            mover.start_over()
            for source_queue in queues:
                count = (_returned if source_queue.name in again else Probe.ready)(
                    probe, source_queue.name
                )
                before = mover.counts["left"]
                if count:
                    limit = count if source_queue.topology is None else None
                    moved += mover.run(
                        source_queue.name,
                        partial(sorter.decide, source_queue),
                        requeue=partial(_requeue, source_queue),
                        max_deliveries=limits[source_queue.name],
                        limit=limit,
                        expected=count,
                        progress=progress,
                    )
                left[source_queue.name] = mover.counts["left"] - before
            if isinstance(what, str):
                break
        mover.close()
    counts, reasons = mover.counts, mover.reasons + sorter.undecodable
    unreached = _left_at_the_end([queue.name for queue in queues], management)
    return Migration(
        counts["moved"],
        counts["kept"],
        counts["left"],
        counts["poison"],
        poison,
        (*unreached, *(reason for reason, _ in reasons.most_common(5))),
        time.monotonic() - begun,
    )


def _returned(probe: Probe, queue: str) -> int:
    """Count the messages left in a queue; they are ready a moment after their channel closed."""
    end = time.monotonic() + _RETURNS
    while not (count := probe.ready(queue)) and time.monotonic() < end:
        time.sleep(0.02)
    return count or 0


def _ladders(what: Topology | Sequence[Topology] | str) -> tuple[Topology, ...]:
    if isinstance(what, str):
        return ()
    return (what,) if isinstance(what, Topology) else tuple(what)


def refuse_a_circle(
    taking: Any,
    sending: Any,
    source: Topology | Sequence[Topology] | str,
    to: Topology | Sequence[Topology],
) -> None:
    """Refuse to move messages to where they are: the move would never end.

    :param taking: a connection to the broker to take from.
    :param sending: a connection to the broker to send to.
    :raises OperationError: if source and target are the same ladder.
    """
    emptied, filled = _ladders(source), _ladders(to)
    both = {ladder.prefix for ladder in emptied} & {ladder.prefix for ladder in filled}
    cluster, vhost = _place(taking)
    if both and (cluster, vhost) == _place(sending):
        raise OperationError(
            f"source and target are the same ladder {min(both)}, in the virtual host {vhost!r} of "
            f"the broker {cluster!r}; move to another ladder, virtual host or broker. If these are "
            f"two brokers of one name, rename one: rabbitmqctl set_cluster_name"
        )


def _place(connection: Any) -> tuple[str, str]:
    """Return the broker's cluster name and the virtual host of a connection."""
    return str(cluster_name(connection)), connection.connection.virtual_host


def _sources(what: Topology | Sequence[Topology] | str, snapshot: Snapshot) -> tuple[Source, ...]:
    """Return the queues to empty.

    :raises OperationError: if there are none: the name may be mistyped, or is that of a queue
        whose messages have another destination.
    """
    if isinstance(what, str):
        if parking_of(what) or ladder_of_name(what):
            raise OperationError(
                f"the queue {what!r} is a part of a ladder, and not the destination of its "
                f"messages; name that ladder instead, or redrive what is parked"
            )
        if what not in snapshot.queues:
            raise OperationError(
                f"the queue {what!r} does not exist in this virtual host; check the name"
            )
        return (Source(what),)
    ladders = _ladders(what)
    queues = tuple(source for ladder in ladders for source in sources(ladder, snapshot.queues))
    if not queues:
        names = ", ".join(ladder.prefix for ladder in ladders)
        others = sorted(
            {ladder.prefix for ladder in map(ladder_of_name, snapshot.queues) if ladder}
        )
        raise OperationError(
            f"there is no queue of the ladder {names} in this virtual host; 'status' lists the "
            f"ladders of the namespace"
            + (f", and of other systems there are: {', '.join(others)}" if others else "")
        )
    return queues


def _requeue(source: Source, message: Any, count: str) -> Send | None:
    """Return how to publish a message again to where it was taken from."""
    if source.topology is None:
        # To this queue only, as in read().
        return Send(as_new(message, "CC"), "", source.name, count)
    if why_undecodable(message, source.name):
        # The poison queue has not taken it. It waits the whole wait of this queue again.
        exchange = message.delivery_info["exchange"]
        return Send(as_new(message), exchange, key_of(message), "again", mandatory=True)
    key, now = message.delivery_info["routing_key"], time.time_ns() // 1_000_000
    exchange = message.delivery_info["exchange"]
    out = put_back(source, key, as_new(message).properties, now, exchange)
    if out is None:
        return None
    # The same round reads it again, and counts it then.
    again = copy_of(message, out.properties)
    return Send(again, out.exchange, out.routing_key, "again", mandatory=True)


class _Sorter:
    """Decides what to do with each message, and declares what that needs."""

    def __init__(  # noqa: PLR0913, PLR0917 - see above
        self,
        emptied: Sequence[Topology],
        to: Topology,
        snapshot: Snapshot,
        leads: frozenset[Binding],
        poison: str,
        taking: Any,
        asking: Any,
        probe: Probe,
        exchange: str | None,
    ) -> None:
        self._emptied = emptied
        #: An ordinary queue is none.
        self._from = emptied[0] if emptied else None
        self._to, self._snapshot, self._poison = to, snapshot, poison
        self._leads = leads
        self._taking, self._asking, self._probe, self._exchange = taking, asking, probe, exchange
        self._has_poison = self._is_closed = False
        self._bound: set[str] = set()
        #: The messages that cannot be decoded, which are in the poison queue.
        self.undecodable: Counter[str] = Counter()
        self._exchange_of = lru_cache(maxsize=1024)(self._ask_bindings)

    def begin_round(self) -> None:
        """Take into account that a program may have led cancellations to the old ladder again."""
        self._is_closed = False

    def decide(  # noqa: PLR0911 - one for each kind of message
        self, source: Source, message: Any
    ) -> Send | Keep | Done:
        now = time.time_ns() // 1_000_000
        key = message.delivery_info["routing_key"]
        if why := why_undecodable(message, source.name):
            if source.topology is None:
                return Keep("left", why)
            self.undecodable[why] += 1
            return self._poisoned(source, message, why)
        try:
            reading = read(source, key, message.properties, now, self._exchange_of)
            if reading is None:
                return Keep("kept")
            record = self._amendment(source, message, reading)
            if source.topology is not None:
                keep_due(reading.properties[HEADERS], reading.due)
        except UNREADABLE_ERRORS as exc:
            return self._poisoned(source, message, str(exc) or repr(exc))
        if isinstance(record, Cancel):
            return self._amend(record, reading.due)
        if record is not None:
            return record
        reading.properties[HEADERS].pop(RETURNS, None)
        if self._to.is_ours:
            # At least one tick: a message that is already due also takes the ladder.
            reading.properties[HEADERS][X_DELAY] = max(reading.due - now, 1)
            to = reading.destination
            again = copy_of(message, reading.properties)
            return Send(again, to.exchange, to.routing_key, "moved")
        try:
            return self._to_foreign_ladder(message, reading, now)
        except (AddressError, DelayError, TopologyError, AccessRefused) as exc:
            return Keep("left", str(exc))

    @staticmethod
    def _amendment(source: Source, message: Any, reading: Reading) -> Cancel | Keep | None:
        """Return the cancellation in a message that waits on the ladder, if it is one."""
        ladder = source.topology
        if ladder is None or not ladder.is_ours or reading.destination != way_of_records(ladder):
            return None
        record = from_line(message.body)
        if not isinstance(record, Cancel):
            return None
        is_shown = message.delivery_info["exchange"] == exchange_name(ladder.namespace)
        return record if is_shown else Keep("left", _NOT_SHOWN)

    def _amend(self, record: Cancel, due: int) -> Keep | Done:
        """Publish a cancellation to the other ladder, through the exchange of amendments.

        :param due: when it is to reach the stream. A second one may come later, for later tasks.
        """
        mechanism = mechanism_of(self._asking.connection)
        if mechanism is None:
            return Keep("left", "another system's ladder takes no cancellation along")
        if not self._is_closed:
            self._close_to_cancellations()
        try:
            mechanism.amendments.write_at(record, due)
        except (AmendmentError, DelayError) as exc:
            if not mechanism.amendments.end_if_unanswered(exc):
                return Keep("left", str(exc))
            raise UnreachableError(
                f"the broker went away or refused: {exc}; what was not moved is in its queue; run "
                f"it again"
            ) from exc
        return Done("moved")

    def _close_to_cancellations(self) -> None:
        """Unbind the old ladder from the exchange of the amendments.

        All ladders of a namespace have that in common. It would lead what is moved back into the
        old one as well, where the number of digits is the same, and so without an end.
        """
        channel = self._taking.channel()
        for ladder in (emptied for emptied in self._emptied if emptied.is_ours):
            exchange = exchange_name(ladder.namespace)
            way = route(way_of_records(ladder))
            names = [ladder.level_name(level) for level in range(ladder.ladder.levels)]
            unbind(
                channel,
                (
                    Binding(exchange, name, "*." * digits + way, to_queue=False)
                    for digits, name in enumerate(names, 1)
                    if name in self._snapshot.exchanges
                ),
            )
        channel.close()
        self._is_closed = True

    def _to_foreign_ladder(self, message: Any, reading: Reading, now: int) -> Send | Keep:
        """Return how to enter another system's ladder, without the headers that end the wait early.

        The headers of its own programs stay as they are.
        """
        destination, properties = reading.destination, reading.properties
        if self._from is None or not self._from.is_ours:
            # From one to the other: both know a queue, or in Celery's case a key, by its name.
            destination = Destination("", destination.routing_key)
        names = [destination.routing_key, *further_keys(properties[HEADERS])]
        out = onto(self._to, properties, destination, reading.due, now)
        for name in names:
            if not self._leads_to(name):
                return Keep("left", f"the ladder leads to no queue for {name!r}; declare it first")
        again = copy_of(message, out.properties)
        return Send(again, out.exchange, out.routing_key, "moved", mandatory=True)

    def _leads_to(self, name: str) -> bool:
        """Bind a queue by its name; return whether a queue or a key is bound."""
        if name not in self._bound:
            if self._probe.has_queue(name):
                create(self._asking, self._to, self._to.to_queue(name))
            elif not any(
                binding.source == self._to.delivery and matches_topic(binding.key, name)
                for binding in self._leads
            ):
                return False
            self._bound.add(name)
        return True

    def _ask_bindings(self, routing_key: str) -> str:
        """Return the exchange that Celery's native ladder delivers to, from its bindings."""
        if self._from is None or self._from.delay_header:
            # NServiceBus has an exchange before each endpoint's queue, of the queue's own name.
            return ""
        ways = [
            binding
            for binding in self._snapshot.bindings
            if binding.source == self._from.delivery and matches_topic(binding.key, routing_key)
        ]
        # Its patterns also match longer keys with the same end.
        exact = [way for way in ways if way.key == f"#.{routing_key}"]
        exchanges = {"" if way.to_queue else way.destination for way in exact or ways}
        if len(exchanges) == 1:
            return exchanges.pop()
        if self._exchange is not None:
            return self._exchange
        if exchanges:
            names = ", ".join(map(repr, sorted(exchanges)))
            raise OperationError(
                f"a message for the routing key {routing_key!r} may have been published to any of "
                f"the exchanges {names}; name the right one with --exchange"
            )
        return ""

    def _poisoned(self, source: Source, message: Any, why: str) -> Send:
        if not self._has_poison:
            part = Part(queues=(Queue(self._poison, (("x-queue-type", self._to.queue_type),)),))
            create(self._taking, self._to, part)
            self._has_poison = True
        key = key_of(message)
        if isinstance(key, bytes):
            key = key.decode(errors="backslashreplace")
        noted: dict[str, Any] = {"queue": source.name, "key": key, "why": why}
        # These would copy it to other queues, and drop it before somebody looks at it.
        without = ("CC", "expiration")
        if odd := undecodable(message):
            largest = self._taking.connection.frame_max
            again = raw_copy(
                message.body,
                odd.properties,
                without=(RETURNS, *without),
                note=(POISON_HEADER, noted),
                largest=largest,
            )
            return Send(again, "", self._poison, "poison", aside=True)
        again = as_new(message)
        headers = again.properties[HEADERS]
        for name, place in zip(without, (headers, again.properties), strict=True):
            if place.get(name) is not None:
                noted[name] = place.pop(name)
        headers[POISON_HEADER] = noted
        return Send(again, "", self._poison, "poison", aside=True)
