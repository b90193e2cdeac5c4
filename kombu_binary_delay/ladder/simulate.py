"""Route a message through a topology as RabbitMQ would: the executable specification. Pure.

The simulation implements topic matching, alternate exchanges and dead-lettering, and knows nothing
of ladders: whether the delays are right depends only on the topology that it is given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .parts import Binding, Exchange, Part


@dataclass(frozen=True)
class Wait:
    """A queue on a message's way, and the milliseconds that the message waits in it."""

    queue: str
    milliseconds: int


@dataclass(frozen=True)
class Walk:
    """The waits of a message, in order, and the queues where it arrives."""

    waits: tuple[Wait, ...]
    arrived: frozenset[str]

    @property
    def total(self) -> int:
        """The sum of all waits in milliseconds."""
        return sum(wait.milliseconds for wait in self.waits)


def walk(part: Part, exchange: str, key: str) -> Walk:
    """Publish ``key`` to ``exchange`` and follow the message until it arrives.

    :raises ValueError: if the message would wait in two queues at once, or go in a circle.
    """
    exchanges = {declared.name: declared for declared in part.exchanges}
    queues = {queue.name: queue for queue in part.queues}
    bindings = by_source(part.bindings)
    waits: list[Wait] = []
    while True:
        reached = route_message(exchanges, bindings, exchange, [key])
        waiting = [
            (queues[name], wait)
            for name in reached
            if name in queues and (wait := queues[name].wait) is not None
        ]
        if not waiting:
            return Walk(tuple(waits), frozenset(reached))
        if len(reached) > 1 or len(waits) > len(queues):
            raise ValueError(f"{key!r} is in more than one queue at once: {sorted(reached)}")
        ((queue, wait),) = waiting
        waits.append(Wait(queue.name, wait))
        exchange = str(dict(queue.arguments)["x-dead-letter-exchange"])


def by_source(bindings: Iterable[Binding]) -> dict[str, list[Binding]]:
    """Return bindings by the exchange that they are from."""
    grouped: dict[str, list[Binding]] = {}
    for binding in bindings:
        grouped.setdefault(binding.source, []).append(binding)
    return grouped


def route_message(
    exchanges: Mapping[str, Exchange],
    bindings: Mapping[str, Iterable[Binding]],
    exchange: str,
    keys: Sequence[str],
    headers: Mapping[str, Any] | None = None,
) -> set[str]:
    """Return the queues that a message published to ``exchange`` reaches without waiting.

    :param bindings: by their source, as :func:`by_source` returns them.
    :param keys: its routing keys; the alternate exchange is used if none of them matches.
    """
    reached: set[str] = set()
    seen: set[str] = set()
    ahead = deque([exchange])
    while ahead:
        name = ahead.popleft()
        if name in seen:
            continue
        seen.add(name)
        kind = exchanges[name].type if name in exchanges else "direct"
        taken = [
            binding
            for binding in bindings.get(name, ())
            if any(_matches(kind, binding, key, headers or {}) for key in keys)
        ]
        reached.update(b.destination for b in taken if b.to_queue)
        ahead.extend(b.destination for b in taken if not b.to_queue)
        if not taken and name in exchanges:
            alternate = dict(exchanges[name].arguments).get("alternate-exchange")
            if alternate is not None:
                ahead.append(str(alternate))
    return reached


@lru_cache(maxsize=4096)
def matches_topic(pattern: str, key: str) -> bool:
    """Return whether a topic binding key matches a routing key, as RabbitMQ reads both."""
    return _match_words(pattern.split(".") if pattern else [], key.split(".") if key else [])


def _match_words(pattern: list[str], words: list[str]) -> bool:
    # The set of positions in the pattern that the words read so far can have reached.
    states = _skip_hashes(pattern, {0})
    for word in words:
        states = _skip_hashes(
            pattern,
            {
                state + (pattern[state] != "#")
                for state in states
                if state < len(pattern) and pattern[state] in ("#", "*", word)
            },
        )
    return len(pattern) in states


def _skip_hashes(pattern: list[str], states: set[int]) -> set[int]:
    closed = set(states)
    for state in states:
        after = state
        while after < len(pattern) and pattern[after] == "#":
            after += 1
            closed.add(after)
    return closed


def _matches(kind: str, binding: Binding, key: str, headers: Mapping[str, Any]) -> bool:
    if kind == "fanout":
        return True
    if kind == "headers":
        wanted = dict(binding.arguments)
        mode = any if wanted.pop("x-match", "all") == "any" else all
        return mode(headers.get(name) == value for name, value in wanted.items())
    return matches_topic(binding.key, key) if kind == "topic" else binding.key == key
