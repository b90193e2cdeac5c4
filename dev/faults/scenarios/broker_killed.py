"""SIGKILL of the broker, again and again, while messages are published, wait, move and arrive."""

from __future__ import annotations

import time

from dev.broker import DEFAULTS
from dev.faults.environment import Case, Environment
from dev.faults.ledger import CONFIRMED


def killed(env: Environment) -> None:
    """Kill the broker in the middle of it, and start it again."""
    kills = 1 if env.short else 4
    env.queue("inbox")
    env.declare_ladder("inbox")
    env.consumer("inbox")
    publisher = env.publisher(["inbox"], count=kills * 300, rate=100)
    for kill in range(kills):
        env.wait_for(CONFIRMED, kill * 300 + 150)
        env.broker.kill()
        env.broker.start()
        time.sleep(1)
    publisher.wait(180)
    # The broker's own timers: 180 s where nobody has lowered them.
    env.wait_until_done(patience=240)
    env.notes["kills"] = kills


def killed_and_down(env: Environment) -> None:
    """Kill the broker and leave it down, until much that waits on every level is overdue."""
    env.queue("inbox")
    env.declare_ladder("inbox")
    env.consumer("inbox")
    for kill in range(2):
        env.publisher(["inbox"], 900, 300, (2.0, 20.0), name=f"before-{kill}").wait(180)
        env.broker.kill()
        time.sleep(8)
        env.broker.start()
    env.wait_until_done(patience=240)
    env.notes["kills"] = 2


CASES = (
    Case("broker killed", "confirm timeout 5 s", killed, short=True),
    Case("broker killed", "confirm timeout 180 s (default)", killed, advanced=DEFAULTS),
    Case("broker killed", "down for 8 s, confirm timeout 5 s", killed_and_down),
    Case(
        "broker killed",
        "down for 8 s, confirm timeout 180 s (default)",
        killed_and_down,
        advanced=DEFAULTS,
    ),
)
