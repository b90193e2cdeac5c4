"""The program's bindings, repeated for delayed messages on mirrors of its exchanges. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from kombu_binary_delay.errors import TopologyError
from kombu_binary_delay.ladder.parts import Binding, Part
from kombu_binary_delay.ladder.topology import IMITABLE

from .commands import Answer, Delete, Ensure, OutOfReachError, Steps, Unbind
from .knowledge import Knowledge, UserBinding
from .levels import Levels


class Mirrors:
    """The mirrors of exchanges that one connection declares, and the bindings on them.

    :param known: the state of the connection, which this changes.
    :param levels: of the same connection.
    """

    def __init__(self, known: Knowledge, levels: Levels) -> None:
        self._known, self._levels = known, levels
        self._topology = known.topology
        #: The bindings that could not be repeated, since a node was down.
        self._unreached: set[UserBinding] = set()

    # -- mirrors -------------------------------------------------------------------------------

    def declare(self, exchange: str) -> Steps:
        """Declare the mirror of an exchange, with a relay if it is a headers exchange."""
        fact = ("mirror", exchange)
        if fact in self._known.existing:
            return
        part, others = self.parts_of(exchange)
        what = f"the way to the exchange {exchange!r}"
        needs = "" if others else f"write on the exchange {exchange!r}"
        yield from self._levels.declare_on_base(Ensure(part, what, needs))
        if others:
            # Without the permission it stays, and `verify --fix` removes it.
            with suppress(TopologyError):
                yield Unbind(others, what)
        self._known.existing.add(fact)

    def parts_of(self, exchange: str) -> tuple[Part, tuple[Binding, ...]]:
        """Return the mirror of an exchange, and the bindings that it must not have."""
        with_relay = self._topology.exchange_relay(exchange)
        if self._known.exchanges.types.get(exchange) == "headers":
            return with_relay, ()
        # A headers exchange of this name may have been deleted by what does not remove this.
        to_relay = tuple(binding for binding in with_relay.bindings if binding.to_queue)
        return self._topology.mirror(exchange), to_relay

    def delete(self, exchange: str) -> Steps:
        """Delete the mirror of an exchange, and its relay, if it has one."""
        # Messages of a relay would expire to an exchange that does not exist any more.
        yield Delete(
            (self._topology.mirror_name(exchange),),
            (self._topology.exchange_relay_name(exchange),),
            f"the removal of the way to {exchange!r}",
        )

    def bind_to_delivery_again(self, exchanges: Iterable[str]) -> Steps:
        """Bind mirrors to the delivery exchange again.

        A mirror is not made here: it would lack its bindings, and be found at the next look.
        """
        mirrors = map(self._topology.mirror, exchanges)
        bindings = tuple(binding for mirror in mirrors for binding in mirror.bindings)
        if bindings:
            yield Ensure(Part(bindings=bindings), "the ways to exchanges")

    # -- the bindings on them ------------------------------------------------------------------

    def repeat(self, binding: UserBinding) -> Steps:
        """Repeat a binding of the program's on the mirror of its exchange.

        If the node of a queue is down, that is tried again at each check of a publisher.
        """
        if binding in self._known.existing:
            return
        try:
            yield from self._repeat_alone(binding)
            self._unreached.discard(binding)
            if not binding.to_queue:
                yield from self._warn_of_headers_exchanges()
        except OutOfReachError as exc:
            self._unreached.add(binding)
            yield from self._known.warn_once(
                binding.destination,
                f"delayed messages by the exchange {binding.exchange!r} do not reach "
                f"{binding.destination!r} until it can be bound: {exc}",
            )

    def unreached(self) -> list[UserBinding]:
        """Return the bindings that could not be repeated yet, since a node was down."""
        self._unreached &= set(self._known.bindings)
        return list(self._unreached)

    def note_repeated(self, bindings: list[UserBinding]) -> Steps:
        """Remember that bindings are repeated, and so that the mirrors at their ends exist."""
        mirrors = (("mirror", end) for binding in bindings for end in binding.ends)
        self._known.existing.update(bindings, mirrors)
        self._unreached.difference_update(bindings)
        if not all(binding.to_queue for binding in bindings):
            yield from self._warn_of_headers_exchanges()

    def _repeat_alone(self, binding: UserBinding) -> Steps:
        known = self._known
        for end in binding.ends:
            has_mirror = ("mirror", end) in known.existing
            gone = not has_mirror and (yield from known.exchanges.is_gone(end))
            if gone or (yield from known.exchanges.ask(end)) is Answer.MISSING:
                # It was deleted since, and its bindings with it.
                known.bindings.discard(binding)
                return
        if not binding.to_queue:
            yield from self.declare(binding.destination)
        yield from self.declare(binding.exchange)
        part, others = self.parts_for(binding)
        if not part.bindings:
            known.existing.add(binding)
            return
        command = Ensure(
            part,
            f"the binding of {binding.destination!r}",
            f"write on {binding.destination!r}" if binding.to_queue else "",
        )
        answer = yield from self._levels.declare_on_base(command)
        if answer is not Answer.DONE:
            # The destination was deleted since, and its bindings with it.
            known.bindings.discard(binding)
            return
        if others:
            yield Unbind(others, command.what)
            # Another program may have removed ours meanwhile: two routes are better than none.
            yield Ensure(Part(bindings=part.bindings), command.what, command.needs)
        known.existing.add(binding)

    def parts_for(self, binding: UserBinding) -> tuple[Part, tuple[Binding, ...]]:
        """Return what repeats a binding, and the other route, which another program may have made.

        Only one of the two may exist. An exchange that cannot be imitated has a relay for all.
        """
        if not self._is_imitable(binding):
            return Part(), ()
        by_relay = binding.to_queue and self._known.needs_relay(binding.destination)
        part = self._topology.queue_relay(binding.destination) if by_relay else Part()
        part += Part(bindings=self._bindings_for(binding, by_relay=by_relay))
        if not (binding.to_queue and self._topology.can_have_relays):
            return part, ()
        return part, self._bindings_for(binding, by_relay=not by_relay)

    def remove(self, binding: UserBinding) -> Steps:
        """Remove what :meth:`repeat` made, here or in another process."""
        self._known.existing.discard(binding)
        exchange_type = yield from self._known.exchanges.ask(binding.exchange)
        if exchange_type is not Answer.MISSING and exchange_type not in IMITABLE:
            return
        for by_relay in {False, binding.to_queue and self._topology.can_have_relays}:
            bindings = self._bindings_for(binding, by_relay=by_relay)
            yield Unbind(bindings, f"the removal of the binding of {binding.destination!r}")

    def repeatable_again(self) -> list[UserBinding]:
        """Return the bindings that can be repeated again, whatever other programs know.

        They are those to exchanges, and those to queues whose arguments this connection knows. Two
        programs that both repeated them again, one by a relay and one straight, would double
        messages: so not those to queues that the setting ``relays`` names.
        """
        return [
            binding
            for binding in self._known.bindings
            if binding in self._known.existing
            and self._is_imitable(binding)
            and (not binding.to_queue or self._decides_alone(binding.destination))
        ]

    def repeat_again(self, bindings: Iterable[UserBinding]) -> Steps:
        """Repeat bindings again: another program may have made a mirror or a relay without them."""
        for binding in bindings:
            part, others = self.parts_for(binding)
            what = f"the binding of {binding.destination!r}"
            answer = yield Ensure(part, what)
            if answer is Answer.DONE and others:
                yield Unbind(others, what)

    def relays(self) -> list[str]:
        """Return the names of the relays behind mirrors that are known to exist."""
        known, topology = self._known, self._topology
        relays = [
            topology.exchange_relay_name(exchange)
            for _, exchange in known.facts_of("mirror")
            if known.exchanges.types.get(exchange) == "headers"
        ]
        queues = {
            binding.destination
            for binding in known.bindings
            if binding.to_queue and binding in known.existing and self._is_imitable(binding)
        }
        relays += [topology.queue_relay_name(queue) for queue in queues if known.needs_relay(queue)]
        return relays

    def _is_imitable(self, binding: UserBinding) -> bool:
        return self._known.exchanges.types.get(binding.exchange) in IMITABLE

    def _decides_alone(self, queue: str) -> bool:
        """Whether the arguments of a queue decide whether it needs a relay, and are known."""
        known = self._known.queues.get(queue)
        return known is not None and (known.rejects or not self._known.needs_relay(queue))

    def _bindings_for(self, binding: UserBinding, *, by_relay: bool) -> tuple[Binding, ...]:
        topology, destination = self._topology, binding.destination
        return topology.mirror_bindings(
            binding.exchange,
            self._known.exchanges.types.get(binding.exchange) or "topic",
            topology.queue_relay_name(destination) if by_relay else destination,
            binding.key,
            to_queue=binding.to_queue,
        )

    def _warn_of_headers_exchanges(self) -> Steps:
        """Warn of headers exchanges that lead to one that reads routing keys."""
        known = self._known
        headers = [name for name, kind in known.exchanges.types.items() if kind == "headers"]
        for exchange in headers:
            reader = known.exchange_behind(exchange, ("direct", "topic"))
            if reader is not None:
                yield from known.warn_once(
                    exchange,
                    f"what is delayed by the headers exchange {exchange!r}, or by one that leads "
                    f"to it, does not reach what is bound to {reader!r}, which reads routing keys: "
                    f"the key of a delayed message is an address; bind queues to {exchange!r}",
                )
