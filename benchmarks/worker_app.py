"""Purpose: the app of the workers that waiting.py weighs; the environment says how to connect."""

from __future__ import annotations

import os

from celery import Celery

app = Celery(
    "bench", broker=os.environ["BENCH_BROKER"], broker_transport=os.environ["BENCH_TRANSPORT"]
)
app.conf.task_ignore_result = True


@app.task(name="task")
def task(number: int) -> None:
    """Do nothing, an hour from now."""
