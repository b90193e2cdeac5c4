"""The decisions about the routes from delivery to queues and exchanges. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from kombu_binary_delay.errors import AddressError, TopologyError
from kombu_binary_delay.ladder.address import length
from kombu_binary_delay.ladder.parts import Binding, Part
from kombu_binary_delay.ladder.topology import IMITABLE
from kombu_binary_delay.ladder.versions import (
    OLDEST,
    can_be_denied,
    can_have_arguments_told,
    can_have_type_told,
    is_since,
)

from .commands import (
    Answer,
    AskTemporary,
    AskType,
    Delete,
    Ensure,
    Look,
    OutOfReachError,
    Steps,
    Unbind,
    Warn,
)
from .knowledge import (
    ATTEMPTS,
    BASE,
    BINDINGS,
    PATH,
    REPEATING,
    Bound,
    Found,
    names_of,
    one,
    quietly,
)
from .ladder_side import LadderSide

#: A connection that knows more than so many parts does not share them.
MAX_SHARED = 1024
#: The most ways that are repeated by one command: the broker has a limited time to answer each.
MAX_AT_ONCE = 64
#: RabbitMQ reports such a name as a queue, and lets nobody bind it:
#: https://www.rabbitmq.com/docs/direct-reply-to
REPLY_TO = "amq.rabbitmq.reply-to"


class DeliverySide(LadderSide):
    """The routes to destinations that one connection declares."""

    def _refuses(self, queue: str) -> bool:
        """Whether a queue needs a relay, since it may reject messages.

        That is so if it is declared with reject-publish, if the connection does not know its
        arguments, or if it matches the setting ``relays``. Of a queue that is not known, see
        :meth:`_is_temporary`.
        """
        return self.topology.can_have_relays and (
            self._refusing.get(queue, True)
            # What ends by itself would leave its relay behind.
            or (
                not (queue in self._mailboxes or queue in self._temporary)
                and self.topology.wants_relay(queue, self._settings.relays)
            )
        )

    def _begin(self, lane: int, digits: tuple[str, ...], ways: Iterable[str]) -> Any:
        """Check all that the first message of a connection needs, which may be its only one.

        This takes one round trip, and as much of the broker's time as it must. If a part is missing
        or refused, the steps for each part find out which, and declare it.

        :param ways: the queues to lead to.
        :returns: whether the levels have what it needs.
        """
        if not self._trusts:
            return False
        exchanges, queues = names_of(self.topology.base)
        ladder = self._ladders[lane]
        passed, waited_in, bindings = ladder.passed(digits, direct=self._queue_per_delay)
        straight = [each for each in ways if each in self._refusing and not self._refuses(each)]
        look = Look(
            (*exchanges, *passed),
            (*queues, *waited_in),
            sum((self.topology.to_queue(each).bindings for each in straight), bindings),
        )
        found = Answer.MISSING
        with suppress(TopologyError):
            found = yield from self._past_parking(look)
        if found is not Answer.DONE:
            self.existing.discard(BASE)
            return False
        self.existing |= {BASE, (PATH, lane, digits)}
        for queue in straight:
            self._led_to(queue, by_relay=False)
        return True

    def _adopt(self, found: Found) -> None:
        """Rely on what another connection has found, but for ways to queues that may be new."""
        for each in found.existing:
            queue = _queue_led_to(each)
            by_relay = ("relay", queue) in found.existing and not isinstance(each, Bound)
            if queue in self._perhaps_new:
                continue
            # Else this connection may know better that the queue needs a relay.
            if queue is None or by_relay or not self._refuses(queue):
                self.existing.add(each)
        self._heights = {**found.heights}
        self._types = {**found.types, **self._types}
        self._looked = found.looked

    def _share(self, losses: int) -> None:
        """Leave what this connection has found to others of its process.

        :param losses: how many there were when it began to look.
        """
        before = self._shared.found
        is_newest = before is None or before.looked <= self._looked
        is_whole = self._shared.losses == losses and not self._lacks_parking
        # What knows more lives long, and to copy it each time would take long.
        if is_newest and is_whole and len(self.existing) <= MAX_SHARED:
            existing = frozenset(self.existing - {BINDINGS, REPEATING})
            self._shared.found = Found(self._looked, existing, {**self._heights}, {**self._types})

    def _way_to(self, queue: str, *, by_relay: bool) -> Part:
        return self.topology.queue_relay(queue) if by_relay else self.topology.to_queue(queue)

    def _led_to(self, queue: str, *, by_relay: bool) -> None:
        self.existing.add(("way", queue))
        if by_relay or not self.topology.can_have_relays:
            self.existing.add(("relay", queue))
        self._warned.pop(queue, None)

    def _knows(self, queue: str) -> bool:
        """Whether the arguments of a queue decide whether it needs a relay, and are known."""
        refuses = self._refusing.get(queue)
        return refuses is not None and (refuses or not self._refuses(queue))

    def _lead_to(self, queue: str, *, by_relay: bool = False) -> Steps:
        """Bind a queue that is addressed through the default exchange.

        :param by_relay: whether to use a relay even if the queue needs none, for a message that
            names other queues too.
        """
        # No queue has an empty name; in a binding, that is the queue that a channel declared last.
        if not queue or ("relay" if by_relay else "way", queue) in self.existing:
            return
        if queue not in self._refusing and not can_be_denied(queue, self._vhost):
            raise TopologyError(
                f"the queue {queue!r} has a name of {length(queue)} bytes that is not ASCII, "
                f"too long for RabbitMQ to report that the queue does not exist; declare the queue "
                f"on this connection before you delay to it"
            )
        beside_others = self.topology.can_have_relays and by_relay
        by_relay = self.topology.can_have_relays and (by_relay or self._refuses(queue))
        answer = Answer.DONE
        unknown = by_relay and queue not in self._queues
        if unknown and not (yield from self._has_relay(queue)):
            # Make no relay for a queue that does not exist.
            answer = yield from self._exists(queue)
            if answer is Answer.DONE and not beside_others:
                # Nor one that would outlive its queue.
                by_relay = not (yield from self._is_temporary(queue))
        if answer is Answer.DONE:
            way = self._way_to(queue, by_relay=by_relay)
            what, needs = f"the way to the queue {queue!r}", f"write on the queue {queue!r}"
            try:
                answer = yield from self._on_the_base(Ensure(way, what, needs))
            except OutOfReachError:
                if not self.topology.parking:
                    raise
                why = f"the queue {queue!r} cannot be reached, since its node is down or starting"
                unless = "it can be bound"
                yield from self._warn_lost_way(queue, why, unless, beside_others=beside_others)
                return
        if answer is Answer.DONE:
            self._led_to(queue, by_relay=by_relay)
        else:
            yield from self._without_way(queue, answer, beside_others=beside_others)

    def _exists(self, *queues: str) -> Any:
        """Ask whether queues exist; DONE as well if the broker refuses to say so.

        RabbitMQ 4.3 refuses it to a user without a permission on the queue.
        """
        answer = Answer.DONE
        with suppress(TopologyError):
            answer = yield Look(queues=queues)
        return answer

    def _is_temporary(self, queue: str) -> Any:
        """Ask whether a queue, of which nothing is known, ends by itself and takes every message.

        It is not asked if it has a relay: that takes precedence. So a lasting queue is asked once.
        """
        known = queue in self._refusing or self.topology.wants_relay(queue, self._settings.relays)
        can_ask = is_since(self._server, OLDEST) and can_have_arguments_told(queue, self._vhost)
        if known or not can_ask:
            return False
        return (yield AskTemporary(queue))

    def _has_relay(self, queue: str) -> Any:
        """Ask whether a queue and its relay exist."""
        relay = self.topology.queue_relay_name(queue)
        return (yield from self._exists(queue, relay)) is Answer.DONE

    def _without_way(self, queue: str, answer: Answer, *, beside_others: bool) -> Steps:
        """Refuse a message for a queue that cannot be bound, or warn of what becomes of it."""
        if answer is Answer.LOCKED:
            raise TopologyError(
                f"the queue {queue!r} is exclusive to another connection, and only that connection "
                f"can bind it; delay to a queue that is not exclusive"
            )
        if not self.topology.parking:
            raise TopologyError(
                f"the queue {queue!r} does not exist, and this ladder has no parking queue for "
                f"messages without a destination; declare the queue first"
            )
        self._queues.pop(queue, None)
        why = f"the queue {queue!r} does not exist"
        unless = "it is declared and bound"
        yield from self._warn_lost_way(queue, why, unless, beside_others=beside_others)

    def _warn_lost_way(self, queue: str, why: str, unless: str, *, beside_others: bool) -> Steps:
        if not beside_others:
            yield from self._warn_parked(queue, why, unless)
            return
        # The alternate exchanges do not see a message that has reached one of its queues.
        yield from self._warn_once(
            queue,
            f"{why}: a delayed message that reaches another queue, by CC or BCC, may not reach "
            f"this one, unless {unless} before then",
        )

    def _reach(self, exchange: str) -> Steps:
        """Check that an exchange exists, and make a relay if it is a headers exchange."""
        if (yield from self._is_gone(exchange)):
            yield from self._warn_parked(
                exchange, f"the exchange {exchange!r} does not exist", "it is declared, with queues"
            )
            return
        if self._types.get(exchange) == "headers" and self.topology.mirrors:
            # Programs that bind queues to other exchanges make the mirrors of those.
            yield from self._mirror_exchange(exchange)
        self.existing.add(("target", exchange))
        self._warned.pop(exchange, None)

    def _is_gone(self, exchange: str) -> Any:
        """Ask whether an exchange does not exist, and forget its type then; or learn its type."""
        answer: Any = Answer.DONE
        # RabbitMQ refuses one or the other to some users. They may still publish.
        with suppress(TopologyError):
            if not self._knows_type(exchange) and can_have_type_told(exchange, self._vhost):
                answer = yield from self._type_of(exchange)
            elif can_be_denied(exchange, self._vhost):
                # If another one does not exist, the question could end the connection.
                answer = yield Look((exchange,))
        if answer is Answer.MISSING:
            self._types.pop(exchange, None)
        return answer is Answer.MISSING

    def _warn_parked(self, name: str, why: str, unless: str) -> Steps:
        yield from self._warn_once(
            name,
            f"{why}: delayed messages for it are parked in {self.topology.parking!r} unless "
            f"{unless} before they are due",
        )

    def _warn_once(self, name: str, text: str) -> Steps:
        said = self._warned.setdefault(name, set())
        if text not in said:
            said.add(text)
            yield Warn(text)

    def _mirror_exchange(self, exchange: str) -> Steps:
        if ("mirror", exchange) in self.existing:
            return
        part, others = self._mirror_of(exchange)
        what = f"the way to the exchange {exchange!r}"
        needs = "" if others else f"write on the exchange {exchange!r}"
        yield from self._on_the_base(Ensure(part, what, needs))
        if others:
            # Without the permission it stays, and `verify --fix` removes it.
            with suppress(TopologyError):
                yield Unbind(others, what)
        self.existing.add(("mirror", exchange))

    def _mirror_of(self, exchange: str) -> tuple[Part, tuple[Binding, ...]]:
        """Return the mirror of an exchange, and the bindings that it must not have."""
        with_relay = self.topology.exchange_relay(exchange)
        if self._types.get(exchange) == "headers":
            return with_relay, ()
        # A headers exchange of this name may have been deleted by what does not remove this.
        to_relay = tuple(each for each in with_relay.bindings if each.to_queue)
        return self.topology.mirror(exchange), to_relay

    def _lead_to_mirrors(self, exchanges: Iterable[str]) -> Steps:
        """Bind mirrors to the delivery exchange again.

        A mirror is not made here: it would lack its bindings, and be found at the next look.
        """
        ways = tuple(way for each in exchanges for way in self.topology.mirror(each).bindings)
        if ways:
            yield Ensure(Part(bindings=ways), "the ways to exchanges")

    def _renewable(self) -> list[Bound]:
        """Return the bindings that can be repeated again, whatever other programs know.

        They are those to exchanges, and those to queues whose arguments this connection knows. Two
        programs that both repeated them again, one by a relay and one straight, would double
        messages: so not those to queues that the setting ``relays`` names.
        """
        return [
            each
            for each in self._bound
            if each in self.existing
            and self._types.get(each.exchange) in IMITABLE
            and (not each.to_queue or self._knows(each.destination))
        ]

    def _renew_bindings(self, bounds: Iterable[Bound]) -> Steps:
        """Repeat bindings again: another program may have made a mirror or a relay without them."""
        for each in bounds:
            part, others = self._repeated(each)
            what = f"the binding of {each.destination!r}"
            answer = yield Ensure(part, what)
            if answer is Answer.DONE and others:
                yield Unbind(others, what)

    def _mirror_binding(self, bound: Bound) -> Steps:
        """Repeat a binding of the user's on the mirror of its exchange.

        If the node of a queue is down, that is tried again at each check of a publisher.
        """
        if bound in self.existing:
            return
        try:
            yield from self._repeat(bound)
            self._unreached.discard(bound)
            if not bound.to_queue:
                yield from self._warn_of_headers()
        except OutOfReachError as exc:
            self._unreached.add(bound)
            yield from self._warn_once(
                bound.destination,
                f"delayed messages by the exchange {bound.exchange!r} do not reach "
                f"{bound.destination!r} until it can be bound: {exc}",
            )

    def _warn_of_headers(self) -> Steps:
        """Warn of headers exchanges that lead to one that reads routing keys."""
        for exchange in [each for each, kind in self._types.items() if kind == "headers"]:
            reader = self._leads_to(exchange, ("direct", "topic"))
            if reader is not None:
                yield from self._warn_once(
                    exchange,
                    f"what is delayed by the headers exchange {exchange!r}, or by one that leads "
                    f"to it, does not reach what is bound to {reader!r}, which reads routing keys: "
                    f"the key of a delayed message is an address; bind queues to {exchange!r}",
                )

    def _leads_to(self, exchange: str, kinds: tuple[str, ...]) -> str | None:
        """Return an exchange of some types that this connection has bound behind an exchange."""
        ahead, seen = [exchange], set[str]()
        while ahead:
            source = ahead.pop()
            if self._types.get(source) in kinds:
                return source
            seen.add(source)
            behind = (each.destination for each in self._bound.behind(source))
            ahead += [each for each in behind if each not in seen]
        return None

    def _repeat(self, bound: Bound) -> Steps:
        for each in bound.ends:
            gone = ("mirror", each) not in self.existing and (yield from self._is_gone(each))
            if gone or (yield from self._type_of(each)) is Answer.MISSING:
                # It was deleted since, and its bindings with it.
                self._bound.discard(bound)
                return
        if not bound.to_queue:
            yield from self._mirror_exchange(bound.destination)
        yield from self._mirror_exchange(bound.exchange)
        part, others = self._repeated(bound)
        if not part.bindings:
            self.existing.add(bound)
            return
        command = Ensure(
            part,
            f"the binding of {bound.destination!r}",
            f"write on {bound.destination!r}" if bound.to_queue else "",
        )
        answer = yield from self._on_the_base(command)
        if answer is not Answer.DONE:
            # The destination was deleted since, and its bindings with it.
            self._bound.discard(bound)
            return
        if others:
            yield Unbind(others, command.what)
            # Another program may have removed ours meanwhile: two routes are better than none.
            yield Ensure(Part(bindings=part.bindings), command.what, command.needs)
        self.existing.add(bound)

    def _repeated(self, bound: Bound) -> tuple[Part, tuple[Binding, ...]]:
        """Return what repeats a binding, and the other route, which another program may have made.

        Only one of the two may exist. An exchange that cannot be imitated has a relay for all.
        """
        if self._types.get(bound.exchange) not in IMITABLE:
            return Part(), ()
        by_relay = bound.to_queue and self._refuses(bound.destination)
        part = self.topology.queue_relay(bound.destination) if by_relay else Part()
        part += Part(bindings=self._mirrors_of(bound, by_relay=by_relay))
        if not (bound.to_queue and self.topology.can_have_relays):
            return part, ()
        return part, self._mirrors_of(bound, by_relay=not by_relay)

    def _unmirror(self, bound: Bound) -> Steps:
        """Remove what :meth:`_mirror_binding` made, here or in another process."""
        self.existing.discard(bound)
        kind = yield from self._type_of(bound.exchange)
        if kind is not Answer.MISSING and kind not in IMITABLE:
            return
        for by_relay in {False, bound.to_queue and self.topology.can_have_relays}:
            yield Unbind(
                self._mirrors_of(bound, by_relay=by_relay), f"the removal of the binding {bound}"
            )

    def _mirrors_of(self, bound: Bound, *, by_relay: bool) -> tuple[Binding, ...]:
        topology, target = self.topology, bound.destination
        return topology.mirror_bindings(
            bound.exchange,
            self._types.get(bound.exchange) or "topic",
            topology.queue_relay_name(target) if by_relay else target,
            bound.key,
            to_queue=bound.to_queue,
        )

    def _on_the_base(self, command: Ensure) -> Any:
        """Declare a part of the delivery side; if the base is missing, declare that first."""
        yield from self._lay_base()
        answer = yield command
        if answer is not Answer.MISSING:
            return answer
        exchanges, queues = names_of(self.topology.base)
        sources = {each.source for each in command.part.bindings}
        declared = {each.name for each in command.part.exchanges}
        exchanges += [name for name in sources - declared if self.topology.owns(name)]
        look = Look(tuple(dict.fromkeys(exchanges)), tuple(queues))
        if (yield from self._past_parking(look)) is Answer.DONE:
            return Answer.MISSING
        self.lost()
        yield from self._settle()
        yield from self._lay_base()
        return (yield command)

    def _knows_type(self, exchange: str) -> bool:
        return exchange in self._types and exchange not in self._doubted

    def _type_of(self, exchange: str) -> Any:
        """Ask for the type of an exchange, unless this connection knows it."""
        if self._knows_type(exchange):
            return self._types[exchange]
        if not can_have_type_told(exchange, self._vhost):
            raise TopologyError(
                f"the exchange {exchange!r} has a name of {length(exchange)} bytes that "
                f"is not ASCII, too long for RabbitMQ to report its type; declare the exchange "
                f"on this connection before you bind or delay to it"
            )
        answer = yield AskType(exchange)
        self._doubted.discard(exchange)
        if answer is Answer.MISSING:
            self._types.pop(exchange, None)
        else:
            self._types[exchange] = answer
        return answer

    # -- what the program declares, binds and deletes ------------------------------------------

    def consuming(self) -> Steps:
        """Repeat what was bound so far for delayed messages: the connection begins to consume."""
        if not self._declares or BINDINGS in self.existing:
            return
        try:
            yield from self._repeat_bindings()
        except TopologyError as exc:
            # Once is enough: the next consumer would only get the same refusal.
            self.existing.add(BINDINGS)
            yield Warn(f"delayed messages may not reach the queues bound here: {exc}")

    def _repeat_bindings(self) -> Steps:
        self._repeats = True
        for _ in range(ATTEMPTS):
            self.existing.add(REPEATING)
            if self._bound or self._queues:
                yield from self._lay_base()
            yield from self._repeat_at_once()
            for queue in list(self._queues):
                yield from quietly(self._lead_to(queue))
            for bound in list(self._bound):
                yield from quietly(self._mirror_binding(bound))
            # Otherwise a part was found to be missing, and the earlier repetitions are lost.
            if REPEATING in self.existing:
                break
        self.existing.add(BINDINGS)

    def _repeat_at_once(self) -> Steps:
        """Repeat by one command for many what exists but, perhaps, for bindings: mostly, all does.

        If something is missing or refused, the commands for each, which follow, find out what.
        """
        if not (self._trusts and self.topology.mirrors):
            return
        queues = [each for each in self._queues if ("way", each) not in self.existing]
        bounds = [
            each
            for each in self._bound
            if each not in self.existing
            and all(self._knows_type(end) and can_be_denied(end, self._vhost) for end in each.ends)
        ]
        for first in range(0, max(len(queues), len(bounds)), MAX_AT_ONCE):
            some = slice(first, first + MAX_AT_ONCE)
            yield from self._repeat_these(queues[some], bounds[some])

    def _repeat_these(self, queues: list[str], bounds: list[Bound]) -> Steps:
        answer = Answer.MISSING
        # Each command for its own is refused by itself.
        with suppress(AddressError, TopologyError):
            answer = yield self._look_for(queues, bounds)
        if answer is not Answer.DONE:
            return
        for queue in queues:
            self._led_to(queue, by_relay=self._refuses(queue))
        self.existing.update(bounds, (("mirror", end) for each in bounds for end in each.ends))
        self._unreached.difference_update(bounds)
        if not all(each.to_queue for each in bounds):
            yield from self._warn_of_headers()

    def _look_for(self, queues: list[str], bounds: list[Bound]) -> Look:
        ends = dict.fromkeys(end for each in bounds for end in each.ends)
        made = [
            *((self._way_to(each, by_relay=self._refuses(each)), ()) for each in queues),
            *map(self._mirror_of, ends),
            *map(self._repeated, bounds),
        ]
        part: Part = sum((each for each, _ in made), Part())
        exchanges, waiting = names_of(part.distinct())
        others = tuple(each for _, beside in made for each in beside)
        return Look((*ends, *exchanges), tuple(waiting), part.distinct().bindings, others)

    def declared_exchange(self, exchange: str, exchange_type: str) -> None:
        """Remember an exchange's type."""
        if exchange:
            self._types[exchange] = exchange_type
            self._doubted.discard(exchange)

    def declared_queue(
        self,
        queue: str,
        arguments: Mapping[str, Any] | None,
        *,
        mailbox: bool = False,
        auto_delete: bool = False,
        is_in_use: bool = False,
    ) -> Steps:
        """Remember a queue, and bind it for delayed messages.

        :param mailbox: whether no other connection addresses it by its name.
        :param auto_delete: whether the broker deletes it when its last consumer leaves.
        :param is_in_use: whether it has messages or consumers, so that it is not a new queue.
        """
        if self.is_private(queue):
            return
        (self._perhaps_new.discard if is_in_use else self._perhaps_new.add)(queue)
        (self._temporary.add if auto_delete else self._temporary.discard)(queue)
        (self._mailboxes.add if mailbox else self._mailboxes.discard)(queue)
        if not mailbox:
            self._queues[queue] = None
        refuses = str((arguments or {}).get("x-overflow")).startswith("reject-publish")
        before = self._refuses(queue)
        self._refusing[queue] = refuses
        # It may have created the queue again.
        self.existing -= {("way", queue), ("relay", queue)}
        # Bindings from before its arguments were known: all of a queue's go one way.
        again = self._bindings_of(queue) if self._refuses(queue) != before else []
        self.existing.difference_update(again)
        relayed = refuses and self.topology.can_have_relays
        if relayed and (arguments or {})["x-overflow"] == "reject-publish-dlx":
            yield Warn(
                f"the queue {queue!r} dead-letters what it rejects while it is full "
                f"(reject-publish-dlx), and a delayed message is tried again until there is room: "
                f"each try is another copy; use the overflow reject-publish, or drop-head",
                once=True,
            )
        if refuses and self.topology.queue_type == "classic":
            yield Warn(
                f"the queue {queue!r} rejects messages while it is full: delayed messages "
                f"from classic queues are then lost; quorum queues keep them",
                once=True,
            )
        if not mailbox:
            yield from self._followed(self._lead_to(queue))
            for each in again:
                yield from self._followed(self._mirror_binding(each))

    def knows_queue(self, queue: str, *, refuses: bool, temporary: bool) -> None:
        """Remember a queue that others declare.

        :param refuses: whether it may reject messages.
        :param temporary: whether the broker deletes it by itself.
        """
        self._refusing[queue] = refuses
        (self._temporary.add if temporary else self._temporary.discard)(queue)

    def bound(self, exchange: str, destination: str, key: str, *, to_queue: bool) -> Steps:
        """Remember a binding, and repeat it if this connection delays or consumes."""
        if self._mirrors(exchange, destination):
            bound = Bound(exchange, destination, key, to_queue)
            self._bound.add(bound)
            # The program may bind again because our bindings were deleted.
            self.existing -= {bound, ("mirror", exchange), ("mirror", destination)}
            yield from self._followed(self._mirror_binding(bound))

    def unbound(self, exchange: str, destination: str, key: str, *, to_queue: bool) -> Steps:
        """Remove what :meth:`bound` made, here or in another process."""
        if self._mirrors(exchange, destination):
            bound = Bound(exchange, destination, key, to_queue)
            self._bound.discard(bound)
            self._shared.forget()
            if self._declares:
                yield from quietly(self._unmirror(bound))

    def left(self, queue: str) -> None:
        """Forget a queue that lost its last consumer here, if the broker deletes it then."""
        if queue in self._temporary:
            self._forget_queue(queue)

    def _forget_queue(self, queue: str) -> list[Bound]:
        """Forget a queue, and return its bindings, which are forgotten as well."""
        self._queues.pop(queue, None)
        self._refusing.pop(queue, None)
        self._temporary.discard(queue)
        self._perhaps_new.discard(queue)
        self._mailboxes.discard(queue)
        self.existing -= {("way", queue), ("relay", queue)}
        bound = self._bindings_of(queue)
        self._forget(bound)
        return bound

    def _bindings_of(self, queue: str) -> list[Bound]:
        return [each for each in self._bound if each.to_queue and each.destination == queue]

    def deleted_queue(self, queue: str) -> Steps:
        """Forget a queue, and remove the bindings of its relay, which the broker keeps."""
        bound = self._forget_queue(queue)
        self._shared.forget()
        if self._declares and self.topology.can_have_relays:
            # The relay still exists, and would deliver to a new queue of the same name.
            for each in bound:
                yield from quietly(self._unmirror(each))

    def deleted_exchange(self, exchange: str) -> Steps:
        """Remove the mirror of an exchange that is gone."""
        self._shared.forget()
        self._types.pop(exchange, None)
        if not self._mirrors(exchange):
            return
        self.existing -= {("mirror", exchange), ("target", exchange)}
        self._forget(
            each
            for each in self._bound
            if exchange in (each.exchange, None if each.to_queue else each.destination)
        )
        if self._declares:
            # Messages of a relay would expire to an exchange that does not exist any more.
            command = Delete(
                (self.topology.mirror_name(exchange),),
                (self.topology.exchange_relay_name(exchange),),
                f"the removal of the way to {exchange!r}",
            )
            yield from quietly(one(command))

    def _followed(self, steps: Steps) -> Steps:
        """Run steps after the program's own call, which has already succeeded."""
        if self._looked and not self._repeats:
            yield from quietly(steps)
            return
        if BINDINGS not in self.existing:
            return
        # If this is interrupted, the next publish does it.
        self.existing -= {BINDINGS}
        self.existing |= {REPEATING}
        yield from quietly(steps)
        if REPEATING in self.existing:
            self.existing.add(BINDINGS)
        else:
            # The steps have shown that a part is missing.
            yield from quietly(self._repeat_bindings())

    def _forget(self, gone: Iterable[Bound]) -> None:
        for bound in list(gone):
            self._bound.discard(bound)
            self.existing.discard(bound)

    def _mirrors(self, *names: str) -> bool:
        """Whether bindings between these names are repeated on the delivery side."""
        return self.topology.mirrors and not any(self.is_private(name) for name in names)

    def is_private(self, name: str) -> bool:
        """Whether a name is not followed: the ladder's, RabbitMQ's, Celery's control and events."""
        return (
            not name
            or self.topology.owns(name)
            or name.endswith(".pidbox")
            or name == "celeryev"
            or name.startswith(("celeryev.", REPLY_TO))
        )


def _queue_led_to(fact: tuple[Any, ...]) -> str | None:
    """Return the queue that something leads to; None if it leads to no queue of the user's."""
    if isinstance(fact, Bound):
        return fact.destination if fact.to_queue else None
    return fact[1] if fact[0] in ("way", "relay") else None
