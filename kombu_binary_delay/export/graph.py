"""Convert a part into nodes and edges, for formats that draw it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kombu_binary_delay.model.parts import Part


@dataclass(frozen=True)
class Node:
    """An exchange or a queue; ``wait`` is in milliseconds if the queue's messages expire."""

    kind: str
    name: str
    wait: int | None = None

    @property
    def key(self) -> str:
        """A unique key: an exchange and a queue may have the same name."""
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Edge:
    """A route from one node to another: a binding, an expiry, or the alternate exchange."""

    kind: str
    source: Node
    target: Node
    label: str = ""


def outline(part: Part) -> Part:
    """Return a part without entry exchanges: each is one more exchange with its queue's name."""
    entry_exchanges = part.entry_exchanges
    return Part(
        tuple(each for each in part.exchanges if each.name not in entry_exchanges),
        part.queues,
        tuple(each for each in part.bindings if each.source not in entry_exchanges),
    )


def nodes(part: Part) -> tuple[Node, ...]:
    """Return every node: those of the part, then the others that its edges lead to."""
    found = {("exchange", each.name): Node("exchange", each.name) for each in part.exchanges}
    for queue in part.queues:
        found["queue", queue.name] = Node("queue", queue.name, queue.wait)
    for binding in part.bindings:
        for kind, name in (
            ("exchange", binding.source),
            ("queue" if binding.to_queue else "exchange", binding.destination),
        ):
            found.setdefault((kind, name), Node(kind, name))
    for queue in part.queues:
        below = dict(queue.arguments).get("x-dead-letter-exchange")
        if below is not None:
            found.setdefault(("exchange", str(below)), Node("exchange", str(below)))
    return tuple(found.values())


def edges(part: Part) -> Iterator[Edge]:
    """Yield every route that a message can take."""
    found = {(node.kind, node.name): node for node in nodes(part)}
    for binding in part.bindings:
        target = found["queue" if binding.to_queue else "exchange", binding.destination]
        yield Edge("binding", found["exchange", binding.source], target, binding.key)
    for queue in part.queues:
        below = dict(queue.arguments).get("x-dead-letter-exchange")
        if below is not None:
            node = found["queue", queue.name]
            label = "" if node.wait is None else f"after {human(node.wait)}"
            yield Edge("expiry", node, found["exchange", str(below)], label)
    for exchange in part.exchanges:
        alternate = dict(exchange.arguments).get("alternate-exchange")
        parking = found.get(("exchange", str(alternate)))
        if parking is not None:
            yield Edge("alternate", found["exchange", exchange.name], parking)


#: A year is of 365 days, as in RabbitMQ's limits.
_UNITS = (("years", 31_536_000_000), ("d", 86_400_000), ("h", 3_600_000), ("min", 60_000))


def human(milliseconds: float) -> str:
    """Return a time in a suitable unit: "125 ms", "96 s", "1.5 h", "34.1 min", "4.26 years".

    Below two minutes, it is exact; above, it has three digits.
    """
    if 0 < milliseconds < 1000:
        return f"{milliseconds:g} ms"
    for unit, size in _UNITS:
        count = round(milliseconds / size, 3)
        # Half of the next unit is better than 90 of this one, and 36.4 than 1.52.
        if count >= 2 or (count >= 1 and (count * 4 % 1 == 0 or unit == "years")):
            digits = f"{count:.3g}" if count < 1000 else f"{count:.0f}"
            return f"{digits} {'year' if digits == '1' and unit == 'years' else unit}"
    return f"{milliseconds / 1000:.10g} s"
