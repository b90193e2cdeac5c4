"""The app under test: as anybody's, but that its tasks keep a journal.

Both sides make it from one `Deployment`: the test, which publishes, and the worker (see
worker_app.py), which reads it from its environment.
"""

from __future__ import annotations

import json
import os
import runpy
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from celery import Celery, Task, signals
from kombu import Exchange, Queue
from kombu.common import Broadcast

from kombu_binary_delay import register
from tests.acceptance.journal import (
    RAN,
    RECEIVED,
    REVOKED,
    Entry,
    Journal,
    wait_until,
)
from tests.waits import PATIENCE

OURS = "kombu_binary_delay:Transport"
VARIABLE = "ACCEPTANCE_DEPLOYMENT"

#: Longer than any test takes, in seconds.
AT_MOST = 600.0

_media = Exchange("media", "topic")

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def settings_of(module: Path) -> dict[str, Any]:
    """Read the settings in a module, but those that say which broker it is."""
    names = runpy.run_path(str(module))
    left_out = {"broker_url", "broker_transport", "os"}
    return {
        name: value
        for name, value in names.items()
        if name not in left_out and not name.startswith("__")
    }


#: What users set, apart from the transport; see `DEFAULT_LADDER` for their ladders.
SHAPES: dict[str, dict[str, Any]] = {
    "stock": {},
    "small": {},
    "any key": {"task_queues": [Queue("celery"), Queue("all media", _media, "#")]},
    "beat": {
        "beat_schedule": {
            "every second": {
                "task": "note",
                "schedule": 1.0,
                "args": ["from beat"],
                "options": {"countdown": 0.5},
            }
        }
    },
    "broadcast": {
        "task_queues": [Queue("celery"), Broadcast("everyone")],
        "task_routes": {"note_everywhere": {"queue": "everyone", "exchange": "everyone"}},
    },
    # A task is acknowledged when it is done: what a killed worker held is given to another.
    # And a publish returns when the broker has confirmed it.
    "careful": {
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "broker_transport_options": {"confirm_publish": True},
    },
    "exchanges": {
        "task_queues": [
            Queue("celery"),
            Queue("images", _media, "image.*"),
            Queue("pngs", _media, "#.png"),
            Queue("png", _media, "png"),
            Queue("left", Exchange("left", "direct"), "same"),
            Queue("right", Exchange("right", "direct"), "same"),
        ]
    },
    "fan out": {
        "task_queues": [
            Queue("celery"),
            Queue("images", _media, "image.*"),
            Queue("pngs", _media, "#.png"),
            Queue("here", Exchange("everywhere", "fanout")),
            Queue("there", Exchange("everywhere", "fanout")),
        ]
    },
    "no amendments": {"broker_transport_options": {"binary_delay": {"amendments": False}}},
    "production": settings_of(EXAMPLES / "production.py"),
    "priority": {"task_queue_max_priority": 10, "worker_prefetch_multiplier": 1},
    "quorum on a direct exchange": {
        "task_default_queue_type": "quorum",
        "broker_transport_options": {"confirm_publish": True},
    },
    "quorum on a topic exchange": {
        "task_default_queue_type": "quorum",
        "task_default_exchange_type": "topic",
        "broker_transport_options": {"confirm_publish": True},
    },
}


#: The shapes with the default ladder; all others have the one with the fewest queues.
DEFAULT_LADDER = {"stock", "production"}


@dataclass(frozen=True)
class Deployment:
    """One installation of the app."""

    url: str
    journal: str
    results: str
    shape: str = "small"
    transport: str | None = OURS

    @classmethod
    def within(
        cls, folder: Path, url: str, shape: str = "small", transport: str | None = OURS
    ) -> Deployment:
        """Deploy with results and journal in places of their own in a folder."""
        results = folder / f"results-{uuid.uuid4().hex}"
        results.mkdir()
        return cls(url, f"{results}.journal", str(results), shape, transport)

    @property
    def ladder(self) -> dict[str, Any]:
        """The transport's settings of its ladder."""
        return {} if self.shape in DEFAULT_LADDER else {"radix": 2}

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Deployment:
        return cls(**json.loads(os.environ[VARIABLE]))


class StumbleError(Exception):
    """What a task that does better the next time raises."""


def make_app(deployment: Deployment) -> Celery:
    app = Celery("acceptance", set_as_current=False)
    if deployment.url.startswith("binary-delay"):
        register()
    app.conf.broker_url = deployment.url
    app.conf.result_backend = f"file://{deployment.results}"
    app.conf.result_chord_retry_interval = 0.5
    app.conf.broker_connection_retry_on_startup = True
    # A machine that is busy with other tests may take longer than Celery waits for an answer, and
    # for the reader of an event or of a reply.
    app.conf.broker_connection_timeout = PATIENCE
    app.conf.event_queue_ttl = app.conf.event_queue_expires = AT_MOST
    app.conf.control_queue_expires = AT_MOST
    app.conf.update(SHAPES[deployment.shape])
    if deployment.ladder:
        options = app.conf.broker_transport_options
        settings = {**deployment.ladder, **options.get("binary_delay", {})}
        app.conf.broker_transport_options = {**options, "binary_delay": settings}
    if deployment.transport:
        app.conf.broker_transport = deployment.transport  # the one line
    journal = Journal(Path(deployment.journal))
    _add_tasks(app, journal)
    _add_tasks_that_retry(app, journal)
    return app


def keep_journal_of_messages(deployment: Deployment) -> None:
    journal = Journal(Path(deployment.journal))

    def received(request: Any, **_: object) -> None:
        message = request.message
        journal.write(
            _entry(
                RECEIVED,
                request.name,
                request.request_dict,
                message.headers,
                message.properties.get("expiration"),
            )
        )

    def revoked(sender: Any, request: Any, **_: object) -> None:
        journal.write(_entry(REVOKED, sender.name, vars(request)))

    signals.task_received.connect(received, weak=False)
    signals.task_revoked.connect(revoked, weak=False)


def _add_tasks(app: Celery, journal: Journal) -> None:
    def write(task: Any) -> None:
        journal.write(_entry(RAN, task.name, vars(task.request)))

    @app.task(name="note", shared=False, bind=True)
    def note(self: Any, *args: object) -> object:
        write(self)
        return args[-1] if args else None

    @app.task(name="note_everywhere", shared=False, bind=True)
    def note_everywhere(self: Any) -> None:
        write(self)

    @app.task(name="add_up", shared=False, bind=True)
    def add_up(self: Any, numbers: list[int]) -> int:
        write(self)
        return sum(numbers)

    # Acknowledged late, so that with a prefetch of one the worker holds nothing else meanwhile.
    @app.task(name="hold", shared=False, bind=True, acks_late=True)
    def hold(self: Any, signal: str) -> None:
        write(self)
        wait_until(Path(signal).exists, f"the file {signal}", AT_MOST)

    @app.task(name="delegate", shared=False, bind=True)
    def delegate(self: Any, countdown: float) -> str:
        write(self)
        return str(note.apply_async(("delegated",), countdown=countdown).id)

    class Batched(Task):
        """As those of celery-batches, whose workers do not ask whether a task is revoked."""

        def Strategy(self, _: Task, __: Celery, consumer: Any) -> Any:  # noqa: N802 - Celery's
            def receive(message: Any, *_: Any, **__: Any) -> None:
                message.ack()
                about = {"delivery_info": message.delivery_info, "hostname": consumer.hostname}
                journal.write(_entry(RAN, self.name, {**message.headers, **about}))

            return receive

    @app.task(name="batched", shared=False, base=Batched)
    def batched() -> None:
        """Do nothing more."""


def _add_tasks_that_retry(app: Celery, journal: Journal) -> None:
    def write(task: Any) -> None:
        journal.write(_entry(RAN, task.name, vars(task.request)))

    @app.task(name="retry", shared=False, bind=True, max_retries=None)
    def retry(self: Any, times: int, countdown: float, headers: Any = None) -> int:
        write(self)
        if self.request.retries < times:
            raise self.retry(countdown=countdown, **({"headers": headers} if headers else {}))
        return int(self.request.retries)

    # As "retry", once, when there is a file.
    @app.task(name="retry_on", shared=False, bind=True, acks_late=True)
    def retry_on(self: Any, signal: str, countdown: float, headers: Any = None) -> None:
        write(self)
        if not self.request.retries:
            wait_until(Path(signal).exists, f"the file {signal}", AT_MOST)
            raise self.retry(countdown=countdown, **({"headers": headers} if headers else {}))

    @app.task(
        name="stumble",
        shared=False,
        bind=True,
        autoretry_for=(StumbleError,),
        retry_kwargs={"countdown": 0.5, "max_retries": 3},
    )
    def stumble(self: Any, times: int) -> int:
        write(self)
        if self.request.retries < times:
            raise StumbleError
        return int(self.request.retries)


def _entry(
    event: str,
    task: str,
    request: Mapping[str, Any],
    headers: Mapping[str, Any] | None = None,
    expiration: str | None = None,
) -> Entry:
    info = request["delivery_info"]
    headers = headers or {}
    return Entry(
        event=event,
        task=task,
        id=request["id"],
        at=time.time(),
        worker=request["hostname"],
        args=list(request.get("args") or ()),
        eta=request.get("eta"),
        retries=request.get("retries") or 0,
        exchange=info["exchange"],
        routing_key=info["routing_key"],
        priority=info.get("priority"),
        header_names=sorted(headers),
        header_bytes=len(json.dumps(dict(headers), default=str)),
        expiration=expiration,
    )
