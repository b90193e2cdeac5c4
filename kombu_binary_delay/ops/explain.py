"""The way of one message: digits, key, each queue with its wait, and when it is due. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kombu_binary_delay.address import Destination
from kombu_binary_delay.topology import Part, Topology
from kombu_binary_delay.walk import walk


@dataclass(frozen=True)
class Stay:
    """One queue on the way; times in milliseconds since the publish."""

    queue: str
    begins: int
    ends: int


@dataclass(frozen=True)
class Explanation:
    """What becomes of one delayed message.

    ``asked`` and ``delay`` are the delay before and after rounding up to ticks, ``due`` the time in
    milliseconds since the epoch; ``entry`` the exchange and ``key`` the routing key to publish to.
    """

    ladder: str
    destination: Destination
    asked: float
    delay: int
    due: int
    digits: tuple[int, ...]
    weights: tuple[int, ...]
    entry: str
    key: str
    stays: tuple[Stay, ...]


def explain(
    topology: Topology, delay: float, destination: Destination, now: int, *, topic: bool = False
) -> Explanation:
    """Follow a message down the ladder, through the table that brokers are given.

    :param delay: in milliseconds.
    :param now: milliseconds since the epoch.
    :param topic: whether the destination is a topic exchange.
    :raises DelayError: where the delay is out of range.
    :raises AddressError: where the destination does not fit.
    """
    digits = topology.ladder.digits(delay)
    entry = topology.entry(digits)
    key = topology.address(digits, destination, topic=topic)
    way = walk(topology.whole + _behind(topology, destination), entry, key)
    stays, at = [], 0
    for wait in way.waits:
        stays.append(Stay(wait.queue, at, at + wait.ttl))
        at += wait.ttl
    weights = topology.ladder.weights[topology.ladder.levels - len(digits) :]
    return Explanation(
        topology.prefix,
        destination,
        delay,
        at,
        now + at,
        digits,
        weights,
        entry,
        key,
        tuple(stays),
    )


def _behind(topology: Topology, destination: Destination) -> Part:
    if destination.exchange:
        return topology.shadow(destination.exchange)
    return topology.to_queue(destination.routing_key)
