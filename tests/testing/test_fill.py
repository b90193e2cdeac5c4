"""What is filled into templates is published as any other message, for whoever depends on it."""

from __future__ import annotations

from functools import partial

import pytest
from kombu import Connection, Queue

from kombu_binary_delay import PublishBatch
from kombu_binary_delay.publishing.template import Run, Template
from kombu_binary_delay.telemetry import on_published, watch
from tests.testing.programs import OURS
from tests.waits import PATIENCE

SECOND, MINUTE = 1_000_000, 60_000_000


@pytest.fixture
def channel(delayed):
    with Connection("amqp://", transport=OURS) as connection:
        Queue("mail")(connection.default_channel).declare()
        yield connection.default_channel


def fill(channel, template, messages):
    bodies, headers, due = zip(*messages, strict=True)
    columns = {name: [row[name] for row in headers] for name in headers[0]}
    run = Run(template, bodies, due, headers=columns)
    with PublishBatch(channel) as batch:
        batch.fill(run, confirm_timeout=PATIENCE)
    assert set(run.states) == {"confirmed"}


def now(delayed):
    return int(delayed.now.timestamp() * 1_000_000)


@pytest.mark.parametrize("header", ["x-delay-key", "x-delay-replaces"])
@pytest.mark.parametrize("varying", [False, True])
def test_of_a_kind_with_a_key_only_the_latest_comes(delayed, channel, header, varying):
    names = {header: "cart-7", "id": "cart-7"}
    template = Template({"application_headers": names}, ("", "mail"), [header] * varying)
    headers = {header: "cart-7"} if varying else {}
    begin = now(delayed) + MINUTE
    # The levels are there then, and nothing but the key needs more than to be written.
    plain = Template({"application_headers": {}}, ("", "mail"), [])
    fill(channel, plain, [(b"", {}, begin + n * SECOND) for n in range(5)])

    fill(channel, template, [(b"%d" % n, headers, begin + n * SECOND) for n in range(5)])
    delayed.run_until_idle()

    came = [message.body for message in iter(partial(channel.basic_get, "mail"), None)]
    assert [body for body in came if body] == [b"4"]
    assert len(came) == 6


def test_listeners_hear_of_each_message_that_waits(delayed, channel, monkeypatch):
    heard: list[watch.Published] = []
    monkeypatch.setattr(watch, "published", [])
    on_published(heard.append)
    template = Template({"application_headers": {"task": "t", "id": ""}}, ("", "mail"), ["id"])
    begin = now(delayed)

    fill(channel, template, [(b"", {"id": str(n)}, begin + n * MINUTE) for n in range(4)])

    assert [(message.id, message.asked) for message in heard] == [("1", 60), ("2", 120), ("3", 180)]
    assert {(message.exchange, message.routing_key) for message in heard} == {("", "mail")}
