"""A deployment that a test makes itself, of processes, with workers started when it likes.

A test that needs no more than a broker and a worker from the beginning takes `celery_setup`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.acceptance.app import OURS, Deployment, make_app
from tests.acceptance.system import System
from tests.acceptance.worker import Beat, Worker

if TYPE_CHECKING:
    from dev.processes import Processes
    from dev.server import VHost


class LocalSystem(System):
    def __init__(
        self,
        vhost: VHost,
        processes: Processes,
        shape: str = "small",
        transport: str | None = OURS,
        url: str = "amqp://{broker}",
    ) -> None:
        """Make the app; no worker runs yet.

        :param url: the app's broker, with ``{broker}`` for what follows the scheme, or ``{place}``
            for what follows the user.
        """
        broker = vhost.url.removeprefix("amqp://")
        url = url.format(broker=broker, place=broker.rpartition("@")[2])
        deployment = Deployment.within(processes.folder, url, shape, transport)
        super().__init__(vhost, deployment, make_app(deployment))
        self._processes = processes
        self._workers: list[Worker] = []

    def worker(
        self,
        *options: str,
        stock: bool = False,
        mingle: bool = False,
        deployment: Deployment | None = None,
    ) -> Worker:
        """Start a worker, and wait until it is ready.

        :param stock: without our transport.
        :param mingle: look for other workers first, for a second, as is the default of Celery.
        :param deployment: in place of the system's own, as another user.
        """
        options = options if mingle else ("--without-mingle", *options)
        deployment = deployment or self.deployment
        if stock:
            deployment = replace(deployment, transport=None)
        self._workers.append(Worker(self._processes, deployment, *options))
        return self._workers[-1]

    def beat(self) -> Beat:
        """Start beat, and wait until it is ready."""
        return Beat(self._processes, self.deployment)

    def begin_to_close(self) -> None:
        """Ask its workers to stop, and do not wait."""
        for worker in self._workers:
            worker.begin_to_stop()

    def close(self) -> list[str]:
        """Stop its workers; return the logs of those that were not well to the end."""
        alive = [worker for worker in self._workers if worker.alive]
        for worker in alive:
            worker.stop()
        self.app.pool.force_close_all()
        self.app.close()
        return [worker.log() for worker in alive if worker.complaints()]
