"""Purpose: what tests that need a broker are given. Nothing is started for those that do not.

A broker that is missing or does not start is an error, never a skip. RABBITMQ_ROOT names a
folder with an unpacked Debian whose RabbitMQ is to be used instead of the installed one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from lab.broker import Broker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab.broker import VHost


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    with Broker(os.environ.get("RABBITMQ_ROOT")) as broker:
        yield broker


@pytest.fixture
def vhost(broker: Broker) -> Iterator[VHost]:
    vhost = broker.vhost()
    yield vhost
    vhost.delete()
