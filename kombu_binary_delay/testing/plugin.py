"""The pytest plugin: the fixture ``delayed``. Pytest loads it by its entry point."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch to a real broker."""
    parser.addoption(
        "--delayed-broker",
        action="store_true",
        help="run tests of delayed tasks on the broker of the app's own URL, in real time",
    )


@pytest.fixture
def delayed(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield a :class:`kombu_binary_delay.testing.Delayed`: a broker in memory, and virtual time.

    With ``--delayed-broker``, a :class:`kombu_binary_delay.testing.DelayedOnBroker`.
    """
    from . import Delayed, DelayedOnBroker  # noqa: PLC0415 - only tests that use it pay for it

    is_real = request.config.getoption("--delayed-broker", default=False)
    with DelayedOnBroker() if is_real else Delayed() as kit:
        yield kit
