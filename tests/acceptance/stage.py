"""Where a test plays: a virtual host, the app as its publisher sees it, a journal, and workers."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kombu_binary_delay import Topology
from tests.acceptance.app import OURS, Deployment, make_app
from tests.acceptance.journal import Journal
from tests.acceptance.worker import Beat, Worker

if TYPE_CHECKING:
    from celery.canvas import Signature
    from celery.result import AsyncResult

    from lab.keeper import Keeper
    from lab.server import Server, VHost

#: The first RabbitMQ whose quorum queues have a message TTL.
QUORUM_SINCE = (3, 10)


def topology_on(broker: Server) -> Topology:
    version = tuple(int(number) for number in broker.version.split(".")[:2])
    return Topology(queue_type="quorum" if version >= QUORUM_SINCE else "classic")


class Stage:
    def __init__(
        self,
        vhost: VHost,
        keeper: Keeper,
        shape: str = "stock",
        transport: str | None = OURS,
        url: str = "amqp://{broker}",
    ) -> None:
        """Set a stage.

        :param url: the app's broker, with ``{broker}`` for what follows the scheme.
        """
        self.vhost = vhost
        self.topology = topology_on(vhost.broker)
        self.levels = [queue.name for level in self.topology.levels for queue in level.queues]
        self._keeper = keeper
        self._workers: list[Worker] = []
        results = keeper.folder / f"results-{uuid.uuid4().hex}"
        results.mkdir()
        self.journal = Journal(results.with_suffix(".journal"))
        self.deployment = Deployment(
            url.format(broker=vhost.url.removeprefix("amqp://")),
            str(self.journal.path),
            str(results),
            shape,
            transport,
        )
        self.app = make_app(self.deployment)

    def task(self, name: str, *args: object) -> Signature:
        return self.app.tasks[name].s(*args)

    def send(self, name: str, *args: object, **options: Any) -> AsyncResult:
        return self.app.tasks[name].apply_async(args, **options)

    def send_note(self, *args: object, **options: Any) -> str:
        return str(self.send("note", *args, **options).id)

    def worker(self, *options: str, stock: bool = False, mingle: bool = False) -> Worker:
        """Start a worker, and wait until it is ready.

        :param stock: without our transport.
        :param mingle: look for other workers first, for a second, as is the default of Celery.
        """
        options = options if mingle else ("--without-mingle", *options)
        deployment = replace(self.deployment, transport=None) if stock else self.deployment
        self._workers.append(Worker(self._keeper, deployment, *options))
        return self._workers[-1]

    def beat(self) -> Beat:
        """Start beat, and wait until it is ready."""
        return Beat(self._keeper, self.deployment)

    def waiting(self) -> int:
        """Count the messages that wait on the ladder, now."""
        return sum(self.vhost.waiting(*self.levels).values())

    def parked(self) -> int:
        """Count the messages that found no destination."""
        return self.vhost.waiting(self.topology.parking).get(self.topology.parking, 0)

    def exchanges(self) -> set[str]:
        return {row["name"] for row in self.vhost.exchanges()}

    def queues(self) -> set[str]:
        return {row["name"] for row in self.vhost.queues()}

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
