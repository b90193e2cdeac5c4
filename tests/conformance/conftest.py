from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from docs.generate.conformance import WALK
from kombu_binary_delay.testing import Delayed
from tests.conformance.real import RealProgram
from tests.conformance.record import BROKER, PROPERTY
from tests.conformance.simulated import SimulatedProgram
from tests.conformance.table import LADDERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conformance.program import Program
    from tests.conformance.record import Column
    from tests.conformance.table import Case


@pytest.fixture
def program(
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
    column: Column,
    case: Case,
) -> Iterator[Program]:
    """Give a case its program; the broker is started for those who need it."""
    record_property(PROPERTY, (*column, case.name))
    on, ladder, queue_type = column
    settings = {**LADDERS[ladder], "queue_type": queue_type}
    if on == WALK:
        with Delayed() as delayed:
            simulated = SimulatedProgram(settings, delayed)
            yield simulated
            simulated.close()
        return
    # Where a fixture asks for `own_broker`, `vhost` is one of that.
    broker = request.getfixturevalue("own_broker" if case.restarts else "broker")
    version = broker.version
    record_property(BROKER, version)
    program = RealProgram(settings, request.getfixturevalue("vhost"))
    yield program
    program.close()
