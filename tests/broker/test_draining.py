"""A connection that broke is told from a broker that says nothing."""

from contextlib import suppress
from urllib.parse import urlsplit

import pytest
from amqp import spec
from amqp.exceptions import RecoverableConnectionError
from kombu import Connection

from dev.faults.proxy import Proxy
from kombu_binary_delay.cli.connect import Target
from kombu_binary_delay.spark import send
from kombu_binary_delay.wire.draining import drain, within

#: Frames that a broker takes at any time.
HEARTBEATS = b"\x08\0\0\0\0\0\0\xce" * 10_000


def filled(connection):
    """Send until the kernels take no more, and return the connection of py-amqp."""
    inner = connection.connection
    inner.sock.settimeout(0)
    left = HEARTBEATS
    with suppress(BlockingIOError):
        while True:
            left = left[inner.sock.send(left) :] or HEARTBEATS
    inner.sock.settimeout(None)
    return inner


@pytest.fixture
def held(vhost):
    """A connection to a broker that has stopped to read, with more to read than the kernels hold.

    By Kombu's transport, since operators' commands read by it too; with its limit.
    """
    with (
        Proxy(urlsplit(vhost.url).port or 5672) as proxy,
        Connection(proxy.through(vhost.url)) as connection,
    ):
        connection.connect()
        proxy.hold()
        yield filled(connection)


def test_a_connection_that_the_kernel_gave_up_is_broken_and_not_silent(held):
    with pytest.raises(ConnectionAbortedError, match="TCP_USER_TIMEOUT"):
        drain(held, 30)

    assert not held.connected


@pytest.mark.parametrize(
    "opened",
    [
        lambda url: Target.of(None, url, None, {}).plain(),
        lambda url: Target.of(None, url, None, {}).delaying(),
        lambda url: send.Target(url).connection(),
    ],
    ids=["command", "command that delays", "Spark"],
)
def test_what_sends_much_waits_for_a_broker_that_takes_nothing_for_some_seconds(vhost, opened):
    with (
        Proxy(urlsplit(vhost.url).port or 5672) as proxy,
        opened(proxy.through(vhost.url)) as connection,
    ):
        connection.connect()
        proxy.hold()
        inner = filled(connection)

        with pytest.raises(TimeoutError):
            drain(inner, 4)

        assert inner.connected
        inner.collect()


def test_a_silent_broker_is_silent(connect):
    inner = connect().connection

    with pytest.raises(TimeoutError):
        drain(inner, 0.1)

    assert inner.connected


def test_heartbeats_do_not_prolong_a_wait(vhost):
    """The broker's come each 5 s; without ours, it ends the connection after 20 s or more."""
    door = "kombu_binary_delay:Transport"
    with (
        Connection(vhost.url, transport=door, heartbeat=10) as connection,
        pytest.raises(TimeoutError),
    ):
        connection.drain_events(timeout=7)


def test_nor_what_a_delayed_publish_waits_for(vhost):
    door = "kombu_binary_delay:Transport"
    with Connection(vhost.url, transport=door, heartbeat=10) as connection:
        channel = connection.default_channel
        with (
            pytest.raises(RecoverableConnectionError, match="did not answer within 7 s"),
            connection.connection.answered_within(7),
            connection.connection.frame_buffer.closed("the ladder"),
        ):
            channel.wait(spec.Basic.Ack)
        assert connection.connection.answer_limit is None


def test_the_reason_why_a_connection_was_closed_is_raised_and_not_its_closed_socket(connect):
    inner = connect().connection

    def fail():
        inner.collect()
        raise LookupError("the reason")

    with pytest.raises(LookupError, match="the reason"), within(inner, 5):
        fail()
