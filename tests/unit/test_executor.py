"""How commands are run one after the other; what they do on a broker is tested there."""

from __future__ import annotations

import pytest
from amqp.exceptions import AccessRefused, PreconditionFailed

from kombu_binary_delay import Topology, TopologyError
from kombu_binary_delay.commands import Warn
from kombu_binary_delay.executor import Executor
from kombu_binary_delay.model.foreign import FOREIGN_LADDERS


def test_an_error_of_a_callback_is_not_taken_for_the_end_of_the_commands(monkeypatch):
    """Frames that waited are dispatched after a command: a callback may raise anything."""

    def callback(*_):
        raise StopIteration

    monkeypatch.setattr("kombu_binary_delay.executor.logger.warning", callback)

    def steps():
        yield Warn("first")

    with pytest.raises(StopIteration):
        Executor(object(), Topology()).run(steps())


@pytest.mark.parametrize(
    ("topology", "names", "remedy"),
    [
        (Topology(namespace="shop"), "'shop.'", "set another namespace"),
        (FOREIGN_LADDERS["nservicebus"], "'nsb.v2.delay-'", "leave out the setting foreign_ladder"),
        (FOREIGN_LADDERS["celery"], "'celery_delayed_'", "leave out the setting foreign_ladder"),
    ],
)
def test_a_refusal_names_the_names_and_the_remedy_of_its_ladder(topology, names, remedy):
    def refused(error):
        explained = Executor(object(), topology)._explained  # noqa: SLF001
        with pytest.raises(TopologyError) as raised, explained("a level", ""):
            raise error
        return str(raised.value)

    assert f"begin with {names}" in refused(AccessRefused("ACCESS_REFUSED"))
    assert remedy in refused(PreconditionFailed("inequivalent arg 'x-queue-type'"))
