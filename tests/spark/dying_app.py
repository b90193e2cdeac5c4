"""Purpose: an application whose publisher dies once, after 1500 messages, where a file says so."""

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


def order(task: str) -> Path:
    """Name the file that orders the death: one for each task."""
    return Path(tempfile.gettempdir(), f"kbd-die-{task}")


@before_task_publish.connect(weak=False)
def die_once(sender: str, **_: object) -> None:
    # By then a window of the first slice has been sent. Only an executor may die, and never the
    # tests themselves.
    executor = TaskContext.get() is not None
    if executor and next(numbers) == 1500 and order(sender).exists():
        order(sender).unlink()
        os.kill(os.getpid(), signal.SIGKILL)
