"""A warning is in the log once for each outage, and not once for each message."""

from __future__ import annotations

import logging

from kombu_binary_delay.wire.repeating import Warnings


def test_a_warning_is_logged_again_after_an_hour_and_no_sooner(caplog, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    warnings = Warnings(logging.getLogger("ladder"))
    for seconds in (0, 1, 3599, 1, 3600):
        clock[0] += seconds
        warnings.warn("the broker is away, 100%")
    warnings.warn("something else")
    assert caplog.messages == ["the broker is away, 100%"] * 2 + ["something else"]
