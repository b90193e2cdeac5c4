"""What `celery -A` takes: the app of the deployment that the environment names."""

from __future__ import annotations

import time
from typing import Any

from celery.worker.control import control_command
from celery.worker.state import REVOKES_MAX, revoked

from kombu_binary_delay.wire.mechanism import mechanism_of
from tests.acceptance.app import Deployment, keep_journal_of_messages, make_app

_deployment = Deployment.from_environment()
keep_journal_of_messages(_deployment)
app = make_app(_deployment)


@control_command()
def fill_revoked(_: Any) -> dict[str, str]:
    """Fill Celery's set of revoked ids with stamps of a host that has been up for longer.

    Before Celery 5.7, workers give each other such sets. This one drops what is added later.
    """
    for number in range(REVOKES_MAX + 1):
        revoked.add(f"other-{number}", time.monotonic() + 10_000_000 + number)
    revoked.add("new")
    return {"ok": "full"} if "new" not in revoked else {"error": "not full"}


@control_command()
def read_and_consume(state: Any, queues: list[str]) -> dict[str, str]:
    """Consume queues, having read all amendments that are confirmed by now."""
    consumer = state.consumer

    def begin() -> None:
        mechanism = mechanism_of(consumer.connection.connection)
        if mechanism is not None:
            # It reads up to a marker that it appends itself.
            mechanism.amendments.reader.refresh()
        for queue in queues:
            consumer.add_task_queue(queue)

    # Not in the greenlet that some pools have for remote control.
    consumer.call_soon(begin)
    return {"ok": f"about to consume {queues}"}
