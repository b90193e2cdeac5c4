"""The decisions about levels: which exist, and which to declare. Pure.

This module must not know destinations.
"""

from __future__ import annotations

from typing import Any

from kombu_binary_delay.ladder.ladder import MAX_WAIT
from kombu_binary_delay.ladder.parts import Part

from .commands import Answer, Ensure, Steps
from .knowledge import BASE, Knowledge

#: The most direct queues that a connection declares, and the most delays that it counts.
MAX_DIRECT_QUEUES = 64
MAX_DELAYS = 1024


class LadderSide(Knowledge):
    """The levels that one connection declares."""

    def _lay_base(self) -> Steps:
        if BASE not in self.existing:
            what = "the delivery exchange and the parking queue"
            yield from self._past_parking(Ensure(self.topology.base, what))
            self.existing.add(BASE)

    def _raise_to(self, lane: int, wanted: int) -> Steps:
        """Declare the levels up to a height, lowest first, or up to an earlier, greater height.

        A level's exchange is declared after everything below it, bindings included (see
        :meth:`.Part.in_order`). So if exchanges and queues exist, and the few bindings are made
        again that follow the last exchange, everything else exists, even if the connection that
        declared it was cut off: one check is enough. If a part was deleted, all levels are declared
        again; a connection that is cut off in that can leave a binding out.
        """
        if ("level", lane, wanted) in self.existing:
            return
        ladder = self._ladders[lane]
        height = max(wanted, self._heights.get(lane, wanted))
        what = f"the levels up to {height}"
        levels = ladder.levels
        part: Part = sum(levels[1 : height + 1], levels[0]) if height >= 0 else Part()
        found: Any = Answer.MISSING
        if self._trusts:
            base = Part() if BASE in self.existing else self.topology.base
            found = yield from self._past_parking(self._look_at({lane: height}, base))
        if found is Answer.MISSING:
            self.existing.discard(BASE)
            yield from self._lay_base()
            found = yield Ensure(part, what)
            # A new level also needs the bindings of the level above, if that exists.
            for above in levels[height + 1 :] if found is Answer.DONE else ():
                if (yield Ensure(Part(bindings=above.bindings), what)) is Answer.MISSING:
                    break
            if self._queue_per_delay and found is Answer.DONE:
                found = yield Ensure(ladder.direct_ways(height), "the ways into the levels")
        if found is Answer.MISSING:
            # Another program deletes it at the same time.
            self.lost()
            return
        self._heights[lane] = height
        self.existing.update(("level", lane, each) for each in range(-1, height + 1))

    def _serve(self, lane: int, digits: tuple[str, ...]) -> Steps:
        """Declare a direct queue for a delay at its second use, up to a number of queues.

        Otherwise an application whose delays rarely repeat would fill the broker with queues.
        """
        delay = lane, digits
        if self._ladders[lane].ladder.delay(digits) > MAX_WAIT:
            # No queue can hold a message for so long, but levels one after the other can.
            return
        if delay not in self._delays:
            if len(self._delays) == MAX_DELAYS:
                self._delays = {each: True for each, served in self._delays.items() if served}
            self._delays[delay] = False
        elif sum(self._delays.values()) < MAX_DIRECT_QUEUES:
            ladder = self._ladders[lane]
            # The pruning of such queues takes the same lock.
            part, lock = ladder.direct_queue(digits), f"{ladder.direct}.lock"
            if (yield Ensure(part, "a queue for one delay", lock=lock)) is Answer.DONE:
                self._delays[delay] = True
                self.existing.add(("direct", *delay))
