"""An app with schedules, whose runs are written to a ledger before anything else."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery import Celery
from kombu import Queue

LEDGER, BROKER, QUORUM = "SCHEDULES_LEDGER", "SCHEDULES_BROKER", "SCHEDULES_QUORUM"

app = Celery("shop", broker=os.environ.get(BROKER, "amqp://"), set_as_current=False)
app.conf.broker_transport = "kombu_binary_delay:Transport"
app.conf.broker_transport_options = {"binary_delay": {"radix": 2}}
app.conf.broker_connection_retry_on_startup = True
if os.environ.get(QUORUM):
    # Else a node that is down takes the tasks' queue with it.
    app.conf.task_queues = [Queue("celery", queue_arguments={"x-queue-type": "quorum"})]
# What a killed worker held is given to another one.
app.conf.task_acks_late = app.conf.task_reject_on_worker_lost = True
app.conf.result_expires = None


@app.task(name="note", bind=True)
def note(self: Any) -> None:
    run = self.request.headers["x-schedule"]
    line = f"{run['name']} {run['due']} {time.time():.3f} {self.request.id}\n"
    with Path(os.environ[LEDGER]).open("a", encoding="utf-8") as ledger:
        ledger.write(line)


app.conf.beat_schedule = {
    name: {
        "task": "note",
        "schedule": every,
        # All that is due while the broker is down runs.
        "options": {"binary_delay": {"catch_up": 1000}},
    }
    for name, every in (("second", 1.0), ("two", 2.0))
}
