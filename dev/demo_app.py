"""Purpose: the Celery application of the demo, for both the worker and the publisher.

Its delayed delivery is one line; the rest are the usual settings of an application that must lose
nothing when a worker dies.
"""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery

app = Celery("demo", broker=os.environ.get("DEMO_BROKER"))
app.conf.broker_transport = "kombu_binary_delay:Transport"
app.conf.broker_transport_options = {"confirm_publish": True}
app.conf.task_acks_late = True
app.conf.task_reject_on_worker_lost = True
app.conf.task_ignore_result = True
app.conf.broker_connection_retry_on_startup = True


@app.task(bind=True)
def arrive(self: Any) -> None:
    """Record when this task has arrived, in a way that survives SIGKILL."""
    line = f"{self.request.id} {time.time():.6f}\n"
    file = os.open(os.environ["DEMO_ARRIVALS"], os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)
