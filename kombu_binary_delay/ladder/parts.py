"""Exchanges, queues and bindings as frozen values. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

Arguments = tuple[tuple[str, str | int], ...]


@dataclass(frozen=True)
class Exchange:
    """A durable exchange."""

    name: str
    type: str = "topic"
    arguments: Arguments = ()


@dataclass(frozen=True)
class Queue:
    """A durable queue.

    :param wait: the intended wait of its messages in milliseconds (its ``x-message-ttl`` may be
        longer); None if they do not expire.
    """

    name: str
    arguments: Arguments
    # The broker does not know it, so queues that differ only in it are equal.
    wait: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Binding:
    """A binding from an exchange to a queue or, if ``to_queue`` is false, to an exchange."""

    source: str
    destination: str
    key: str
    to_queue: bool = True
    # Those of somebody's own binding may hold lists and tables, which have no hash.
    arguments: Arguments = field(default=(), hash=False)


@dataclass(frozen=True)
class Part:
    """Exchanges, queues and bindings that belong together; :meth:`in_order` has the order."""

    exchanges: tuple[Exchange, ...] = ()
    queues: tuple[Queue, ...] = ()
    bindings: tuple[Binding, ...] = ()

    def in_order(self) -> Iterator[Exchange | Queue | Binding]:
        """Yield everything in the order of declaration: each binding as soon as its ends exist.

        A client can ask the broker for an exchange but not for a binding, and a declaration can be
        interrupted anywhere. In this order, an exchange that was not there before proves that the
        exchanges before it exist with all their bindings to each other, and that every queue
        exists. Bindings from other exchanges come last: what they lead to is whole by then.
        """
        places = {exchange.name: place for place, exchange in enumerate(self.exchanges)}
        ready: dict[int, list[Binding]] = {}
        for binding in self.bindings:
            place = places.get(binding.source, len(places))
            if not binding.to_queue:
                place = max(place, places.get(binding.destination, -1))
            ready.setdefault(place, []).append(binding)
        yield from self.queues
        for place, exchange in enumerate(self.exchanges):
            yield exchange
            yield from ready.get(place, ())
        yield from ready.get(len(places), ())

    @property
    def entry_exchanges(self) -> frozenset[str]:
        """The names of the entry exchanges, each before a level queue of the same name."""
        # The parking queue also has such an exchange, but without an alternate exchange.
        return frozenset(
            exchange.name
            for exchange in self.exchanges
            if exchange.type == "fanout"
            and exchange.arguments
            and Binding(exchange.name, exchange.name, "") in self.bindings
        )

    def distinct(self) -> Part:
        """Return the part with each object once, where it is first."""
        return Part(
            tuple(dict.fromkeys(self.exchanges)),
            tuple(dict.fromkeys(self.queues)),
            tuple(dict.fromkeys(self.bindings)),
        )

    def __add__(self, other: Part) -> Part:
        return Part(
            self.exchanges + other.exchanges,
            self.queues + other.queues,
            self.bindings + other.bindings,
        )
