"""The pytest plugin: the fixture ``delayed``. Pytest loads it by its entry point."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def delayed() -> Iterator[Any]:
    """Yield a :class:`kombu_binary_delay.testing.Delayed`: a broker in memory, and virtual time."""
    from . import Delayed  # noqa: PLC0415 - only tests that use it pay for it

    with Delayed() as kit:
        yield kit
