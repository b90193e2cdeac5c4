"""Purpose: the Celery application of the pipeline demo, for its worker and for Spark's executors.

Where the environment says so, the process that publishes dies once, in the middle: an executor
that fails.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from itertools import count
from pathlib import Path

from celery import Celery
from kombu.serialization import register

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


def encode(body: object) -> str:
    """Encode a message, or end this process, once, like an executor that runs out of memory."""
    died = os.environ.get("PIPELINE_DIES_ONCE")
    at = int(os.environ.get("PIPELINE_DIES_AT", "0"))
    if died and next(_published) == at and not Path(died).exists():
        Path(died).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return json.dumps(body)


# Not a handler of a publish: then `send_task` would make each message.
register("fatal", encode, json.loads, "application/x-fatal-json", "utf-8")
app.conf.task_serializer = "fatal"
app.conf.accept_content = ["fatal"]
# A line for each task takes longer than the task.
for name in ("celery.worker.strategy", "celery.app.trace"):
    logging.getLogger(name).setLevel(logging.WARNING)
