"""Exchanges, queues and bindings as frozen values. Pure."""

from __future__ import annotations

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

    :param wait: how long its messages are to wait, in milliseconds, where its ``x-message-ttl`` may
        be longer; None where they do not expire.
    """

    name: str
    arguments: Arguments
    # A broker does not know of it: two queues that are the same to a broker are equal.
    wait: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Binding:
    """From an exchange to a queue or, where ``to_queue`` is false, to another exchange."""

    source: str
    destination: str
    key: str
    to_queue: bool = True
    arguments: Arguments = ()


@dataclass(frozen=True)
class Part:
    """Some exchanges, queues and bindings that belong together, in the order of declaring."""

    exchanges: tuple[Exchange, ...] = ()
    queues: tuple[Queue, ...] = ()
    bindings: tuple[Binding, ...] = ()

    @property
    def entry_exchanges(self) -> frozenset[str]:
        """The names of the entry exchanges, each before a level queue of the same name."""
        # The parking queue has such an exchange, too, but it has no alternate.
        return frozenset(
            each.name
            for each in self.exchanges
            if each.type == "fanout"
            and each.arguments
            and Binding(each.name, each.name, "") in self.bindings
        )

    def __add__(self, other: Part) -> Part:
        return Part(
            self.exchanges + other.exchanges,
            self.queues + other.queues,
            self.bindings + other.bindings,
        )
