"""The delivery side of a virtual host: its routes, its faults and their repair. Pure.

RabbitMQ does not notify AMQP clients of bindings that others make or remove. So a binding made or
removed without the transport shows only in a comparison of all bindings, as here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kombu_binary_delay.amendments.parts import exchange_name, later_part
from kombu_binary_delay.errors import AddressError
from kombu_binary_delay.ladder.address import MARK
from kombu_binary_delay.ladder.parts import Binding, Part
from kombu_binary_delay.ladder.topology import IMITABLE, Topology

from .errors import OperationError
from .remedy import HERE, MEND, Place, unbind
from .snapshot import Snapshot, arguments

_HOLDS_UP = "when it is full, some dozens of messages for it stop a level, and everybody's delays"
_RELAY = "'verify --fix' puts a relay before it"
_EXCLUSIVE = (
    "only the connection of that exclusive queue can bind and unbind it: let it use the transport"
)


@dataclass(frozen=True)
class Fault:
    """A fault of the delivery side, and its repair.

    :param severity: as of a :class:`~kombu_binary_delay.operate.Difference`.
    :param missing: the part to declare.
    :param stale: the bindings to remove after that.
    """

    severity: str
    what: str
    found: str
    causes: str
    remedy: str
    missing: Part = field(default_factory=Part)
    stale: tuple[Binding, ...] = ()


@dataclass(frozen=True)
class Repair:
    """The repair of a delivery side: a part to declare, and then bindings to remove."""

    missing: Part = field(default_factory=Part)
    stale: tuple[Binding, ...] = ()


def repair(topology: Topology, snapshot: Snapshot, relays: Iterable[str] = ()) -> Repair:
    """Return the repair of all faults of a delivery side.

    :param relays: glob patterns of queues that need a relay, as in the setting ``relays``.
    """
    mended = list(faults(topology, snapshot, relays))
    missing = sum((fault.missing for fault in mended), Part())
    stale = {binding: None for fault in mended for binding in fault.stale}
    return Repair(
        missing.distinct(),
        tuple(binding for binding in stale if binding not in missing.bindings),
    )


def ways(
    topology: Topology,
    snapshot: Snapshot,
    queues: Iterable[str],
    exchanges: Iterable[str],
    relays: Iterable[str] = (),
) -> Part:
    """Return the routes from delivery to queues, by name, and to exchanges, as bound now.

    :param relays: glob patterns of queues that need a relay, as in the setting ``relays``.
    :raises OperationError: if a queue or an exchange does not exist, or delayed messages cannot
        reach it.
    """
    side = _Side(topology, snapshot, tuple(relays))
    part = Part()
    for queue in queues:
        if queue not in snapshot.queues:
            raise OperationError(
                f"the queue {queue!r} does not exist in this virtual host; declare it first"
            )
        if snapshot.is_exclusive(queue):
            raise OperationError(
                f"the queue {queue!r} is exclusive, and only its own connection can bind it; have "
                f"the program that declares it bind it through the transport"
            )
        part += to_queue(topology, queue, relay=side.needs_relay(queue))
    seen: set[str] = set()
    for exchange in exchanges:
        part += side.to_exchange(exchange, seen)
    return part


def to_queue(topology: Topology, queue: str, *, relay: bool) -> Part:
    """Return the route to a queue, directly or by its relay."""
    return topology.queue_relay(queue) if relay else topology.to_queue(queue)


def known(topology: Topology, snapshot: Snapshot) -> Iterator[tuple[str, bool, bool]]:
    """Yield each queue, with whether it may reject messages, and whether it ends by itself."""
    side = _Side(topology, snapshot, ())
    for queue in snapshot.queues:
        yield queue, bool(side.why_refusing(queue)), side.ends_by_itself(queue)


def faults(
    topology: Topology, snapshot: Snapshot, relays: Iterable[str] = (), place: Place = HERE
) -> Iterator[Fault]:
    """Find what is not as it should be between delivery and the users' queues and exchanges.

    :param relays: patterns of the names of queues that need a relay, as the setting has them.
    :param place: what the commands of remedies name.
    """
    if topology.is_ours:
        yield from _Side(topology, snapshot, tuple(relays), place).faults()


class _Side:
    """The delivery side of a topology in a snapshot."""

    def __init__(
        self, topology: Topology, snapshot: Snapshot, relays: tuple[str, ...], place: Place = HERE
    ) -> None:
        self._place = place
        self._topology, self._snapshot, self._relays = topology, snapshot, relays
        self._from: dict[str, list[Binding]] = defaultdict(list)
        for bound in sorted(snapshot.bindings, key=repr):
            self._from[bound.source].append(bound)
        self._queues = [name for name in snapshot.queues if not topology.owns(name)]
        self._exchanges = [name for name in snapshot.exchanges if not topology.owns(name) and name]
        mirrors = [topology.mirror_name(name) for name in self._exchanges]
        #: The names of the queues that a mirror leads to straight.
        self._straight = {
            binding.destination
            for name in mirrors
            for binding in self._from[name]
            if binding.to_queue
        }

    # -- ways ----------------------------------------------------------------------------------

    def needs_relay(self, queue: str) -> bool:
        """Return whether a queue needs a relay, or has one already."""
        return self._refuses(queue) or self._topology.queue_relay_name(queue) in (
            self._snapshot.queues if self._topology.can_have_relays else ()
        )

    def _needs_relay_on_mirrors(self, queue: str) -> bool:
        """Return whether mirrors are to lead to a queue by its relay: all do, or none.

        A message that matches two bindings would arrive by both ways. A relay that the queue has
        for its name is no reason, if a mirror leads to it straight.
        """
        return self._refuses(queue) or (queue not in self._straight and self.needs_relay(queue))

    def to_exchange(self, exchange: str, seen: set[str]) -> Part:
        """Return the route to an exchange, and to those that it is bound to.

        It leads to their queues by name, too: so returns what was rescheduled, or moved.

        :raises OperationError: if delayed messages cannot reach it.
        """
        topology = self._topology
        if not topology.is_ours:
            raise OperationError(
                f"the ladder {topology.prefix}* reaches queues by name only, and does not know "
                f"the exchange {exchange!r}; lead to its queues by their names instead"
            )
        seen.add(exchange)
        kind = self._type(exchange)
        if kind == "headers":
            part = topology.exchange_relay(exchange)
            for binding in self._from[exchange]:
                part += self._by_name(binding)
            return part
        if kind not in IMITABLE:
            raise OperationError(
                f"the exchange {exchange!r} "
                + ("does not exist" if kind is None else f"is of the type {kind!r}")
                + f" in this virtual host; delayed messages reach {', '.join(IMITABLE)} "
                "and headers exchanges"
            )
        part = topology.mirror(exchange)
        for bound in self._from[exchange]:
            if topology.owns(bound.destination):
                continue
            target = bound.destination
            if bound.to_queue and self._snapshot.is_exclusive(target):
                continue
            if not bound.to_queue and target not in seen:
                part += self.to_exchange(target, seen)
            relay = bound.to_queue and self._needs_relay_on_mirrors(target)
            part += self._by_name(bound)
            part += Part(bindings=self._mirrored(bound, kind, relay=relay))
        return part

    def _by_name(self, binding: Binding) -> Part:
        """Return the route by name to the queue of a binding, if it has one that we can bind."""
        queue = binding.destination
        if not binding.to_queue or self._topology.owns(queue) or self._snapshot.is_exclusive(queue):
            return Part()
        return to_queue(self._topology, queue, relay=self.needs_relay(queue))

    # -- faults --------------------------------------------------------------------------------

    def faults(self) -> Iterator[Fault]:
        """Yield all faults."""
        yield from map(self._within_reach, self._all_faults())

    def _within_reach(self, fault: Fault) -> Fault:
        """Leave out of a repair what only the connection of an exclusive queue can do."""
        snapshot, part = self._snapshot, fault.missing
        stale, reached = snapshot.removable(fault.stale), snapshot.removable(part.bindings)
        wanted = tuple(
            binding
            for binding in part.bindings
            if binding in reached or binding not in snapshot.bindings
        )
        if wanted != reached:
            return replace(fault, missing=Part(), stale=(), remedy=_EXCLUSIVE)
        part = Part(part.exchanges, part.queues, wanted)
        remedy = fault.remedy if stale == fault.stale else _EXCLUSIVE
        return replace(fault, missing=part, stale=stale, remedy=remedy)

    def _all_faults(self) -> Iterator[Fault]:
        known = set(self._topology.base.bindings)
        known |= set(self._way_of_amendments().bindings)
        yield from self._amendment_faults()
        for queue in self._queues:
            known |= self._known_to_queue(queue)
            yield from self._to_queue_faults(queue)
        for exchange in self._exchanges:
            mirror = self._topology.mirror_name(exchange)
            known |= set(self._topology.exchange_relay(exchange).bindings)
            if mirror in self._snapshot.exchanges:
                yield from self._mirror_faults(exchange, mirror)
        yield from self._orphans()
        yield from self._unknown(known)

    def _way_of_amendments(self) -> Part:
        """Return the route of records that wait on the ladder, from delivery to their exchange."""
        return later_part(self._topology)

    def _amendment_faults(self) -> Iterator[Fault]:
        levels = {self._topology.level_name(level) for level in range(self._topology.ladder.levels)}
        entered = exchange_name(self._topology.namespace)
        enters = any(binding.destination in levels for binding in self._from[entered])
        way = self._way_of_amendments()
        queue = way.queues[0].name
        is_led = self._snapshot.bindings.issuperset(way.bindings)
        if enters and not (is_led and queue in self._snapshot.queues):
            yield Fault(
                "error",
                f"queue {queue}",
                "the ladder does not lead to it",
                "what was cancelled while it was due far ahead runs",
                MEND,
                way,
            )

    def _known_to_queue(self, queue: str) -> set[Binding]:
        ways = self._topology.queue_relay(queue) + self._topology.to_queue(queue)
        return set(ways.bindings)

    def _to_queue_faults(self, queue: str) -> Iterator[Fault]:
        topology, bindings = self._topology, self._snapshot.bindings
        relay = topology.queue_relay(queue)
        name = topology.queue_relay_name(queue)
        straight = bindings.issuperset(topology.to_queue(queue).bindings)
        # Where there is a relay, it takes precedence.
        if straight and self._refuses(queue) and not bindings.issuperset(relay.bindings):
            yield Fault(
                "error",
                f"queue {queue}",
                f"it may refuse messages, {self.why_refusing(queue)}, and delivery leads straight "
                f"to it",
                _HOLDS_UP,
                _RELAY + self._setting(queue),
                relay,
            )
        exists = name in self._snapshot.queues or name in self._snapshot.exchanges
        if exists and not (
            bindings.issuperset(relay.bindings)
            and name in self._snapshot.queues
            and name in self._snapshot.exchanges
        ):
            yield Fault(
                "error",
                f"relay of the queue {queue}",
                f"a part of {name} is missing",
                "delayed messages for it are parked, or held up",
                MEND,
                relay,
            )

    def _mirror_faults(self, exchange: str, mirror: str) -> Iterator[Fault]:
        topology, bindings = self._topology, self._snapshot.bindings
        kind = self._type(exchange)
        lead = topology.exchange_relay if kind == "headers" else topology.mirror
        whole = lead(exchange)
        if not bindings.issuperset(whole.bindings):
            yield Fault(
                "error",
                f"exchange {mirror}",
                f"delivery does not lead by it to the exchange {exchange}",
                f"delayed messages for {exchange} are parked",
                MEND,
                whole,
            )
        known = set(whole.bindings)
        if kind in IMITABLE:
            for binding in self._from[exchange]:
                if not topology.owns(binding.destination):
                    known |= self._known_on_mirror(binding, kind)
                    yield from self._binding_faults(binding, kind)
        for bound in self._from[mirror]:
            if bound not in known:
                yield Fault(
                    "error",
                    f"binding from {mirror} to {bound.destination}",
                    f"the exchange {exchange} has no such binding any more, here {bound.key!r}",
                    "delayed messages go on being delivered there",
                    MEND,
                    stale=(bound,),
                )

    def _known_on_mirror(self, binding: Binding, kind: str) -> set[Binding]:
        try:
            known = set(self._mirrored(binding, kind))
            if binding.to_queue:
                known |= set(self._mirrored(binding, kind, relay=True))
        except AddressError:
            return set()
        return known

    def _binding_faults(self, binding: Binding, kind: str) -> Iterator[Fault]:
        queue = binding.destination if binding.to_queue else None
        what = f"binding from {binding.source} to {binding.destination}"
        try:
            direct = self._mirrored(binding, kind)
            by_relay = self._mirrored(binding, kind, relay=True) if queue is not None else ()
        except AddressError as exc:
            causes = "delayed messages for it are parked"
            yield Fault(
                "warning", what, str(exc), causes, "use shorter names, of the exchange and the key"
            )
            return
        straight = self._snapshot.bindings.issuperset(direct)
        if queue is None:
            if not straight:
                target = self._topology.mirror(binding.destination)
                yield self._not_repeated(what, binding, target + Part(bindings=direct))
            return
        indirect = self._snapshot.bindings.issuperset(by_relay)
        relay = self._topology.queue_relay(queue) + Part(bindings=by_relay)
        if straight and self._refuses(queue):
            yield Fault(
                "error",
                what,
                f"the queue may refuse messages, {self.why_refusing(queue)}, and delayed ones get "
                f"straight to it",
                _HOLDS_UP,
                _RELAY + self._setting(queue),
                relay,
                direct,
            )
        elif indirect and queue in self._straight and not self._refuses(queue):
            how = "both straight and by the queue's relay"
            causes = "each delayed message arrives twice"
            if not straight:
                how = "by the queue's relay, and another binding to the queue straight"
                causes = "a delayed message that matches both arrives twice"
            yield Fault(
                "error" if straight else "warning",
                what,
                f"repeated for delayed messages {how}",
                causes,
                MEND,
                Part(bindings=direct),
                by_relay,
            )
        elif not (straight or indirect):
            part = relay if self._needs_relay_on_mirrors(queue) else Part(bindings=direct)
            yield self._not_repeated(what, binding, part)

    def _not_repeated(self, what: str, binding: Binding, missing: Part) -> Fault:
        return Fault(
            "warning",
            what,
            f"the key {binding.key!r} is not repeated for delayed messages",
            "they do not reach it",
            f"{MEND}; or bind it through the transport",
            missing,
        )

    def _orphans(self) -> Iterator[Fault]:
        for name in orphans(self._topology, self._snapshot):
            left = tuple(self._from[name])
            is_mirror = name.startswith(self._topology.mirror_name(""))
            if is_mirror and left:
                yield Fault(
                    "error",
                    f"exchange {name}",
                    "the exchange that it repeats does not exist",
                    f"delayed messages go on being delivered to {left[0].destination}",
                    f"{MEND}, and 'prune' removes it",
                    stale=left,
                )
            else:
                yield Fault(
                    "note",
                    name,
                    "what it leads to does not exist",
                    "delayed messages for that are parked",
                    "'prune' removes it",
                )

    def _unknown(self, known: set[Binding]) -> Iterator[Fault]:
        """Yield bindings from delivery, or from exchanges behind relays, that are not ours."""
        topology = self._topology
        gone = set(orphans(topology, self._snapshot))
        relays = topology.queue_relay_name("")
        sources = [name for name in self._from if name.startswith(relays) and name not in gone]
        delivery = {topology.delivery, topology.to_queues}
        for source in (*delivery, *sources):
            for binding in self._from[source]:
                if binding in known or binding.destination in gone:
                    continue
                # Leave bindings of the user's alone, such as one to watch all deliveries.
                ours = binding.source not in delivery or binding.key.startswith(f"#.{MARK}")
                removable = self._snapshot.removable([binding])
                remedy = MEND if ours else unbind(self._place, binding)
                # The other exchanges are its alternates: they get what matches no binding of it.
                instead = (
                    " as well"
                    if binding.source != topology.delivery
                    else (", and those for a queue by its name, or for none, only there")
                )
                yield Fault(
                    "error",
                    f"binding from {binding.source} to {binding.destination}",
                    f"a binding with the key {binding.key!r} that is none of this ladder's",
                    f"delayed messages that it matches are delivered there{instead}",
                    remedy if removable else _EXCLUSIVE,
                    stale=removable if ours else (),
                )

    # -- how -----------------------------------------------------------------------------------

    def _type(self, exchange: str) -> str | None:
        return self._snapshot.exchanges.get(exchange, {}).get("type")

    def _mirrored(self, binding: Binding, kind: str, *, relay: bool = False) -> tuple[Binding, ...]:
        target = binding.destination
        if relay:
            target = self._topology.queue_relay_name(target)
        return self._topology.mirror_bindings(
            binding.source, kind, target, binding.key, to_queue=binding.to_queue
        )

    def _refuses(self, queue: str) -> bool:
        """Return whether a queue may reject messages, or is not known."""
        return self._topology.can_have_relays and bool(self.why_refusing(queue))

    def ends_by_itself(self, queue: str) -> bool:
        """Return whether RabbitMQ deletes a queue by itself; the setting leaves it out."""
        row = self._snapshot.queues.get(queue, {})
        return bool(
            self._snapshot.is_exclusive(queue)
            or row.get("auto_delete")
            or queue.startswith("amq.gen-")
        )

    def why_refusing(self, queue: str) -> str:
        """Return why a queue may reject messages, or is to have a relay; empty if neither."""
        row = self._snapshot.queues.get(queue, {})
        if _rejects(arguments(row).get("x-overflow")):
            return "by its argument x-overflow"
        if _rejects(_policy(row).get("overflow")):
            return f"by the policy {row.get('policy') or row.get('operator_policy')}"
        if self._topology.wants_relay(queue, self._relays) and not self.ends_by_itself(queue):
            return "by the setting relays"
        if "arguments" not in row:
            return "since its arguments are not known"
        return ""

    def _setting(self, queue: str) -> str:
        """Return the remedy to add if programs cannot see that a queue rejects messages."""
        in_arguments = _rejects(arguments(self._snapshot.queues.get(queue, {})).get("x-overflow"))
        if in_arguments or self._topology.wants_relay(queue, self._relays):
            return ""
        return "; name it in the setting relays of all programs first, for none sees a policy"


def orphans(topology: Topology, snapshot: Snapshot) -> tuple[str, ...]:
    """Return the names of mirrors and relays whose queue or exchange does not exist.

    A long name is replaced by a digest. So this computes the expected names from the queues and
    exchanges that exist, not the other way round.
    """
    if not topology.is_ours:
        return ()
    wanted = set()
    for name in snapshot.exchanges:
        wanted |= {topology.mirror_name(name), topology.exchange_relay_name(name)}
    wanted |= {topology.queue_relay_name(name) for name in snapshot.queues}
    kinds = (
        topology.mirror_name(""),
        topology.exchange_relay_name(""),
        topology.queue_relay_name(""),
    )
    names = dict.fromkeys((*snapshot.exchanges, *snapshot.queues))
    return tuple(name for name in names if name.startswith(kinds) and name not in wanted)


def _rejects(overflow: Any) -> bool:
    return str(overflow).startswith("reject-publish")


def _policy(row: Any) -> dict[str, Any]:
    return dict(row.get("effective_policy_definition") or {})
