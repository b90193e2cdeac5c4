from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kombu_binary_delay import Settings
from kombu_binary_delay.model.versions import QUORUM_SINCE
from tests.conformance.broker_world import BrokerWorld
from tests.conformance.record import BROKER, PROPERTY, WALK
from tests.conformance.table import LADDERS
from tests.conformance.walk_world import WalkWorld

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conformance.record import Column
    from tests.conformance.table import Case
    from tests.conformance.world import World


@pytest.fixture
def world(
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
    column: Column,
    case: Case,
) -> Iterator[World]:
    """Give a case its world; the broker is started for those who need it."""
    record_property(PROPERTY, (*column, case.name))
    on, ladder, queue_type = column
    settings = {**LADDERS[ladder], "queue_type": queue_type}
    if on == WALK:
        yield WalkWorld(Settings(**settings))
        return
    broker = request.getfixturevalue("broker")
    version = broker.version
    record_property(BROKER, version)
    if queue_type == "quorum" and broker.release < QUORUM_SINCE:
        pytest.skip(f"does not apply: the quorum queues of RabbitMQ {version} have no message TTL")
    world = BrokerWorld(settings, request.getfixturevalue("vhost"))
    yield world
    world.close()
