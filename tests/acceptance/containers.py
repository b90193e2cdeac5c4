"""The same broker and worker in containers, where a Docker engine answers; pytest-celery's own.

Journal and results are files of a folder that the worker's container sees under the same path, and
the project is mounted: so the tests are the same.
"""

from __future__ import annotations

import gc
import os
import warnings
from typing import TYPE_CHECKING, Any

import celery
import docker
import pytest
from docker.errors import DockerException
from pytest_celery import CeleryTestBroker, CeleryWorkerContainer, RabbitMQContainer
from pytest_docker_tools import container, fxtr, network

from dev.server import Server
from dev.service import START
from tests.acceptance.worker import APP, ROOT, environment_of

if TYPE_CHECKING:
    from dev.processes import Processes
    from dev.server import VHost
    from tests.acceptance.app import Deployment

#: With the management plugin, by which tests make virtual hosts.
RABBITMQ = os.environ.get("RABBITMQ_IMAGE", "rabbitmq:4-management")


def engine_answers() -> bool:
    """Whether there is a Docker engine."""
    with warnings.catch_warnings():
        # Docker's client leaves the socket open on which nobody answered.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            client = docker.from_env()
            try:
                return bool(client.ping())
            finally:
                client.close()
        except DockerException:
            return False
        finally:
            gc.collect()


class ContainerBroker(CeleryTestBroker):
    """A virtual host on the RabbitMQ of a container."""

    def __init__(self, rabbitmq: RabbitMQContainer) -> None:
        super().__init__(rabbitmq)
        host, port = rabbitmq.get_addr("15672/tcp")
        at = f"amqp://guest:guest@localhost:{rabbitmq.port}"
        self.vhost: VHost = Server(at, f"http://{host}:{port}").vhost()

    def config(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return the settings of an app that uses it."""
        config: dict[str, Any] = super().config(vhost=self.vhost.name)
        return config

    def teardown(self) -> None:
        """Delete the virtual host; the container goes by itself."""
        self.vhost.delete()


@pytest.fixture(scope="session")
def default_worker_celery_version() -> str:
    """Build pytest-celery's worker image with the Celery that is tested."""
    return str(celery.__version__)


@pytest.fixture(scope="module")
def worker_command(worker_options: list[str]) -> list[str]:
    name = f"{CeleryWorkerContainer.worker_name()}@%h"
    return ["celery", "-A", APP, "worker", "-n", name, "-l", "INFO", *worker_options]


@pytest.fixture(scope="module")
def worker_environment(worker_deployment: Deployment) -> dict[str, str]:
    return environment_of(worker_deployment)


@pytest.fixture(scope="module")
def worker_volumes(processes: Processes) -> dict[str, dict[str, str]]:
    project, folder = str(ROOT), str(processes.folder)
    return {
        project: {"bind": project, "mode": "ro"},
        folder: {"bind": folder, "mode": "rw"},
    }


acceptance_network = network(scope="module")

rabbitmq_container = container(
    scope="module",
    image=RABBITMQ,
    ports={"5672/tcp": None, "15672/tcp": None},
    network="{acceptance_network.name}",
    wrapper_class=RabbitMQContainer,
    timeout=START,
)

worker_container = container(
    scope="module",
    image="{celery_base_worker_image.id}",
    command=fxtr("worker_command"),
    environment=fxtr("worker_environment"),
    volumes=fxtr("worker_volumes"),
    # What it writes is ours to read, and to remove.
    user=f"{os.getuid()}:{os.getgid()}",
    network="{acceptance_network.name}",
    wrapper_class=CeleryWorkerContainer,
    timeout=START,
)
