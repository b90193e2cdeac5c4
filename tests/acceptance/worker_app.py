"""What `celery -A` takes: the app of the deployment that the environment names."""

from __future__ import annotations

from typing import Any

from celery.worker.control import control_command

from kombu_binary_delay.mechanism import mechanism_of
from tests.acceptance.app import Deployment, keep_journal_of_messages, make_app

_deployment = Deployment.from_environment()
keep_journal_of_messages(_deployment)
app = make_app(_deployment)


@control_command()
def read_and_consume(state: Any, queues: list[str]) -> dict[str, str]:
    """Consume queues, having read all amendments that are confirmed by now."""
    consumer = state.consumer

    def begin() -> None:
        mechanism = mechanism_of(consumer.connection.connection)
        if mechanism is not None:
            # It reads up to a marker that it appends itself.
            mechanism.amendments.lag()
        for queue in queues:
            consumer.add_task_queue(queue)

    # Not in the greenlet that some pools have for remote control.
    consumer.call_soon(begin)
    return {"ok": f"about to consume {queues}"}
