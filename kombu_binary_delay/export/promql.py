"""PromQL expressions about a ladder, over RabbitMQ's own metrics. Pure.

``rabbitmq_prometheus`` exports each queue under ``/metrics/detailed``, and counts the dead letters
of a whole node under ``/metrics``. All expressions cover every ladder of a namespace, those of the
form ``v1`` too, because you also need to watch an old one that drains. ``rabbitmq_cluster`` is a
label that a scrape may add if one Prometheus watches several brokers; without it, nothing changes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

from kombu_binary_delay.model.topology import LEAST_DISK, WORKER_HOLDS, Topology
from kombu_binary_delay.model.v1 import TopologyV1

_QUEUE = "rabbitmq_cluster, vhost, queue"
_AHEAD = 4 * 3600  # seconds
_FORMS = (Topology(), TopologyV1())
#: How the names of each form of a ladder differ.
_VERSIONS = "|".join(each.version for each in _FORMS)
_DIRECT = "|".join(each.direct.removeprefix(f"{each.prefix}.") for each in _FORMS)
_RELAYS = "|".join(
    name("").removeprefix(f"{each.delivery_prefix}.").rstrip(".")
    for each in _FORMS
    for name in (each.queue_relay_name, each.exchange_relay_name)
)


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
        return rf"{self._versioned}-.+[.](level-[0-9]+[.][0-9]+|({_DIRECT})[.][0-9]+ms)"

    @cached_property
    def ways_in(self) -> str:
        """The exchanges to which this transport, or other programs, publish delayed messages."""
        if not self.topology.mirrors:
            return self._numbered
        return rf"{self._versioned}-.+[.](level-[0-9]+([.][0-9]+)?|{_DIRECT})"

    @cached_property
    def parking(self) -> str:
        """The parking queues; empty for a ladder that has none."""
        return f"{self._versioned}(-classic)?[.]parking" if self.topology.parking else ""

    @cached_property
    def relays(self) -> str:
        """The relays; empty for a ladder that has none."""
        if not self.topology.mirrors:
            return ""
        return f"{self._versioned}(-classic)?[.]({_RELAYS})[.].+"

    # -- queues ----------------------------------------------------------------------------------

    def messages(self, queues: str) -> str:
        """Return all messages in each queue: those that wait, and those that are due."""
        return f"max by ({_QUEUE}) ({self._queues('messages', queues)})"

    def held(self, queues: str) -> str:
        """Return the messages in each queue that are due and held by its dead-letter worker.

        They are neither ready nor with a consumer, but stay in the queue until their destination
        has confirmed them.
        """
        # The subtrahend is matched by all its labels, so it needs no other matchers.
        rest = " - ".join(f"rabbitmq_detailed_queue_messages_{it}" for it in ("ready", "unacked"))
        return f"max by ({_QUEUE}) ({self._queues('messages', queues)} - {rest})"

    def stuck(self) -> str:
        """Return the levels whose worker is full, and which no message has left for two minutes."""
        held = self.held(self.levels)
        return f"{held} >= {WORKER_HOLDS}\nand resets(({held})[2m:15s]) == 0"

    def level(self, expression: str, over: str = "sum") -> str:
        """Return the sum over the queues of all lanes, with the name without lanes as ``level``.

        :param over: ``max`` for the largest instead.
        """
        names = f"(.+?)(?:-lane[0-9]+|-urgent)?((?:-classic)?[.](?:level|{_DIRECT}).+)"
        if not self.topology.mirrors:
            names = "(.+)()"
        # Not as another queue: series of several lanes must not become the same.
        named = f'label_replace({expression}, "level", "$1$2", "queue", "{names}")'
        return f"{over} by (level) ({named})"

    def within(self, milliseconds: int) -> tuple[str, str]:
        """Return the messages that leave the ladder within a time: at least, and probably.

        A level shows how long its messages stay at most. The probable figure assumes that the
        remaining times are spread evenly below that.
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
        """Return the messages published per second; RabbitMQ before 4 counts by channel only."""
        exchange, channel = (
            f"sum by (rabbitmq_cluster) (rate(rabbitmq_detailed_{by}_messages_published_total"
            f'{{exchange=~"{self.ways_in}"{self.more}}}[{window}]))'
            for by in ("exchange", "channel")
        )
        return f"(sum({exchange} or {channel}) or vector(0))"

    def rate_out(self, window: str) -> str:
        """Return the messages that leave per second: those published, less the ladder's growth."""
        growth = f"deriv(sum({self._queues('messages', self.levels)})[{window}:15s])"
        return f"clamp_min({self.rate_in(window)} - {growth}, 0)"

    def hops(self, what: str, window: str) -> str:
        """Return the at-least-once dead letters per second: ``expired``, or ``confirmed``."""
        labels = f'dead_letter_strategy="at_least_once"{self.everywhere}'
        counter = f"rabbitmq_global_messages_dead_lettered_{what}_total{{{labels}}}"
        return f"sum by (rabbitmq_cluster) (rate({counter}[{window}]))"

    def lateness(self) -> str:
        """Return the mean seconds per hop between due and confirmed, over the last five minutes.

        By Little's law: the messages in a place, divided by those that pass it per second.
        """
        queues = "|".join(filter(None, (self.levels, self.relays)))
        held = f"sum by (rabbitmq_cluster) ({self.held(queues)})"
        return f"avg_over_time(({held})[5m:15s])\n/ {self.hops('confirmed', '5m')}"

    # -- nodes -----------------------------------------------------------------------------------

    def node(self, name: str) -> str:
        """Return what each node reports under a name, in bytes."""
        return f"rabbitmq_{name}_bytes{{{self.everywhere.removeprefix(',')}}}"

    def disk_fills(self) -> str:
        """Return the nodes near their limit of free disk, or there in four hours at this rate."""
        free, limit = map(self.node, ("disk_space_available", "disk_space_available_limit"))
        soon = f"predict_linear({free}[30m], {_AHEAD})"
        return f"{free} - {limit} < {LEAST_DISK}\nor {soon} - {limit} < 0"

    # -- how they are made -----------------------------------------------------------------------

    @cached_property
    def _versioned(self) -> str:
        return f"{_plain(self.topology.namespace)}[.]({_VERSIONS})"

    @cached_property
    def _numbered(self) -> str:
        queues = (each.name for part in self.topology.levels for each in part.queues)
        return "|".join(dict.fromkeys(re.sub(r"[0-9]+$", "[0-9]+", _plain(one)) for one in queues))

    def _queues(self, metric: str, queues: str) -> str:
        return f'rabbitmq_detailed_queue_{metric}{{queue=~"{queues}"{self.more}}}'

    def _latest(self) -> list[tuple[str, int]]:
        """Return the level queues, in any lane, with the time after which their messages left."""
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
    """Return a regular expression that matches only a name."""
    return re.sub(r"[^\w-]", r"[\g<0>]", name)
