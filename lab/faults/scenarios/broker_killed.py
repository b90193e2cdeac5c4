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


def killed_and_down(lab: Lab) -> None:
    """Kill the broker and leave it down, until much that waits on every level is overdue."""
    lab.queue("inbox")
    lab.stand("inbox")
    lab.consumer("inbox")
    for kill in range(2):
        lab.publisher(["inbox"], 900, 300, (2.0, 20.0), name=f"before-{kill}").wait(60)
        lab.broker.kill()
        time.sleep(8)
        lab.broker.start()
    lab.settle(patience=240)
    lab.notes["kills"] = 2


CASES = (
    Case("broker killed", "confirm timeout 5 s", killed, short=True),
    Case("broker killed", "confirm timeout 180 s (default)", killed, advanced="[]."),
    Case("broker killed", "down for 8 s, confirm timeout 5 s", killed_and_down),
    Case(
        "broker killed",
        "down for 8 s, confirm timeout 180 s (default)",
        killed_and_down,
        advanced="[].",
    ),
)
