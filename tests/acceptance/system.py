"""What a test sees of a deployment: the app as its publisher has it, a journal, and the broker."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kombu_binary_delay import Settings
from tests.acceptance.journal import Journal, wait_until
from tests.waits import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        self.topology = Settings(**deployment.ladder).topology()
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

    # -- tasks that wait for the test ------------------------------------------------------------

    @contextmanager
    def held(self, worker: str) -> Iterator[None]:
        """Let a worker take no task within, and then only after all that was amended until then.

        So a test need not be faster than the countdown of what it amends, on a busy machine. No
        other worker may consume the same queues.

        :param worker: its name.
        """
        self.hold(worker)
        yield
        self.release(worker)

    def hold(self, worker: str) -> None:
        """Have a worker take no more tasks, and wait until it does not."""
        for queue in self._task_queues:
            self.app.control.cancel_consumer(queue, **_answered_by(worker))
        wait_until(lambda: not self._consumers(), "the end of all consuming")

    def release(self, worker: str) -> None:
        """Have a worker read all amendments that are confirmed by now, and then take tasks."""
        given = {"queues": self._task_queues}
        answers = self.app.control.broadcast(
            "read_and_consume", arguments=given, **_answered_by(worker)
        )
        assert "ok" in answers[0][worker], answers

    def fill_revoked(self, worker: str) -> None:
        """Have a worker's set of revoked ids drop at once what Celery adds to it."""
        answers = self.app.control.broadcast("fill_revoked", **_answered_by(worker))
        assert "ok" in answers[0][worker], answers

    def hears_of(self, worker: str, *task_ids: str) -> None:
        """Wait until a worker has heard that these tasks are revoked."""

        def missing() -> set[str]:
            inspect = self.app.control.inspect([worker], timeout=PATIENCE)
            return {*task_ids} - {*(inspect.revoked() or {}).get(worker, ())}

        wait_until(lambda: not missing(), lambda: f"revokes of {missing()}")

    @property
    def _task_queues(self) -> list[str]:
        return [queue.name for queue in self.app.conf.task_queues or ()] or ["celery"]

    def _consumers(self) -> int:
        with self.vhost.connect() as connection:
            channel = connection.channel()
            declare = channel.queue_declare
            return sum(
                declare(task_queue, passive=True).consumer_count for task_queue in self._task_queues
            )

    # -- the broker ------------------------------------------------------------------------------

    def wait_until_idle(self) -> None:
        """Wait until nothing waits any more, and all that was due has been taken.

        A task that is sent afterwards runs: had others more runs, these would be over.
        """
        wait_until(lambda: self.waiting() == 0, "an empty ladder")
        self.journal.wait_for(self.send_note(countdown=0.5))

    def wait_for_waiting(self, count: int) -> None:
        """Wait until so many messages wait on the ladder: a busy queue says that it has none."""
        wait_until(lambda: self.waiting() == count, lambda: f"{count} on the ladder")

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


def _answered_by(worker: str) -> dict[str, Any]:
    return {"destination": [worker], "reply": True, "timeout": PATIENCE}
