"""The ladder side of one connection: which levels stand, and the means to raise more.

It must not import what knows destinations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from amqp.exceptions import NotFound, ResourceLocked

from .channel import OwnChannel, bind, look_for, send, wait
from .model.topology import Topology

#: The most queues for one delay each that a connection makes, and the delays that it counts.
MAX_OWN_QUEUES = 64
MAX_DELAYS = 1024
#: After how many seconds to look whether what was there still is.
LOOK_AGAIN = 30.0


class Levels:
    """What one connection has declared of one ladder.

    :param own: the channel to declare on.
    :param queue_per_delay: whether a delay that repeats gets a queue of its own.
    :param declares: whether this connection makes what is missing.
    :param lay_base: declares what the levels stand on, even if it stood before.
    """

    def __init__(
        self,
        own: OwnChannel,
        topology: Topology,
        lay_base: Callable[[], None],
        *,
        queue_per_delay: bool,
        declares: bool,
    ) -> None:
        self._own = own
        self.topology = topology
        self._lay_base = lay_base
        self._queue_per_delay = queue_per_delay
        self._declares = declares
        #: How high it once stood: so high it is made again.
        self._once = -1
        self._height = -1
        self.forget()
        #: Whether a level that stands may be taken to stand on all that is below it.
        self._trusts = True

    def forget(self) -> None:
        """Forget what stands on the broker: it has told us that something is gone."""
        self._trusts = False
        self._once = max(self._once, self._height)
        self._height = -1
        self._looked = 0.0
        self._delays: dict[tuple[int, ...], bool] = {}

    def entry(self, digits: tuple[int, ...]) -> str:
        """Name the exchange to publish a message to."""
        if self._queue_per_delay:
            return self.topology.own
        if self._declares:
            return self.topology.entry(digits)
        # Who may do no more than publish does that where RabbitMQ checks topic permissions.
        return self.topology.level_of(digits)

    def stands(self, digits: tuple[int, ...]) -> bool:
        """Whether all is known to stand that a delay needs, and has been looked at lately."""
        return (
            self.topology.needs(digits) <= self._height
            and time.monotonic() < self._looked + LOOK_AGAIN
            and not self._queue_per_delay
        )

    def has_gap(self) -> bool:
        """Look now and then whether the exchanges that this connection relies on still stand.

        Where one was deleted, nobody else would tell: messages enter by others.
        """
        if self._height < 0 or time.monotonic() < self._looked + LOOK_AGAIN:
            return False
        self._looked = time.monotonic()
        names = map(self.topology.level_name, range(-1, self._height + 1))
        with self._own.lend(f"the levels up to {self._height}") as channel:
            try:
                look_for(channel, names)
                wait(channel)
            except NotFound:
                return True
        return False

    def prepare(self, digits: tuple[int, ...]) -> None:
        """Let all stand that a delay needs.

        :raises TopologyError: where the broker refuses.
        """
        height = self.topology.needs(digits)
        if height > self._height:
            self._raise_to(max(height, self._once))
        if self._queue_per_delay and not self._delays.get(digits):
            self._serve(digits)

    def _raise_to(self, height: int) -> None:
        """Declare the levels up to ``height``, lowest first.

        A level's exchange is declared after all that is below it, so where all of them are there,
        and the highest one takes its own bindings again, all of the rest stands: one round trip for
        a new connection. Unless somebody has deleted a part of it: then, each level is declared
        again.
        """
        if not (self._trusts and self._stands(height)):
            self._mend(height)
        if self._queue_per_delay:
            with self._own.lend(f"the ways into the levels up to {height}") as channel:
                send(channel, self.topology.own_base)
                new = range(self._height + 1, height + 1)
                bind(channel, sum((self.topology.own_enter(level) for level in new), ()))
        self._height = height
        self._looked = time.monotonic()

    def _stands(self, height: int) -> bool:
        levels = self.topology.levels
        with self._own.lend(f"the levels up to {height}") as channel:
            try:
                look_for(channel, map(self.topology.level_name, range(height + 1)))
                # The lowest one, too: the delivery exchange alone may have been made anew.
                bind(channel, levels[0].bindings + levels[height].bindings)
            except NotFound:
                return False
        return True

    def _mend(self, height: int) -> None:
        """Declare all levels up to ``height``, and bind those that stand on them, again.

        So whoever makes a level sees to it that the one above leads there, if it stands.
        """
        levels = self.topology.levels
        self._lay_base()
        with self._own.lend(f"the levels up to {height}") as channel:
            for level in levels[: height + 1]:
                send(channel, level)
            bind(channel, levels[height].bindings)
            # The first that is not there ends it.
            with suppress(NotFound):
                for level in levels[height + 1 :]:
                    bind(channel, level.bindings)
        self._trusts = True

    def _serve(self, digits: tuple[int, ...]) -> None:
        """Give a delay a queue of its own, from its second use on, and to the first few only.

        An application whose delays hardly ever repeat would litter the broker with queues.
        """
        if digits not in self._delays:
            if len(self._delays) == MAX_DELAYS:
                self._delays = {each: True for each, served in self._delays.items() if served}
            self._delays[digits] = False
        elif sum(self._delays.values()) < MAX_OWN_QUEUES:
            # Held by whoever makes such a queue or prunes one: so none is pruned while it is made.
            lock = f"{self.topology.own}.lock"
            with self._own.lend("a queue for one delay") as channel, suppress(ResourceLocked):
                channel.queue_declare(lock, exclusive=True, auto_delete=True)
                part = self.topology.own_queue(digits)
                send(channel, part)
                bind(channel, part.bindings)
                channel.queue_delete(lock)
                self._delays[digits] = True
