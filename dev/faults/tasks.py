"""Purpose: a Celery application whose worker keeps a book; `celery -A dev.faults.tasks worker`."""

from __future__ import annotations

import os
import random
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from celery import Celery, signals

from dev.faults.ledger import CONFIRMED, DELIVERED, DONE, DROPPED, SENT, Book
from dev.faults.programs import RETRY, TRANSPORT

QUEUE = "tasks"

app = Celery("faults", set_as_current=False)
app.conf.update(
    broker_url=os.environ.get("FAULTS_BROKER"),
    broker_transport=TRANSPORT,
    broker_transport_options={"confirm_publish": True},
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    task_default_queue=QUEUE,
    task_default_queue_type="quorum",
    worker_cancel_long_running_tasks_on_connection_loss=True,
)
_book = Book(Path(os.environ.get("FAULTS_BOOK", os.devnull)))


@app.task(name="arrive", bind=True)
def arrive(self: Any) -> None:
    """Take a moment, and write down that it is done."""
    time.sleep(0.02)
    _book.write(DONE, self.request.id, queue=QUEUE)


@signals.task_received.connect
def received(request: Any, **_: object) -> None:
    """Write down when a message came from the broker; Celery itself would hold an early one."""
    info = request.delivery_info
    _book.write(
        DELIVERED,
        request.id,
        queue=QUEUE,
        exchange=info["exchange"],
        routing_key=info["routing_key"],
        redelivered=info["redelivered"],
        body=request.id,
    )


@signals.task_revoked.connect
def revoked(request: Any, **_: object) -> None:
    """Write down that the worker discarded it."""
    _book.write(DROPPED, request.id, queue=QUEUE)


def send(urls: list[str], book: Book, numbers: range, rate: float, longest: float) -> None:
    """Send tasks of these numbers, and keep a publisher's book."""
    draw = random.Random(1)  # noqa: S311 - the same delays each time
    with app.connection_for_write(urls) as connection:
        for number in numbers:
            name = f"task-{number}"
            # As many digits as a float keeps.
            due = round((time.time() + draw.uniform(0.3, longest)) * 1e6) / 1e6
            book.write(SENT, name, due=due, exchange="", routing_key=QUEUE, queues=[QUEUE])
            app.send_task(
                "arrive",
                task_id=name,
                eta=datetime.fromtimestamp(due, UTC),
                connection=connection,
                retry=True,
                retry_policy=RETRY,
            )
            book.write(CONFIRMED, name)
            time.sleep(1 / rate)
