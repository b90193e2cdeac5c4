"""SIGKILL of the broker, again and again, while messages are published, wait, move and arrive."""

from __future__ import annotations

import time

from lab.faults.lab import Case, Lab
from lab.faults.ledger import CONFIRMED


def killed(lab: Lab) -> None:
    """Kill the broker in the middle of it, and start it again."""
    kills = 1 if lab.short else 4
    lab.queue("inbox")
    lab.stand("inbox")
    lab.consumer("inbox")
    publisher = lab.publisher(["inbox"], count=kills * 300, rate=100)
    for kill in range(kills):
        lab.wait_for(CONFIRMED, kill * 300 + 150, timeout=120)
        lab.broker.kill()
        lab.broker.start()
        time.sleep(1)
    publisher.wait(120)
    # The broker's own timers: 180 s where nobody has lowered them.
    lab.settle(patience=240)
    lab.notes["kills"] = kills


CASES = (
    Case("broker killed", "confirm timeout 5 s", killed, short=True),
    Case("broker killed", "confirm timeout 180 s (default)", killed, advanced="[]."),
)
