"""A ladder of the form v1 on a real broker: it delivers, and is moved from, sent on and removed."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest
from click.testing import CliRunner
from kombu import Connection, Exchange, Queue

from kombu_binary_delay.admin import create
from kombu_binary_delay.cli import binary_delay
from kombu_binary_delay.model.address import Destination
from kombu_binary_delay.model.envelope import wrap
from kombu_binary_delay.model.parts import Part
from kombu_binary_delay.model.v1 import LadderV1, TopologyV1
from tests.waits import PATIENCE, attempts

HEADERS = "application_headers"
EVENTS, BY_HEADERS = Exchange("events", "topic"), Exchange("heads", "headers")
LONG = "k" * 230
QUEUES = [
    Queue("mail"),
    Queue(LONG),
    Queue("paid", EVENTS, "order.*"),
    Queue("head", BY_HEADERS, binding_arguments={"x-match": "all", "a": 1}),
]
#: What was sent, with digits 2 and 3 in its key, too: 1.5 s and 3 s are 3 and 6 ticks.
SENT = {
    "queue": (Destination("", "mail"), 1500),
    "relay": (Destination("", "mail"), 3000),
    "topic": (Destination("events", "order.paid"), 3000),
    "headers": (Destination("heads", "x"), 1500),
    "direct": (Destination("", "mail"), 2500),
    "digest": (Destination("", LONG), 3000),
}


@pytest.fixture
def old(topology):
    return TopologyV1(LadderV1(500, (2, 4, 4, 4, 4)), queue_type=topology.queue_type)


@pytest.fixture
def plain(vhost, old):
    """A connection without the transport, to a broker that has all of v1."""
    part = old.whole + old.to_queue("mail") + old.to_queue(LONG) + old.direct_base
    for times in (1, *LONGER):
        part += old.direct_queue(old.ladder.digits(times * SENT["direct"][1]))
    part += old.exchange_relay("heads")
    if old.can_have_relays:
        part += old.queue_relay("mail")
    part += old.mirror("events")
    part += Part(bindings=old.mirror_bindings("events", "topic", "paid", "order.*", to_queue=True))
    with Connection(vhost.url, transport_options={"confirm_publish": True}) as connection:
        for queue in QUEUES:
            queue(connection.default_channel).declare()
        create(connection, old, part)
        yield connection


@pytest.fixture
def run(broker, vhost):
    """Run the command on the test's own virtual host; return its exit code and what it printed."""

    def run(subcommand, *arguments):
        place = ["-b", vhost.url, "-m", broker.management_url, subcommand]
        done = CliRunner().invoke(binary_delay, [*place, *arguments, "--json"])
        return done.exit_code, json.loads(done.stdout)

    return run


def spelled(old, digits, mark, destination):
    return old.address(digits, destination).replace("@", mark, 1)


#: How many times as long those messages wait that are moved, the second time if one was due before.
LONGER = 20, 80
SHORTEST = min(delay for _, delay in SENT.values())


def publish(plain, old, times=1):
    """Publish as a program of that time did; return when each message is due."""
    due = {}
    for name, (destination, once) in SENT.items():
        delay = times * once
        due[name] = time.time_ns() // 1_000_000 + delay
        digits = old.ladder.digits(delay)
        mark = "@!" if name == "relay" and old.can_have_relays else "@"
        properties, key = wrap(
            {HEADERS: {"a": 1}},
            destination,
            due[name],
            partial(spelled, old, digits, mark),
            old.owns,
        )
        to = old.direct if name == "direct" else old.entry_exchange(digits)
        plain.Producer().publish(name, exchange=to, routing_key=key, headers=properties[HEADERS])
    return due


def assert_arrived(arrivals, due, ladder):
    assert {each.body: Destination(each.exchange, each.key) for each in arrivals} == {
        name: SENT[name][0] for name in due
    }
    for each in arrivals:
        assert each.headers == {"a": 1}
        late = each.at * 1000 - due[each.body]
        # Later is what was forgotten.
        assert -ladder.tick <= late < PATIENCE * 1000, (each.body, late)


def test_a_worker_of_today_gets_what_waited_on_v1_as_it_was_sent(plain, old, connect, collect):
    due = publish(plain, old)
    connection = connect()

    arrivals = collect(connection, QUEUES, len(SENT))

    assert_arrived(arrivals, due, old.ladder)
    # Sent on with a delay, it takes today's ladder.
    for each in arrivals:
        connection.Producer().publish(
            each.body,
            exchange=each.exchange,
            routing_key=each.key,
            headers={**each.headers, "x-delay": 500},
        )
    again = collect(connection, QUEUES, len(SENT))
    assert {each.body: each.key for each in again} == {each.body: each.key for each in arrivals}
    assert [each.headers for each in again] == [{"a": 1}] * len(SENT)


def test_what_waits_on_v1_is_moved_sent_on_and_its_ladder_removed(
    plain, old, connect, collect, run
):
    publisher = connect()
    for queue in QUEUES:
        bound = queue(publisher.default_channel)
        bound.declare()
        # From its first look on, delayed messages take this way.
        assert bound.get() is None
    plain.Producer().publish(
        "parked", exchange=old.parking, routing_key="0.3.@..mail", headers={"a": 1}
    )

    _, shown = run("status")
    refused, _ = run("migrate", "--from", "celery", "--to", old.prefix)
    for attempt in attempts(*(times * SHORTEST for times in LONGER)):
        due = publish(plain, old, attempt.delay // SHORTEST)
        _, planned = run("migrate", "--from", old.prefix, "--dry-run")
        moved, done = run("migrate", "--from", old.prefix)
        attempt.end()
        # The last is due when twice the time has passed.
        arrivals = collect(publisher, QUEUES, len(SENT), timeout=2 * attempt.limit)

    assert (planned["messages"], moved, done["moved"], done["poison"]) == (6, 0, 6, 0)
    assert {each["name"]: each["current"] for each in shown["ladders"]} == {old.prefix: False}
    assert shown["parked"] == 1
    assert refused == 2
    assert_arrived(arrivals, due, old.ladder)
    assert all(each.at * 1000 >= due[each.body] for each in arrivals)
    sent, redriven = run("redrive", "--ladder", old.prefix)
    assert (sent, redriven["sent"]) == (0, 1)
    assert [each.body for each in collect(publisher, QUEUES, 1)] == ["parked"]
    removed, _ = run("teardown", "--ladder", old.prefix, "--force")
    _, left = run("teardown", "--dry-run", "--force")
    _, gone = run("teardown", "--ladder", old.prefix, "--dry-run")
    assert (removed, gone["exchanges"], gone["queues"]) == (0, [], [])
    assert left["keeps"] == []
    assert not any(old.delivery_prefix in name for name in left["exchanges"] + left["queues"])
