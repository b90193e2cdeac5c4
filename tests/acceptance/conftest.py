"""Two ways to a deployment: pytest-celery's `celery_setup`, and `new_system` for all else.

`celery_setup` has a broker, a backend and a worker, which are processes of this machine. A module
says what it needs by fixtures of its own: `shape`, `worker_transport`, `worker_options`. The nodes
live as long as the module.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pytest_celery import CeleryTestWorker

from dev.processes import Processes
from dev.pytest_nodes import LocalBackend, LocalBroker, LocalWorker
from tests.acceptance.app import OURS, Deployment, make_app
from tests.acceptance.local_system import LocalSystem
from tests.acceptance.setup import Setup
from tests.acceptance.worker import APP, complaints, environment_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery import Celery

    from dev.server import Server


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes("acceptance") as processes:
        yield processes


# -- celery_setup ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shape() -> str:
    """A key of `SHAPES`."""
    return "small"


@pytest.fixture(scope="module")
def worker_transport() -> str | None:
    return OURS


@pytest.fixture(scope="module")
def worker_options() -> list[str]:
    return ["--pool=threads", "--concurrency=1", "--without-mingle"]


@pytest.fixture(scope="module")
def worker_stays_well() -> bool:
    """Whether its log must hold no error in the end."""
    return True


@pytest.fixture(scope="module")
def celery_broker(broker: Server) -> Iterator[LocalBroker]:
    local = LocalBroker(broker)
    yield local
    local.teardown()


@pytest.fixture(scope="module")
def deployment(celery_broker: Any, processes: Processes, shape: str) -> Deployment:
    """As the publisher has it."""
    return Deployment.within(processes.folder, celery_broker.config()["host_url"], shape)


@pytest.fixture(scope="module")
def worker_deployment(
    deployment: Deployment, celery_broker: Any, worker_transport: str | None
) -> Deployment:
    """As the worker has it."""
    return replace(deployment, url=celery_broker.config()["url"], transport=worker_transport)


@pytest.fixture(scope="module")
def celery_backend(deployment: Deployment) -> LocalBackend:
    """Results are files."""
    return LocalBackend(Path(deployment.results))


@pytest.fixture(scope="module")
def celery_setup_app(deployment: Deployment) -> Iterator[Celery]:
    app = make_app(deployment)
    yield app
    app.pool.force_close_all()
    app.close()


@pytest.fixture(scope="module")
def worker_process(
    processes: Processes, worker_deployment: Deployment, worker_options: list[str]
) -> LocalWorker:
    return LocalWorker(processes, APP, environment_of(worker_deployment), *worker_options)


@pytest.fixture(scope="module")
def celery_worker(
    worker_process: LocalWorker, *, worker_stays_well: bool
) -> Iterator[CeleryTestWorker]:
    yield worker_process
    worker_process.teardown()
    assert not (worker_stays_well and complaints(worker_process.logs())), worker_process.logs()


@pytest.fixture
def celery_setup_cls(celery_broker: Any, deployment: Deployment) -> Callable[..., Setup]:
    return partial(Setup, celery_broker.vhost, deployment)


@pytest.fixture
def system(celery_setup: Setup) -> Setup:
    """The deployment under test: `celery_setup`, or what its module makes with `new_system`."""
    return celery_setup


# -- new_system ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def new_system(broker: Server, processes: Processes) -> Iterator[Callable[..., LocalSystem]]:
    """Make systems, each in a fresh virtual host; end all of them with the module."""
    systems: list[LocalSystem] = []

    def make(*args: Any, **kwargs: Any) -> LocalSystem:
        systems.append(LocalSystem(broker.vhost(), processes, *args, **kwargs))
        return systems[-1]

    yield make
    for system in systems:
        system.begin_to_close()
    unwell = [log for system in systems for log in system.close()]
    for system in systems:
        system.vhost.delete()
    assert not unwell, "\n\n".join(unwell)
