"""What a channel keeps of the program's calls; what it passes to the router is tested there."""

from __future__ import annotations

from types import SimpleNamespace

from kombu_binary_delay.wire.following import Following


def test_a_consumer_that_is_cancelled_is_forgotten():
    following = Following(SimpleNamespace(connection=None))
    for tag in "123":
        following.consumes("q", tag)
        assert following.queue_of({"consumer_tag": tag}) == "q"
        following.forget_consumer(tag)
    assert not following.consumed
