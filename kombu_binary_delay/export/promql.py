"""What is asked of RabbitMQ's own metrics about a ladder, in PromQL. Pure.

``rabbitmq_prometheus`` exports each queue under ``/metrics/detailed``, and counts dead letters of
a whole node under ``/metrics``. All that is asked here covers every ladder of a namespace, since an
old one that drains is to be watched as well. ``rabbitmq_cluster`` is a label that a scrape may add
where one Prometheus watches several brokers; where it is missing, nothing changes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

from kombu_binary_delay.model.topology import VERSION, WORKER_HOLDS, Topology

_QUEUE = "rabbitmq_cluster, vhost, queue"


@dataclass(frozen=True)
class Questions:
    """Expressions, each as text.

    :param more: further matchers for every metric of queues and exchanges.
    :param everywhere: further matchers for every metric of nodes.
    """

    topology: Topology
    more: str = ""
    everywhere: str = ""

    # -- names, as regular expressions without a backslash ---------------------------------------

    @cached_property
    def levels(self) -> str:
        """The queues in which messages wait."""
        if not self.topology.mirrors:
            return self._numbered
        return rf"{self._versioned}-.+[.](level-[0-9]+[.][01]+|direct[.][0-9]+ms)"

    @cached_property
    def ways_in(self) -> str:
        """The exchanges that delayed messages are published to, or may be by other programs."""
        if not self.topology.mirrors:
            return self._numbered
        return rf"{self._versioned}-.+[.](level-[0-9]+([.][01]+)?|direct)"

    @cached_property
    def parking(self) -> str:
        """The parking queues; empty for a ladder that has none."""
        return f"{self._versioned}(-classic)?[.]parking" if self.topology.parking else ""

    @cached_property
    def relays(self) -> str:
        """The relays; empty for a ladder that has none."""
        if not self.topology.mirrors:
            return ""
        return f"{self._versioned}(-classic)?[.]relay-to-(queue|exchange)[.].+"

    # -- queues ----------------------------------------------------------------------------------

    def messages(self, queues: str) -> str:
        """All messages in each queue: those that wait, and those that are due."""
        return f"max by ({_QUEUE}) ({self._queues('messages', queues)})"

    def held(self, queues: str) -> str:
        """Messages in each queue that are due, in the hands of its dead-letter worker.

        They are neither ready nor with a consumer, yet in the queue, until what they lead to has
        confirmed them.
        """
        # What is subtracted is matched by all its labels, so it needs no matchers of its own.
        rest = " - ".join(f"rabbitmq_detailed_queue_messages_{it}" for it in ("ready", "unacked"))
        return f"max by ({_QUEUE}) ({self._queues('messages', queues)} - {rest})"

    def stuck(self) -> str:
        """Levels whose worker is full, and which nothing has left for two minutes."""
        held = self.held(self.levels)
        return f"{held} >= {WORKER_HOLDS}\nand resets(({held})[2m:15s]) == 0"

    def level(self, expression: str) -> str:
        """Add the queues of all lanes up, under the name that a ladder without lanes has."""
        names = r'"queue", "(.+?)(?:-lane[0-9]+|-urgent)?((?:-classic)?[.](?:level|direct).+)"'
        if self.topology.mirrors:
            expression = f'label_replace({expression}, "queue", "$1$2", {names})'
        return f"sum by (queue) ({expression})"

    def within(self, milliseconds: int) -> tuple[str, str]:
        """Messages on the levels that leave the ladder within a time: surely, and probably.

        A level shows how long its messages stay at most. For the probable figure, the time that
        is left to each is taken to lie anywhere below that, with the same chance.
        """
        surely: list[str] = []
        probably: list[str] = []
        for name, latest in self._latest():
            if latest <= milliseconds:
                surely.append(name)
            else:
                share = f"{milliseconds / latest:.3g}"
                probably.append(f"{share} * {self._queues('messages', name)}")
        known = self._queues("messages", "|".join(surely) or "-")
        return f"sum({known}) or vector(0)", f"sum({' or '.join([known, *probably])}) or vector(0)"

    # -- rates, in messages a second -------------------------------------------------------------

    def rate_in(self, window: str) -> str:
        """Count what is published; RabbitMQ before 4 counts it by channel only."""
        exchange, channel = (
            f"sum(rate(rabbitmq_detailed_{by}_messages_published_total"
            f'{{exchange=~"{self.ways_in}"{self.more}}}[{window}]))'
            for by in ("exchange", "channel")
        )
        return f"({exchange} or {channel} or vector(0))"

    def rate_out(self, window: str) -> str:
        """Count what leaves: what is published, less what the ladder has grown by."""
        growth = f"deriv(sum({self._queues('messages', self.levels)})[{window}:15s])"
        return f"clamp_min({self.rate_in(window)} - {growth}, 0)"

    def hops(self, what: str, window: str) -> str:
        """Count the broker's dead letters, at least once: those ``expired``, or ``confirmed``."""
        labels = f'dead_letter_strategy="at_least_once"{self.everywhere}'
        counter = f"rabbitmq_global_messages_dead_lettered_{what}_total{{{labels}}}"
        return f"sum by (rabbitmq_cluster) (rate({counter}[{window}]))"

    def lateness(self) -> str:
        """Seconds between due and confirmed, a mean for each hop of the last five minutes.

        By Little's law: how many are in a place, divided by how many pass it in a second.
        """
        queues = "|".join(filter(None, (self.levels, self.relays)))
        held = f"sum by (rabbitmq_cluster) ({self.held(queues)})"
        return f"avg_over_time(({held})[5m:15s])\n/ {self.hops('confirmed', '5m')}"

    # -- how they are made -----------------------------------------------------------------------

    @cached_property
    def _versioned(self) -> str:
        return f"{_plain(self.topology.namespace)}[.]{VERSION}"

    @cached_property
    def _numbered(self) -> str:
        queues = (each.name for part in self.topology.levels for each in part.queues)
        return "|".join(dict.fromkeys(re.sub(r"[0-9]+$", "[0-9]+", _plain(one)) for one in queues))

    def _queues(self, metric: str, queues: str) -> str:
        return f'rabbitmq_detailed_queue_{metric}{{queue=~"{queues}"{self.more}}}'

    def _latest(self) -> list[tuple[str, int]]:
        """List the level queues, in any lane, and after what time their messages have left."""
        found: list[tuple[str, int]] = []
        below = 0
        for part in replace(self.topology, lane=0, urgent=False).levels:
            waits = [queue.wait or 0 for queue in part.queues]
            for queue, wait in zip(part.queues, waits, strict=True):
                found.append((self._lanes(queue.name), wait + below))
            below += max(waits)
        return found

    def _lanes(self, queue: str) -> str:
        if not self.topology.mirrors:
            return _plain(queue)
        ladder, at, level = _plain(queue).rpartition("[.]level")
        kind = "-classic" if ladder.endswith("-classic") else ""
        return f"{ladder.removesuffix(kind)}(-lane[0-9]+|-urgent)?{kind}{at}{level}"


def _plain(name: str) -> str:
    """Match a name and nothing else."""
    return re.sub(r"[^\w-]", r"[\g<0>]", name)
