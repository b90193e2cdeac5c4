"""How commands are run one after the other; what they do on a broker is tested there."""

from __future__ import annotations

import pytest

from kombu_binary_delay.commands import Warn
from kombu_binary_delay.executor import Executor


def test_an_error_of_a_callback_is_not_taken_for_the_end_of_the_commands(monkeypatch):
    """Frames that waited are dispatched after a command: a callback may raise anything."""

    def callback(*_):
        raise StopIteration

    monkeypatch.setattr("kombu_binary_delay.executor.logger.warning", callback)

    def steps():
        yield Warn("first")

    with pytest.raises(StopIteration):
        Executor(object(), "kbd").run(steps())
