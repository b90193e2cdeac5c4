"""Celery's loop for green pools does not wait after each message, on our connections."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery.bootsteps import CLOSE, RUN
from celery.worker import loops
from kombu import Connection

MESSAGES = 100


class Silent(Connection):
    """The connection of a worker's own events, to which the broker sends nothing."""

    def __init__(self, transport: str) -> None:
        super().__init__(transport=transport)
        self.waits: list[float] = []
        self.transport  # noqa: B018 - it is made, as a worker's is before its loop begins

    def get_heartbeat_interval(self) -> int:
        return 0

    def drain_events(self, timeout: float) -> None:
        self.waits.append(timeout)
        raise TimeoutError


@pytest.mark.parametrize(
    ("transport", "longest"), [("kombu_binary_delay:Transport", 0.001), ("amqp", 0.1)]
)
def test_a_green_worker_reads_its_heartbeats_after_each_message_without_waiting(transport, longest):
    events, blueprint = Silent(transport), SimpleNamespace(state=RUN)
    left = iter(range(MESSAGES))

    def handle_one(timeout):
        if next(left, None) is None:
            blueprint.state = CLOSE

    consuming = SimpleNamespace(drain_events=handle_one, get_heartbeat_interval=lambda: 0)
    worker = SimpleNamespace(
        pool=SimpleNamespace(is_green=True),
        event_dispatcher=SimpleNamespace(connection=events),
        connection=consuming,
        timer=None,
        amqheartbeat=60,
        create_task_handler=lambda: None,
        perform_pending_operations=lambda: None,
        on_ready=lambda: None,
    )
    consumer, qos = SimpleNamespace(consume=lambda: None), SimpleNamespace(prev=1, value=1)

    loops.synloop(worker, consuming, consumer, blueprint, None, qos, None, None)

    # Celery reads them there since 5.7.
    assert events.waits in ([], [longest] * (MESSAGES + 1))
