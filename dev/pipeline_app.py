"""Purpose: the Celery application of the pipeline demo, for its worker and for Spark's executors.

Where the environment says so, the process that publishes dies once, in the middle: an executor
that fails.
"""

from __future__ import annotations

import os
import signal
from itertools import count
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import after_task_publish

app = Celery("pipeline", broker=os.environ.get("PIPELINE_BROKER"))
app.conf.broker_transport = "kombu_binary_delay:Transport"
app.conf.broker_transport_options = {
    "confirm_publish": True,
    "binary_delay": {"journal": "stream"},
}
app.conf.task_acks_late = True
app.conf.task_reject_on_worker_lost = True
app.conf.task_ignore_result = True
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_prefetch_multiplier = 50

_published = count()


@app.task
def remind(customer: int) -> int:
    """Pretend to remind a customer."""
    return customer


@app.task
def bill(customer: int) -> int:
    """Pretend to bill a customer."""
    return customer


# Not before: a handler of that could change the messages, so `send_task` would make each of them.
@after_task_publish.connect(weak=False)
def fail_once(**_: Any) -> None:
    """End this process once, like an executor that runs out of memory."""
    died = os.environ.get("PIPELINE_DIES_ONCE")
    at = int(os.environ.get("PIPELINE_DIES_AT", "0"))
    if died and next(_published) == at and not Path(died).exists():
        Path(died).touch()
        os.kill(os.getpid(), signal.SIGKILL)
