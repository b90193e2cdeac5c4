"""Purpose: an application whose publisher dies once, after 2500 messages, where a file says so."""

from __future__ import annotations

import os
import signal
import tempfile
from itertools import count
from pathlib import Path

from celery import Celery
from celery.signals import before_task_publish
from pyspark import TaskContext

app = Celery("dying", set_as_current=False)
numbers = count()


def order(broker: str) -> Path:
    """Name the file that orders the death: one for each virtual host."""
    return Path(tempfile.gettempdir(), f"kbd-die-{broker.rpartition('/')[2]}")


@before_task_publish.connect(weak=False)
def die_once(**_: object) -> None:
    # By then two windows have been sent. Only an executor may die, and never the tests themselves.
    executor = TaskContext.get() is not None
    if executor and next(numbers) == 2500 and order(app.conf.broker_url).exists():
        order(app.conf.broker_url).unlink()
        os.kill(os.getpid(), signal.SIGKILL)
