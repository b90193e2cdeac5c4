"""Whether what is known to exist still does, and what connections tell each other of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypeVar

from kombu_binary_delay.errors import TopologyError
from kombu_binary_delay.ladder.parts import Exchange, Part, Queue

from .commands import Answer, Look, Steps, log_refusals, names_in
from .knowledge import BASE, PATH, Findings, Knowledge, Repetition, UserBinding, is_recent
from .levels import Levels
from .routes import Routes

#: The number of destinations whose routes are declared again after each check, in rotation, and of
#: bindings that are repeated again.
MAX_RENEWED = 16
#: The same for the mirrors of exchanges. They are led to at once, within one publish.
MAX_MIRRORS = 4
#: A connection that knows more than so many parts does not share them.
MAX_SHARED = 1024

_T = TypeVar("_T")


class Checks:
    """The checks of one connection: RabbitMQ reports no deletion.

    :param known: the state of the connection, which this changes.
    :param levels: of the same connection.
    :param routes: of the same connection.
    """

    def __init__(self, known: Knowledge, levels: Levels, routes: Routes) -> None:
        self._known, self._levels, self._routes = known, levels, routes
        #: How many checks there were, but for that of the first message.
        self.count = 0

    def look_for_path(self, lane: int, digits: tuple[str, ...], queues: Iterable[str]) -> Any:
        """Check all that the first message of a connection needs, which may be its only one.

        This takes one round trip, and as much of the broker's time as it must. If a part is missing
        or refused, the steps for each part find out which, and declare it.

        :param queues: those that the message is for.
        :returns: whether the levels have what it needs.
        """
        known = self._known
        topology = known.topology
        if not known.trusts_levels:
            return False
        base_exchanges, base_queues = names_in(topology.base)
        direct = known.settings.queue_per_delay
        exchanges, waited_in, bindings = known.ladders[lane].passed(digits, direct=direct)
        without_relay = [
            queue for queue in queues if queue in known.queues and not known.needs_relay(queue)
        ]
        look = Look(
            (*base_exchanges, *exchanges),
            (*base_queues, *waited_in),
            sum((topology.to_queue(queue).bindings for queue in without_relay), bindings),
        )
        answer = Answer.MISSING
        with suppress(TopologyError):
            answer = yield from self._levels.run_even_without_parking(look)
        if answer is not Answer.DONE:
            known.existing.discard(BASE)
            return False
        known.existing |= {BASE, (PATH, lane, digits)}
        for queue in without_relay:
            self._routes.note_bound(queue, by_relay=False)
        return True

    def look_again(self, now: int, *, is_first: bool = False) -> Steps:
        """Check that what this connection relies on still exists.

        :param now: microseconds since the epoch.
        :param is_first: whether it is for the first message, of which :meth:`look_for_path` checks
            what it needs.
        """
        known, mirrors = self._known, self._routes.mirrors
        part = Part(
            tuple(
                Exchange(known.topology.mirror_name(exchange))
                for _, exchange in known.facts_of("mirror")
            ),
            tuple(Queue(relay, ()) for relay in mirrors.relays()),
        )
        look = self._levels.look_for(known.heights, known.topology.base + part)
        knows_parts = not is_first and (known.heights or BASE in known.existing)
        if knows_parts:
            answer = yield from self._levels.run_even_without_parking(look)
            if answer is Answer.MISSING:
                known.lost()
        known.looked = now
        # What the first message passed was not looked at. A binding of the program's is longer.
        known.existing -= {fact for fact in known.existing if fact[0] == PATH and len(fact) == 3}
        self._levels.forget_lack_of_parking()
        # Otherwise, all is declared again in any case.
        if known.repetition is Repetition.DONE:
            yield from log_refusals(self._levels.declare_base())
            for binding in mirrors.unreached():
                yield from log_refusals(mirrors.repeat(binding))
        # Another program may have deleted and recreated a queue, without its bindings. So the route
        # to it is declared again: to a few queues after each check, not to hundreds at once.
        routes = self._in_turn(known.facts_of("way", "relay", "target"), MAX_RENEWED)
        known.existing.difference_update(routes)
        if knows_parts:
            # Or the delivery exchange, without its bindings to the mirrors, which are there. Those
            # to the levels are in the look.
            mirrored = self._in_turn(known.facts_of("mirror"), MAX_MIRRORS)
            exchanges = [exchange for _, exchange in mirrored]
            yield from log_refusals(mirrors.bind_to_delivery_again(exchanges))
            # Or a mirror or a relay, without the bindings of this connection.
            bindings = self._in_turn(mirrors.repeatable_again(), MAX_RENEWED)
            yield from log_refusals(mirrors.repeat_again(bindings), once=True)
        self.count += 1

    def _in_turn(self, parts: list[_T], number: int) -> list[_T]:
        """Return some of a list, so that each look takes the next, and the first after the last."""
        first = self.count * number % max(len(parts), 1)
        return (parts[first:] + parts[:first])[:number]

    # -- what connections share ----------------------------------------------------------------

    def rely_on_others(self, now: int) -> bool:
        """Begin with what another connection of this process found less than half a minute ago.

        :returns: whether there was such.
        """
        findings = self._known.shared.findings
        # One that consumes could run the program's code while it waits for the broker to take its
        # first message.
        if findings is None or self._known.repeats or not is_recent(findings.looked, now):
            return False
        self._adopt(findings)
        return True

    def _adopt(self, findings: Findings) -> None:
        """Rely on what another connection has found, but for ways to queues that may be new."""
        known = self._known
        for fact in findings.existing:
            queue = _queue_reached_by(fact)
            if queue in known.queues and known.queues[queue].may_be_new:
                continue
            is_binding = isinstance(fact, UserBinding)
            by_relay = ("relay", queue) in findings.existing and not is_binding
            # Else this connection may know better that the queue needs a relay.
            if queue is None or by_relay or not known.needs_relay(queue):
                known.existing.add(fact)
        known.heights = {**findings.heights}
        known.exchanges.types = {**findings.types, **known.exchanges.types}
        known.looked = findings.looked

    def share(self, losses: int) -> None:
        """Leave what this connection has found to others of its process.

        :param losses: how many they had together when it began to look.
        """
        known, shared = self._known, self._known.shared
        is_newest = shared.findings is None or shared.findings.looked <= known.looked
        is_whole = shared.losses == losses and not self._levels.lacks_parking
        # What knows more lives long, and to copy it each time would take long.
        if is_newest and is_whole and len(known.existing) <= MAX_SHARED:
            types = {**known.exchanges.types}
            existing = frozenset(known.existing)
            shared.findings = Findings(known.looked, existing, {**known.heights}, types)


def _queue_reached_by(fact: tuple[Any, ...]) -> str | None:
    """Return the queue that something leads to; None if it leads to no queue of the program's."""
    if isinstance(fact, UserBinding):
        return fact.destination if fact.to_queue else None
    return fact[1] if fact[0] in ("way", "relay") else None
