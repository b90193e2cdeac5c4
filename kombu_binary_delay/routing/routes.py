"""The decisions about the routes from delivery to queues and exchanges. Pure."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kombu_binary_delay.errors import AddressError, TopologyError
from kombu_binary_delay.ladder.address import length
from kombu_binary_delay.ladder.parts import Part
from kombu_binary_delay.ladder.versions import (
    OLDEST,
    can_be_denied,
    can_have_arguments_told,
    is_since,
)

from .commands import (
    Answer,
    AskTemporary,
    Ensure,
    Look,
    OutOfReachError,
    Steps,
    Warn,
    log_refusals,
    names_in,
)
from .knowledge import ATTEMPTS, BASE, Knowledge, Repetition, UserBinding
from .levels import Levels
from .mirrors import Mirrors

#: The most routes that are repeated by one command: the broker has a limited time to answer each.
MAX_AT_ONCE = 64


class Routes:
    """The routes to destinations that one connection declares.

    :param known: the state of the connection, which this changes.
    :param levels: of the same connection.
    """

    def __init__(self, known: Knowledge, levels: Levels) -> None:
        self._known, self._levels = known, levels
        self._topology = known.topology
        self.mirrors = Mirrors(known, levels)

    # -- a queue that is addressed by its name -------------------------------------------------

    def bind_queue(self, queue: str) -> Steps:
        """Bind a queue that is addressed through the default exchange, by a relay if it needs one.

        :raises TopologyError: if the broker refuses, or nothing would be left of a message.
        """
        yield from self._bind_queue(queue, "way", beside_others=False)

    def bind_by_relay(self, queue: str) -> Steps:
        """Do the same by a relay even if it needs none: for a message that names other queues too.

        :raises TopologyError: as :meth:`bind_queue`.
        """
        beside_others = self._topology.can_have_relays
        yield from self._bind_queue(queue, "relay", beside_others=beside_others)

    def _bind_queue(self, queue: str, kind: str, *, beside_others: bool) -> Steps:
        # No queue has an empty name; in a binding, that is the queue that a channel declared last.
        if not queue or (kind, queue) in self._known.existing:
            return
        if queue not in self._known.queues and not can_be_denied(queue, self._known.vhost):
            raise TopologyError(
                f"the queue {queue!r} has a name of {length(queue)} bytes that is not ASCII, "
                f"too long for RabbitMQ to report that the queue does not exist; declare the queue "
                f"on this connection before you delay to it"
            )
        by_relay = beside_others or self._known.needs_relay(queue)
        answer = Answer.DONE
        is_unknown = by_relay and queue not in self._known.declared
        if is_unknown and not (yield from self._has_relay(queue)):
            # Make no relay for a queue that does not exist.
            answer = yield from self._ask_for_queues(queue)
            if answer is Answer.DONE and not beside_others:
                # Nor one that would outlive its queue.
                by_relay = not (yield from self._is_temporary(queue))
        if answer is Answer.DONE:
            part = self._parts_for(queue, by_relay=by_relay)
            what, needs = f"the way to the queue {queue!r}", f"write on the queue {queue!r}"
            try:
                answer = yield from self._levels.declare_on_base(Ensure(part, what, needs))
            except OutOfReachError:
                if not self._topology.parking:
                    raise
                why = f"the queue {queue!r} cannot be reached, since its node is down or starting"
                unless = "it can be bound"
                yield from self._warn_unbound(queue, why, unless, beside_others=beside_others)
                return
        if answer is Answer.DONE:
            self.note_bound(queue, by_relay=by_relay)
        else:
            yield from self._go_on_unbound(queue, answer, beside_others=beside_others)

    def note_bound(self, queue: str, *, by_relay: bool) -> None:
        """Remember that a queue is bound for delayed messages."""
        self._known.existing.add(("way", queue))
        if by_relay or not self._topology.can_have_relays:
            self._known.existing.add(("relay", queue))
        self._known.warned.pop(queue, None)

    def _parts_for(self, queue: str, *, by_relay: bool) -> Part:
        return self._topology.queue_relay(queue) if by_relay else self._topology.to_queue(queue)

    def _has_relay(self, queue: str) -> Any:
        """Ask whether a queue and its relay exist."""
        relay = self._topology.queue_relay_name(queue)
        return (yield from self._ask_for_queues(queue, relay)) is Answer.DONE

    def _ask_for_queues(self, *queues: str) -> Any:
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
        known = self._known
        is_known = queue in known.queues or self._topology.wants_relay(queue, known.settings.relays)
        can_ask = is_since(known.server, OLDEST) and can_have_arguments_told(queue, known.vhost)
        if is_known or not can_ask:
            return False
        return (yield AskTemporary(queue))

    def _go_on_unbound(self, queue: str, answer: Answer, *, beside_others: bool) -> Steps:
        """Refuse a message for a queue that cannot be bound, or warn of what becomes of it."""
        if answer is Answer.LOCKED:
            raise TopologyError(
                f"the queue {queue!r} is exclusive to another connection, and only that connection "
                f"can bind it; delay to a queue that is not exclusive"
            )
        if not self._topology.parking:
            raise TopologyError(
                f"the queue {queue!r} does not exist, and this ladder has no parking queue for "
                f"messages without a destination; declare the queue first"
            )
        self._known.declared.pop(queue, None)
        why = f"the queue {queue!r} does not exist"
        unless = "it is declared and bound"
        yield from self._warn_unbound(queue, why, unless, beside_others=beside_others)

    def _warn_unbound(self, queue: str, why: str, unless: str, *, beside_others: bool) -> Steps:
        if not beside_others:
            yield from self._warn_parked(queue, why, unless)
            return
        # The alternate exchanges do not see a message that has reached one of its queues.
        yield from self._known.warn_once(
            queue,
            f"{why}: a delayed message that reaches another queue, by CC or BCC, may not reach "
            f"this one, unless {unless} before then",
        )

    # -- an exchange ---------------------------------------------------------------------------

    def reach_exchange(self, exchange: str) -> Steps:
        """Check that an exchange exists, and make a relay if it is a headers exchange."""
        known = self._known
        if (yield from known.exchanges.is_gone(exchange)):
            yield from self._warn_parked(
                exchange, f"the exchange {exchange!r} does not exist", "it is declared, with queues"
            )
            return
        if known.exchanges.types.get(exchange) == "headers" and self._topology.is_ours:
            # Programs that bind queues to other exchanges make the mirrors of those.
            yield from self.mirrors.declare(exchange)
        known.existing.add(("target", exchange))
        known.warned.pop(exchange, None)

    def _warn_parked(self, name: str, why: str, unless: str) -> Steps:
        yield from self._known.warn_once(
            name,
            f"{why}: delayed messages for it are parked in {self._topology.parking!r} unless "
            f"{unless} before they are due",
        )

    # -- all that the program declared and bound -----------------------------------------------

    def repeat_all(self) -> Steps:
        """Bind what the program declared, and repeat what it bound, and go on with it from now on.

        :raises TopologyError: if the broker refuses what all of it needs.
        """
        known = self._known
        known.repeats = True
        for _ in range(ATTEMPTS):
            known.repetition = Repetition.UNDER_WAY
            yield from self._repeat_at_once()
            if known.bindings or known.declared:
                yield from self._levels.declare_base()
            for queue in list(known.declared):
                yield from log_refusals(self.bind_queue(queue))
            for binding in list(known.bindings):
                yield from log_refusals(self.mirrors.repeat(binding))
            # Otherwise a part was found to be missing, and the earlier repetitions are lost.
            if known.repetition is Repetition.UNDER_WAY:
                break
        known.repetition = Repetition.DONE

    def consuming(self) -> Steps:
        """Repeat all, unless it is done: the connection begins to consume."""
        if self._known.repetition is Repetition.DONE:
            return
        try:
            yield from self.repeat_all()
        except TopologyError as exc:
            # Once is enough: the next consumer would only get the same refusal.
            self._known.repetition = Repetition.DONE
            yield Warn(f"delayed messages may not reach the queues bound here: {exc}")

    def run_after_call(self, steps: Steps) -> Steps:
        """Run steps after the program's own call, which has already succeeded."""
        known = self._known
        if known.looked and not known.repeats:
            yield from log_refusals(steps)
            return
        if known.repetition is not Repetition.DONE:
            return
        # If this is interrupted, the next publish does it.
        known.repetition = Repetition.UNDER_WAY
        yield from log_refusals(steps)
        if known.repetition is Repetition.UNDER_WAY:
            known.repetition = Repetition.DONE
        else:
            # The steps have shown that a part is missing.
            yield from log_refusals(self.repeat_all())

    def _repeat_at_once(self) -> Steps:
        """Repeat by one command for many what exists but, perhaps, for bindings: mostly, all does.

        If something is missing or refused, the commands for each, which follow, find out what.
        """
        known = self._known
        if not (known.trusts_levels and self._topology.is_ours):
            return
        queues = [queue for queue in known.declared if ("way", queue) not in known.existing]
        bindings = [
            binding
            for binding in known.bindings
            if binding not in known.existing
            and all(
                known.exchanges.is_certain(end) and can_be_denied(end, known.vhost)
                for end in binding.ends
            )
        ]
        for first in range(0, max(len(queues), len(bindings)), MAX_AT_ONCE):
            some = slice(first, first + MAX_AT_ONCE)
            yield from self._repeat_some(queues[some], bindings[some])

    def _repeat_some(self, queues: list[str], bindings: list[UserBinding]) -> Steps:
        answer = Answer.MISSING
        # Each command for its own is refused by itself.
        with suppress(AddressError, TopologyError):
            answer = yield self._look_that_repeats(queues, bindings)
        if answer is not Answer.DONE:
            return
        self._known.existing.add(BASE)
        for queue in queues:
            self.note_bound(queue, by_relay=self._known.needs_relay(queue))
        yield from self.mirrors.note_repeated(bindings)

    def _look_that_repeats(self, queues: list[str], bindings: list[UserBinding]) -> Look:
        ends = dict.fromkeys(end for binding in bindings for end in binding.ends)
        needs_relay = self._known.needs_relay
        made = [
            *((self._parts_for(queue, by_relay=needs_relay(queue)), ()) for queue in queues),
            *map(self.mirrors.parts_of, ends),
            *map(self.mirrors.parts_for, bindings),
        ]
        whole: Part = sum((part for part, _ in made), Part()).distinct()
        base = Part() if BASE in self._known.existing else self._topology.base
        exchanges, waiting = names_in(base + whole)
        others = tuple(binding for _, beside in made for binding in beside)
        return Look((*ends, *exchanges), tuple(waiting), whole.bindings, others)
