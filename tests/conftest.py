"""Purpose: what tests that need a broker are given. Nothing is started for those that do not.

The broker is the installed RabbitMQ, started for the tests alone, unless the environment says
otherwise. A broker that is missing or does not start is an error, never a skip.

RABBITMQ_ROOT:           a folder with an unpacked Debian, whose RabbitMQ is started instead.
RABBITMQ_URL:            a broker that runs already is used. What would stop or start one is then
                         deselected, and listed with the reason at the end.
RABBITMQ_MANAGEMENT_URL: its management API; see dev/server.py.

With `-n 6`, pytest-xdist runs the tests in six workers side by side. They share one broker, where
each test has a virtual host of its own. See `tests/side_by_side.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from dev.broker import Broker
from dev.server import Server
from dev.shared_broker import SharedBroker, shared_broker
from kombu_binary_delay.testing.plugin import delayed
from tests.conformance.record import Recorder
from tests.side_by_side import line_of, make_scheduler
from tests.spark_classes import java_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dev.server import VHost

__all__ = ["delayed"]  # the fixture of our plugin, for the tests of it

_OWN = "own_broker"
_SHARED, _LEFT_OUT = "shared_broker", "left_out"  # what processes send each other
_left_out = pytest.StashKey[list[str]]()
_shared = pytest.StashKey[SharedBroker]()

os.environ.setdefault("JAVA_TOOL_OPTIONS", java_options())
# How long an example takes, or to draw one, says more about what else runs on the machine.
hypothesis.settings.register_profile(
    "no deadline", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def session_broker(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The one that all tests share."""
    server = Server.from_environment(os.environ)
    if server:
        yield server
    elif is_worker(request.config):
        yield shared_broker(request.config.workerinput[_SHARED])  # type: ignore[attr-defined]
    else:
        with Broker(os.environ.get("RABBITMQ_ROOT")) as broker:
            yield broker


@pytest.fixture(scope="session")
def broker(session_broker: Server) -> Server:
    return session_broker


@pytest.fixture(scope="session")
def authority() -> Any:
    """Make the authority that has signed the certificate of `own_broker`."""
    import trustme  # noqa: PLC0415 - most tests need none

    return trustme.CA()


@pytest.fixture(scope="session")
def certificates(authority: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    issued = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    return folder


@pytest.fixture(scope="session")
def own_broker(certificates: Path) -> Iterator[Broker]:
    """A broker that no test uses at the same time: it may be frozen, killed, and measured.

    It has a port for TLS, too.
    """
    with Broker(os.environ.get("RABBITMQ_ROOT"), tls=certificates) as broker:
        yield broker


@pytest.fixture
def vhost(request: pytest.FixtureRequest) -> Iterator[VHost]:
    """A virtual host on `own_broker`, where a test takes that, or else on `broker`."""
    name = _OWN if _OWN in request.fixturenames else "broker"
    vhost: VHost = request.getfixturevalue(name).vhost()
    yield vhost
    vhost.delete()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-conformance",
        action="store_true",
        help="write what tests/conformance found into docs/reference/conformance",
    )


def pytest_configure(config: pytest.Config) -> None:
    if is_worker(config):
        return
    if config.getoption("--record-conformance"):
        config.pluginmanager.register(Recorder())
    if config.getoption("numprocesses", None):
        config.stash[_shared] = SharedBroker(os.environ.get("RABBITMQ_ROOT"))


def pytest_unconfigure(config: pytest.Config) -> None:
    if shared := config.stash.get(_shared, None):
        shared.close()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a new worker of pytest-xdist the broker's address."""
    node.workerinput[_SHARED] = node.config.stash[_shared].address


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over what a worker has left out: all leave out the same."""
    if not error:
        node.config.stash[_left_out] = node.workeroutput.get(_LEFT_OUT, [])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return make_scheduler(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("RABBITMQ_URL"):
        leave_out(config, items)
    if is_worker(config):
        items.sort(key=lambda item: line_of(item.nodeid))


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if needs_own(item)]
    if not left_out:
        return
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not needs_own(item)]
    config.stash[_left_out] = [item.nodeid for item in left_out]
    if is_worker(config):
        config.workeroutput[_LEFT_OUT] = config.stash[_left_out]  # type: ignore[attr-defined]


def needs_own(item: pytest.Item) -> bool:
    """Return whether a test starts or stops a broker: it is marked so, or takes `own_broker`."""
    return bool(item.get_closest_marker(_OWN)) or _OWN in getattr(item, "fixturenames", ())


def is_worker(config: pytest.Config) -> bool:
    """Return whether this process is a worker of pytest-xdist."""
    return hasattr(config, "workerinput")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if left_out := config.stash.get(_left_out, []):
        terminalreporter.section("deselected, since RABBITMQ_URL is set")
        terminalreporter.line("These start, stop or kill a broker, which is not ours to do there:")
        for nodeid in left_out:
            terminalreporter.line(nodeid)
