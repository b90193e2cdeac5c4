"""What one connection makes, and another one that knows more, or less, relies on."""

from __future__ import annotations

import pytest

from kombu_binary_delay.model.parts import Part, Queue
from tests.router.test_router import Connection, relays
from tests.simulated_broker import SimulatedBroker


@pytest.fixture
def broker():
    return SimulatedBroker()


@pytest.mark.parametrize("refusing", ["a", "b", "c", "abc", ""])
def test_every_queue_of_a_message_with_further_keys_gets_it_once(broker, refusing):
    """Also those that are led to straight, beside one that has a relay."""
    owner, publisher = Connection(broker), Connection(broker)
    for name in "abc":
        arguments = {"x_overflow": "reject-publish"} if name in refusing else {}
        owner.queue(name, **arguments)
        publisher.queue(name, **arguments)
    owner.consume()
    headers = {"CC": ["b"], "BCC": ["c"]}

    for _ in range(2):
        _, plan = publisher.publish("a", application_headers=headers)
        packed = plan.properties["application_headers"]
        keys = [plan.routing_key, *packed["CC"], *packed["BCC"]]
        rests = broker.follow(plan.exchange, keys, packed)
        assert sorted(each.queue for each in rests) == ["a", "b", "c"]


def test_a_mailbox_that_is_bound_has_no_relay_left_behind(broker):
    """Its connection knows its arguments; each program may make a new one at each start."""
    connection = Connection(broker)
    connection.consume()
    broker.declare(Part(queues=(Queue("amq.gen-1", ()),)))
    connection.run(connection.router.declared_queue("amq.gen-1", {}, passive=False, mailbox=True))
    connection.bind("amq.gen-1", "amq.fanout", "")

    assert connection.reached("", "amq.fanout") == ["amq.gen-1"]
    assert relays(broker) == []
    # Nobody else addresses it.
    assert not [each for each in broker.bindings if each.source == connection.topology.to_queues]
