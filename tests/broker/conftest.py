"""Purpose: connections through our transport, and what arrives on them."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from kombu import Connection

from kombu_binary_delay import Topology


@dataclass(frozen=True)
class Arrival:
    queue: str
    body: Any
    at: float  # seconds since the epoch
    exchange: str
    key: str
    headers: dict[str, Any]
    properties: dict[str, Any]


@pytest.fixture(scope="session")
def topology(broker):
    """The default topology on this broker; RabbitMQ has the quorum queues it takes since 3.10."""
    return Topology(queue_type="quorum" if broker.release >= (3, 10) else "classic")


@pytest.fixture
def connect(vhost):
    """Connect to the test's own virtual host, by default by our transport."""
    opened = []

    def connect(transport="kombu_binary_delay:Transport", url=None, **options):
        connection = Connection(
            url or vhost.url, transport=transport, transport_options=options, connect_timeout=30
        )
        opened.append(connection)
        return connection

    yield connect
    for connection in opened:
        connection.release()


@pytest.fixture(params=[False, True], ids=["no-confirm", "confirm"])
def confirm(request):
    return request.param


@pytest.fixture
def collect():
    """Consume from queues until ``count`` messages came, and then a little longer for more.

    The timeout is for what never comes: a message that a stuck level holds up takes three minutes.

    until: what is to be true as well, before it ends; messages that are dropped come in any order.
    """

    def collect(connection, queues, count, timeout=60, more=0.3, until=lambda: True):  # noqa: PLR0913, PLR0917
        arrivals = []

        def take(queue):
            def receive(body, message):
                arrivals.append(
                    Arrival(
                        queue.name,
                        body,
                        time.time(),
                        message.delivery_info["exchange"],
                        message.delivery_info["routing_key"],
                        message.headers,
                        message.properties,
                    )
                )
                message.ack()

            return receive

        channel = connection.channel()
        consumers = [
            connection.Consumer(queue, callbacks=[take(queue)], channel=channel, accept=None)
            for queue in queues
        ]
        for consumer in consumers:
            consumer.consume()
        end = time.monotonic() + timeout
        while not (len(arrivals) >= count and until()) and time.monotonic() < end:
            _drain(connection, 0.1)
        assert len(arrivals) >= count, f"{len(arrivals)} of {count} arrived in {timeout} s"
        assert until(), f"not so within {timeout} s"
        end = time.monotonic() + more
        while time.monotonic() < end:
            _drain(connection, 0.1)
        channel.close()
        return arrivals

    return collect


def _drain(connection, seconds):
    with suppress(TimeoutError):
        connection.drain_events(timeout=seconds)
