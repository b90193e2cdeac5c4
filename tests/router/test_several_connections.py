"""What one connection makes, and another one that knows more, or less, relies on."""

from __future__ import annotations

import pytest

from tests.router.test_router import Connection
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
