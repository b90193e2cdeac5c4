"""The decisions about levels: which exist, and which to declare. Pure.

This module must not know destinations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kombu_binary_delay.ladder.ladder import MAX_WAIT
from kombu_binary_delay.ladder.parts import Binding, Part

from .commands import Answer, Ensure, Look, OutOfReachError, Steps, Warn, names_in
from .knowledge import BASE, Knowledge

#: The most direct queues that a connection declares, and the most delays that it counts.
MAX_DIRECT_QUEUES = 64
MAX_DELAYS = 1024


class Levels:
    """The levels that one connection declares, and the base that all of them need.

    :param known: the state of the connection, which this changes.
    """

    def __init__(self, known: Knowledge) -> None:
        self._known = known
        self._topology = known.topology
        self._queue_per_delay = known.settings.queue_per_delay
        #: Whether the parking queue could not be declared, since its node was down.
        self.lacks_parking = False

    # -- the base ------------------------------------------------------------------------------

    def declare_base(self) -> Steps:
        """Declare what all levels need, unless it exists."""
        if BASE not in self._known.existing:
            what = "the delivery exchange and the parking queue"
            yield from self.run_even_without_parking(Ensure(self._topology.base, what))
            self._known.existing.add(BASE)

    def declare_on_base(self, command: Ensure) -> Any:
        """Declare a part of the delivery side; if the base is missing, declare that first.

        :returns: the answer.
        """
        yield from self.declare_base()
        answer = yield command
        if answer is not Answer.MISSING:
            return answer
        exchanges, queues = names_in(self._topology.base)
        sources = {binding.source for binding in command.part.bindings}
        declared = {exchange.name for exchange in command.part.exchanges}
        exchanges += [name for name in sources - declared if self._topology.owns(name)]
        look = Look(tuple(dict.fromkeys(exchanges)), tuple(queues))
        if (yield from self.run_even_without_parking(look)) is Answer.DONE:
            return Answer.MISSING
        self._known.lost()
        yield from self._known.pause_after_deletion()
        yield from self.declare_base()
        return (yield command)

    def forget_lack_of_parking(self) -> None:
        """Try the parking queue again with the next declaration, if its node was down."""
        if self.lacks_parking:
            self.lacks_parking = False
            self._known.existing.discard(BASE)

    def run_even_without_parking(self, command: Ensure | Look) -> Any:
        """Do a command; without the parking queue if its node is down, as all else works without.

        :returns: the answer.
        """
        if isinstance(command, Look) and self.lacks_parking:
            return (yield self._without_parking(command))
        try:
            return (yield command)
        except OutOfReachError as exc:
            queues = command.queues if isinstance(command, Look) else names_in(command.part)[1]
            if self._topology.parking not in queues:
                raise
            if isinstance(command, Ensure):
                self.lacks_parking = True
            answer = yield self._without_parking(command)
            yield Warn(f"messages that should be parked can be lost: {exc}")
            return answer

    def _without_parking(self, command: Ensure | Look) -> Ensure | Look:
        """Return a command without the parking queue.

        Also without its exchange, which proves to others that all of the base is whole.
        """
        parking = self._topology.parking
        if isinstance(command, Ensure):
            kept = (exchange for exchange in command.part.exchanges if exchange.name != parking)
            return replace(command, part=Part(tuple(kept)))
        exchanges, queues = (
            tuple(name for name in names if name != parking)
            for names in (command.exchanges, command.queues)
        )
        return replace(command, exchanges=exchanges, queues=queues)

    # -- the levels ----------------------------------------------------------------------------

    def declare_up_to(self, lane: int, wanted: int) -> Steps:
        """Declare the levels up to a height, lowest first, or up to an earlier, greater height.

        A level's exchange is declared after everything below it, bindings included (see
        :meth:`.Part.in_order`). So if exchanges and queues exist, and the few bindings are made
        again that follow the last exchange, everything else exists, even if the connection that
        declared it was cut off: one check is enough. If a part was deleted, all levels are declared
        again; a connection that is cut off in that can leave a binding out.
        """
        known = self._known
        if ("level", lane, wanted) in known.existing:
            return
        ladder = known.ladders[lane]
        height = max(wanted, known.heights.get(lane, wanted))
        what = f"the levels up to {height}"
        levels = ladder.levels
        part: Part = sum(levels[1 : height + 1], levels[0]) if height >= 0 else Part()
        answer: Any = Answer.MISSING
        if known.trusts_levels:
            base = Part() if BASE in known.existing else self._topology.base
            answer = yield from self.run_even_without_parking(self.look_for({lane: height}, base))
        if answer is Answer.MISSING:
            known.existing.discard(BASE)
            yield from self.declare_base()
            answer = yield Ensure(part, what)
            # A new level also needs the bindings of the level above, if that exists.
            for above in levels[height + 1 :] if answer is Answer.DONE else ():
                if (yield Ensure(Part(bindings=above.bindings), what)) is Answer.MISSING:
                    break
            if self._queue_per_delay and answer is Answer.DONE:
                answer = yield Ensure(ladder.direct_ways(height), "the ways into the levels")
        if answer is Answer.MISSING:
            # Another program deletes it at the same time.
            known.lost()
            return
        known.heights[lane] = height
        known.existing.update(("level", lane, below) for below in range(-1, height + 1))

    def look_for(self, heights: Mapping[int, int], others: Part) -> Look:
        """Return the command that checks whether levels, and other parts, exist.

        :param heights: the highest level of each lane.
        """
        exchanges, queues = names_in(others)
        bindings: tuple[Binding, ...] = ()
        for lane, height in heights.items():
            ladder = self._known.ladders[lane]
            for part in ladder.levels[: height + 1]:
                of_level = names_in(part)
                exchanges += of_level[0]
                queues += of_level[1]
            bindings += ladder.unproven(height)
            if self._queue_per_delay:
                exchanges += names_in(ladder.direct_base)[0]
                # A connection with fewer levels may have made the exchange anew.
                bindings += ladder.direct_ways(height).bindings
        return Look(tuple(exchanges), tuple(queues), bindings)

    def declare_direct_queue(self, lane: int, digits: tuple[str, ...]) -> Steps:
        """Declare a direct queue for a delay at its second use, up to a number of queues.

        Otherwise an application whose delays rarely repeat would fill the broker with queues.
        """
        known, delay = self._known, (lane, digits)
        ladder = known.ladders[lane]
        if ladder.ladder.delay(digits) > MAX_WAIT:
            # No queue can hold a message for so long, but levels one after the other can.
            return
        if delay not in known.delays:
            if len(known.delays) == MAX_DELAYS:
                known.delays = {kept: True for kept, served in known.delays.items() if served}
            known.delays[delay] = False
        elif sum(known.delays.values()) < MAX_DIRECT_QUEUES:
            # The pruning of such queues takes the same lock.
            part, lock = ladder.direct_queue(digits), f"{ladder.direct}.lock"
            if (yield Ensure(part, "a queue for one delay", lock=lock)) is Answer.DONE:
                known.delays[delay] = True
                known.existing.add(("direct", *delay))
