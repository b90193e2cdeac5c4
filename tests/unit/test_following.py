"""What a channel keeps of the program's calls; what it passes to the router is tested there."""

from __future__ import annotations

from types import SimpleNamespace

from kombu_binary_delay import Settings
from kombu_binary_delay.routing.router import Router
from kombu_binary_delay.wire.following import FollowingChannel
from kombu_binary_delay.wire.frame_buffer import FrameBuffer
from kombu_binary_delay.wire.mechanism import Mechanism
from tests.simulated_broker import SimulatedBroker


class Plain:
    """The calls of a channel that is followed."""

    connection = SimpleNamespace(
        channels={},
        delay_mechanism=Mechanism(Router(Settings(), {}), SimulatedBroker()),
        frame_buffer=FrameBuffer(None),
    )

    def basic_consume(self, queue, consumer_tag, **_):
        return consumer_tag

    def basic_cancel(self, consumer_tag):
        return consumer_tag


class Channel(FollowingChannel, Plain):
    """A channel without a broker."""


def test_a_consumer_that_is_cancelled_is_forgotten():
    channel = Channel()
    for number in range(3):
        tag = channel.basic_consume("q", f"{number}")
        assert channel._queue_of({"consumer_tag": tag}) == "q"  # noqa: SLF001 - as the transport
        channel.basic_cancel(tag)
    assert not channel._consumed  # noqa: SLF001 - nothing else shows what is kept
