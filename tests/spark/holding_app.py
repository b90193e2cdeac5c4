"""Purpose: an application whose publishers stop for good at a point, and say so by a file.

So a test can kill them there. `KBD_HOLD` names the folder of the files; without it, nothing stops.
"""

from __future__ import annotations

import os
import time
from itertools import count
from pathlib import Path

from celery import Celery
from celery.signals import before_task_publish
from pyspark import TaskContext

from kombu_binary_delay.amendments.stream import Amendments

app = Celery("holding", set_as_current=False)
FOLDER = os.environ.get("KBD_HOLD")
#: The phases, which are also the names of the tasks and of the files.
PUBLISHING, COMMITTING, RECORDING = "publishing", "committing", "recording"

numbers = count()
write = Amendments.write


def hold(phase: str) -> None:
    """Stop here, to be killed."""
    Path(str(FOLDER), phase).touch()
    time.sleep(1800)


def hold_between_messages(sender: str, **_: object) -> None:
    context = TaskContext.get()
    # By then a window has been sent, and none of its messages has a receipt.
    if sender == PUBLISHING and next(numbers) == 1200:
        hold(PUBLISHING)
    # The other Spark task of the slice ends, and its receipts are there.
    if sender == COMMITTING and context is not None and context.partitionId() == 1:
        hold(COMMITTING)


def write_and_hold(amendments: Amendments, records: object) -> None:
    write(amendments, records)  # type: ignore[arg-type]
    hold(RECORDING)


# Not in the tests themselves, which import this module, too.
if FOLDER is not None:
    before_task_publish.connect(hold_between_messages)
    Amendments.write = write_and_hold  # type: ignore[method-assign, assignment]
