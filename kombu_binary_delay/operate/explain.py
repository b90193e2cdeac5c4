"""Explain the route of one message: bits, key, each queue with its wait, the due time. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.parts import Part
from kombu_binary_delay.ladder.simulate import walk
from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.settings import Settings

from .delivery import to_queue


@dataclass(frozen=True)
class Wait:
    """A queue on the route; times in milliseconds since the publish."""

    queue: str
    begins: int
    ends: int


@dataclass(frozen=True)
class Explanation:
    """The route of one delayed message.

    ``asked`` and ``delay`` are the delay before and after rounding up to ticks, ``due`` the time in
    milliseconds since the epoch; ``digits`` are in bits, the highest first; ``exchange`` and
    ``key`` are what to publish with; ``notes`` say when a message takes another way.
    """

    ladder: str
    destination: Destination
    asked: float
    delay: int
    due: int
    digits: tuple[str, ...]
    weights: tuple[int, ...]
    exchange: str
    key: str
    waits: tuple[Wait, ...]
    notes: tuple[str, ...] = ()


def explain(  # noqa: PLR0913 - the last two say what a transport would know
    topology: Topology,
    delay: float,
    destination: Destination,
    now: int,
    *,
    topic: bool = False,
    settings: Settings | None = None,
) -> Explanation:
    """Return the route of a message through the ladder's topology.

    :param delay: in milliseconds.
    :param now: milliseconds since the epoch.
    :param topic: whether the destination is a topic exchange.
    :param settings: of the transport, for lanes, queues per delay and relays.
    :raises DelayError: if the delay is out of range.
    :raises AddressError: if the destination does not fit.
    """
    settings = settings or Settings()
    digits = topology.ladder.digits(delay)
    relay = not destination.exchange and topology.wants_relay(
        destination.routing_key, settings.relays
    )
    key = topology.address(digits, destination, topic=topic)
    lane = topology.lanes(settings.lanes)[0]
    exchange = lane.level_of(digits) if settings.declare == "never" else lane.entry_exchange(digits)
    notes = []
    part = lane.whole + _behind(topology, destination, relay=relay)
    if settings.lanes > 1:
        notes.append(f"the message id chooses one of {settings.lanes} lanes; this is the first")
    if settings.queue_per_delay and digits:
        exchange = lane.direct
        part += lane.direct_base + lane.direct_queue(digits)
        notes.append("the first message of a delay that a connection publishes takes the levels")
    if settings.jitter:
        notes.append(
            f"with the setting jitter, it arrives up to {settings.jitter / 1000:g} s later: how "
            f"much, its id decides"
        )
    way = walk(part, exchange, key)
    waits, at = [], 0
    for wait in way.waits:
        waits.append(Wait(wait.queue, at, at + wait.milliseconds))
        at += wait.milliseconds
    weights = topology.ladder.weights[topology.ladder.levels - len(digits) :]
    return Explanation(
        lane.prefix,
        destination,
        delay,
        at,
        now + at,
        digits,
        weights,
        exchange,
        key,
        tuple(waits),
        tuple(notes),
    )


def _behind(topology: Topology, destination: Destination, *, relay: bool) -> Part:
    if destination.exchange:
        return topology.mirror(destination.exchange)
    return to_queue(topology, destination.routing_key, relay=relay)
