"""For how long a consumer publishes nothing after an alarm of its broker."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace

import pytest
from amqp.exceptions import RecoverableConnectionError

from kombu_binary_delay.wire import alarms


@pytest.mark.parametrize(
    ("blocked_at", "rest"),
    [
        pytest.param([0], 300, id="once"),
        pytest.param([0, 1, 2], 298, id="another connection, in the same pause"),
        pytest.param([0, 301], 600, id="the alarm has gone on"),
        pytest.param([0, 301, 902, 2103, 3304], 1200, id="for long"),
        pytest.param([0, 301, 1600], 300, id="another alarm"),
    ],
)
def test_it_pauses_longer_while_an_alarm_goes_on(monkeypatch, blocked_at, rest):
    connection = SimpleNamespace(host="broker", end=lambda _: None)
    monkeypatch.setattr(alarms, "_blocked", {})

    for at in blocked_at:
        monkeypatch.setattr(time, "monotonic", partial(float, at))
        with pytest.raises(RecoverableConnectionError):
            alarms.end(connection)

    assert alarms.rest(connection) == rest
