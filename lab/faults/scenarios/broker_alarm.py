"""The broker runs out of memory or disk and blocks publishers; then it has enough again."""

from __future__ import annotations

import time
from functools import partial

from lab.faults.lab import Case, Lab
from lab.faults.ledger import CONFIRMED

BLOCKED = 6.0  # seconds


def alarmed(lab: Lab, raise_it: tuple[str, ...], clear_it: tuple[str, ...]) -> None:
    """Raise the alarm in the middle of it, and clear it some seconds later."""
    lab.queue("inbox")
    lab.stand("inbox")
    lab.consumer("inbox")
    publisher = lab.publisher(["inbox"], 600, 100)
    lab.wait_for(CONFIRMED, 300)
    lab.broker.ctl(*raise_it)
    time.sleep(1)
    before = lab.count(CONFIRMED)
    time.sleep(BLOCKED)
    lab.notes["confirmed while blocked"] = lab.count(CONFIRMED) - before
    lab.check("publishes confirmed while blocked", lab.count(CONFIRMED) - before, 0)
    lab.broker.ctl(*clear_it)
    publisher.wait(60)
    lab.settle()
    lab.check("publishes that raised", lab.verdict().refused, 0)


MEMORY = (("set_vm_memory_high_watermark", "0.00001"), ("set_vm_memory_high_watermark", "0.6"))
DISK = (("set_disk_free_limit", "1000000GB"), ("set_disk_free_limit", "50MB"))
CASES = (
    Case("broker alarm", "memory", partial(alarmed, raise_it=MEMORY[0], clear_it=MEMORY[1])),
    Case("broker alarm", "disk", partial(alarmed, raise_it=DISK[0], clear_it=DISK[1])),
)
