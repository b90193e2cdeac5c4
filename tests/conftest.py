"""Purpose: what tests that need a broker are given. Nothing is started for those that do not.

The broker is the installed RabbitMQ, started for the tests alone, unless the environment says
otherwise. A broker that is missing or does not start is an error, never a skip.

RABBITMQ_ROOT:           a folder with an unpacked Debian, whose RabbitMQ is started instead.
RABBITMQ_URL:            a broker that runs already is used. What would stop or start one is then
                         deselected, and listed with the reason at the end.
RABBITMQ_MANAGEMENT_URL: its management API; see dev/server.py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from dev.broker import Broker
from dev.server import Server
from tests.conformance.record import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dev.server import VHost

_OWN = "own_broker"
_left_out = pytest.StashKey[list[pytest.Item]]()


@pytest.fixture(scope="session")
def broker() -> Iterator[Server]:
    server = Server.from_environment(os.environ)
    if server:
        yield server
        return
    with Broker(os.environ.get("RABBITMQ_ROOT")) as broker:
        yield broker


@pytest.fixture
def vhost(broker: Server) -> Iterator[VHost]:
    vhost = broker.vhost()
    yield vhost
    vhost.delete()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-conformance",
        action="store_true",
        help="write what tests/conformance found into docs/reference/conformance",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-conformance"):
        config.pluginmanager.register(Recorder())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get("RABBITMQ_URL"):
        return
    config.stash[_left_out] = [item for item in items if item.get_closest_marker(_OWN)]
    if config.stash[_left_out]:
        config.hook.pytest_deselected(items=config.stash[_left_out])
        items[:] = [item for item in items if not item.get_closest_marker(_OWN)]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if left_out := config.stash.get(_left_out, []):
        terminalreporter.section("deselected, since RABBITMQ_URL is set")
        terminalreporter.line("These start, stop or kill a broker, which is not ours to do there:")
        for item in left_out:
            terminalreporter.line(item.nodeid)
