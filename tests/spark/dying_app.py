"""Purpose: an application whose publisher dies once, after 2500 messages."""

from __future__ import annotations

import os
import signal
from itertools import count
from pathlib import Path

from celery import Celery
from celery.signals import before_task_publish

app = Celery("dying", set_as_current=False)
numbers = count()


@before_task_publish.connect(weak=False)
def die_once(**_: object) -> None:
    died = os.environ.get("KBD_TEST_DIES_ONCE")
    # By then two windows have been sent.
    if died and next(numbers) == 2500 and not Path(died).exists():
        Path(died).touch()
        os.kill(os.getpid(), signal.SIGKILL)
