"""What a test sees of a deployment: the app as its publisher has it, a journal, and the broker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kombu_binary_delay import Settings
from kombu_binary_delay.model.versions import QUORUM_SINCE
from tests.acceptance.journal import Journal

if TYPE_CHECKING:
    from celery import Celery
    from celery.canvas import Signature
    from celery.result import AsyncResult

    from dev.server import VHost
    from tests.acceptance.app import Deployment


class System:
    """One deployment in one virtual host.

    :param app: made from the deployment.
    """

    def __init__(self, vhost: VHost, deployment: Deployment, app: Celery) -> None:
        self.vhost = vhost
        self.deployment = deployment
        self.topology = Settings().topology(can_quorum=vhost.broker.release >= QUORUM_SINCE)
        self.levels = [queue.name for level in self.topology.levels for queue in level.queues]
        self.journal = Journal(Path(deployment.journal))
        self._app = app

    @property
    def app(self) -> Celery:
        """The publisher's."""
        return self._app

    def task(self, name: str, *args: object) -> Signature:
        return self.app.tasks[name].s(*args)

    def send(self, name: str, *args: object, **options: Any) -> AsyncResult:
        return self.app.tasks[name].apply_async(args, **options)

    def send_note(self, *args: object, **options: Any) -> str:
        return str(self.send("note", *args, **options).id)

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
