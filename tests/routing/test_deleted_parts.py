"""Whatever is deleted of a ladder under running programs is back half a minute later."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest

from kombu_binary_delay.ladder.parts import Part, Queue
from kombu_binary_delay.routing.commands import Pause
from kombu_binary_delay.routing.knowledge import PAUSE_AFTER_DELETION
from kombu_binary_delay.routing.router import LOOK_AGAIN
from tests.routing.test_router import SECOND, Connection
from tests.simulated_broker import SimulatedBroker

KINDS = ("direct", "topic", "fanout", "headers")
#: The exchange and the key of all that is published.
PLACES = [
    ("", "q"),
    ("", "full"),
    ("", "stranger"),
    ("direct", "k2"),
    *((kind, "k") for kind in KINDS),
]


@pytest.fixture
def broker():
    broker = SimulatedBroker()
    broker.declare(Part(queues=(Queue("stranger", ()),)))
    return broker


def declare(connection):
    connection.queue("q")
    connection.queue("full", x_overflow="reject-publish")
    for kind in KINDS:
        connection.exchange(kind, kind)
        connection.bind("q", kind, "k")
        connection.bind("full", kind, "k2")


def reached(connection):
    return {
        (place, delay): connection.reached(place[1], place[0], delay)
        for place in PLACES
        for delay in (SECOND, 60 * SECOND)
    }


def parts(broker, topology):
    """Return what has a name, and is not the user's."""
    names = [("queue", name) for name in broker.queues] + [
        ("exchange", name) for name in broker.exchanges
    ]
    return [(kind, name) for kind, name in names if topology.owns(name)]


def delete(broker, kind, name):
    (broker.delete_queue if kind == "queue" else broker.delete_exchange)(name)


def state(broker):
    return {*broker.exchanges}, {*broker.queues}, broker.all_bindings()


SETTINGS: list[dict[str, Any]] = [{}, {"lanes": 2}, {"layout": "skip"}, {"queue_type": "classic"}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_is_deleted_is_back_at_the_next_look_of_who_made_it(broker, settings):
    connection = Connection(broker, **settings)
    declare(connection)
    wanted, whole = reached(connection), state(broker)
    ladder = connection.topology
    named = {queue.name for part in (ladder.base, *ladder.levels) for queue in part.queues}
    named |= {
        exchange.name for part in (ladder.base, *ladder.levels) for exchange in part.exchanges
    }
    # A clock that is set back is no reason to look later.
    for (kind, name), back in zip(parts(broker, ladder), cycle((1, -1)), strict=False):
        delete(broker, kind, name)
        connection.now += back * LOOK_AGAIN

        done = len(broker.commands)
        assert reached(connection) == wanted, name
        assert state(broker) == whole, name
        paused = Pause(PAUSE_AFTER_DELETION) in broker.commands[done:]
        assert paused or name not in named, "whoever deletes it may delete more"


def test_a_delay_whose_own_queue_is_deleted_takes_the_levels(broker):
    connection = Connection(broker, queue_per_delay=True)
    declare(connection)
    wanted = [reached(connection) for _ in range(2)][-1]
    exchanges, queues, _ = state(broker)
    direct = {name for name in queues if ".direct." in name}
    assert direct
    for name in direct:
        delete(broker, "queue", name)
    connection.now += LOOK_AGAIN

    assert reached(connection) == wanted
    assert (exchanges, queues - direct) == state(broker)[:2]


@pytest.mark.parametrize("first", ["consumer", "publisher"])
def test_what_is_deleted_is_back_when_who_consumes_and_who_publishes_have_looked(broker, first):
    """Each makes what it knows of, and finds what the other one has made."""
    consumer, publisher = Connection(broker), Connection(broker)
    declare(consumer)
    consumer.consume()
    wanted, whole = reached(publisher), state(broker)
    for kind, name in parts(broker, publisher.topology):
        delete(broker, kind, name)
        for connection in (consumer, publisher):
            connection.now += LOOK_AGAIN

        if first == "consumer":
            consumer.look()
        reached(publisher)
        consumer.look()

        assert reached(publisher) == wanted, name
        assert state(broker) == whole, name


def test_two_who_bind_different_queues_both_get_messages_after_the_mirror_was_deleted(broker):
    owners = [Connection(broker) for _ in range(2)]
    for number, owner in enumerate(owners):
        owner.exchange("x", "fanout")
        owner.queue(f"q{number}")
        owner.bind(f"q{number}", "x", "")
        owner.consume()
    publisher = Connection(broker)
    wanted = publisher.reached("", "x")
    assert wanted == ["q0", "q1"]
    broker.delete_exchange(publisher.topology.mirror_name("x"))

    for owner in owners:
        owner.now += LOOK_AGAIN
        owner.look()

    assert publisher.reached("", "x") == wanted


def test_a_look_changes_nothing_where_all_is_there(broker):
    """Whoever knows a queue leads to it straight, and whoever does not, by a relay."""
    knows, binds = Connection(broker), Connection(broker)
    knows.exchange("x", "topic")
    knows.queue("q")
    binds.exchange("x", "topic")
    for connection in (knows, binds):
        connection.bind("q", "x", "k")
        connection.consume()
    for connection in (knows, binds) * 3:
        connection.now += LOOK_AGAIN
        connection.look()

        assert knows.reached("k", "x") == ["q"]
