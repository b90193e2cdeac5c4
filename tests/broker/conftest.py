"""Purpose: connections through our transport, and what arrives on them."""

from __future__ import annotations

import socket
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from kombu import Connection

from kombu_binary_delay import Settings, transport
from kombu_binary_delay.routing.knowledge import Shared
from kombu_binary_delay.wire import alarms
from tests.waits import PATIENCE

OURS = "kombu_binary_delay:Transport"


@dataclass(frozen=True)
class Arrival:
    queue: str
    body: Any
    at: float  # seconds since the epoch
    exchange: str
    key: str
    headers: dict[str, Any]
    properties: dict[str, Any]


@pytest.fixture(scope="module")
def radix():
    """The radix of the module's ladder: 2 for the fewest queues, None for the default."""
    return 2


@pytest.fixture(scope="module")
def topology(radix):
    """The module's ladder."""
    return Settings(radix=radix).topology()


@pytest.fixture
def connect(vhost, radix):
    """Connect to the test's own virtual host, by default by our transport."""
    opened = []

    def connect(transport=OURS, url=None, **options):
        settings = options.get("binary_delay", {})
        if radix and transport == OURS and "foreign_ladder" not in settings:
            options["binary_delay"] = {"radix": radix, **settings}
        # By default, the system ends a connection whose broker takes nothing for a second.
        options.setdefault("socket_settings", {socket.TCP_USER_TIMEOUT: 60_000})
        connection = Connection(
            url or vhost.url, transport=transport, transport_options=options, connect_timeout=30
        )
        opened.append(connection)
        return connection

    yield connect
    for connection in opened:
        connection.release()


@pytest.fixture
def user(vhost):
    """Make a user who may do everything in the virtual host but what is given; return the URL."""
    made = []

    def user(**permissions):
        name = f"user-{uuid.uuid4().hex[:8]}"
        made.append(name)
        vhost.broker.api("PUT", f"users/{name}", {"password": "p", "tags": ""})
        allowed = {**dict.fromkeys(("configure", "write", "read"), ".*"), **permissions}
        vhost.broker.api("PUT", f"permissions/{vhost.name}/{name}", allowed)
        return vhost.url_of(name, "p")

    yield user
    for name in made:
        vhost.broker.api("DELETE", f"users/{name}")


@pytest.fixture(autouse=True)
def _no_alarm_before(monkeypatch):
    """What this process knows of alarms ends with the test that it learned it in.

    Else, for minutes, connections to the shared broker would consume as after an alarm.
    """
    monkeypatch.setattr(alarms, "_blocked", {})


@pytest.fixture(autouse=True)
def _each_connection_is_a_program(monkeypatch):
    """A connection of a test stands for a program of its own: it relies on no other."""
    monkeypatch.setattr(transport, "_shared", lambda *_: Shared())


@pytest.fixture
def unlooked(monkeypatch):
    """No connection looks by itself whether its ladder still exists, however slow the machine is.

    So only the broker's refusal of a publish tells it.
    """
    monkeypatch.setattr("kombu_binary_delay.routing.knowledge.LOOK_AGAIN", sys.maxsize)


@pytest.fixture(params=[False, True], ids=["no-confirm", "confirm"])
def confirm(request):
    return request.param


@pytest.fixture
def collect():
    """Consume from queues until ``count`` messages came, and then a little longer for more.

    until: what is to be true as well, before it ends; messages that are dropped come in any order.
    """

    def collect(connection, queues, count, timeout=PATIENCE, more=0.1, until=lambda: True):  # noqa: PLR0913, PLR0917
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
        while (left := end - time.monotonic()) > 0:
            _drain(connection, left)
        channel.close()
        return arrivals

    return collect


def _drain(connection, seconds):
    with suppress(TimeoutError):
        connection.drain_events(timeout=seconds)
