"""The broker runs out of memory or disk and blocks publishers; then it has enough again."""

from __future__ import annotations

import time
from functools import partial

from dev.faults.environment import Case, Environment
from dev.faults.ledger import CONFIRMED

BLOCKED = 6.0  # seconds


def alarmed(env: Environment, raise_it: tuple[str, ...], clear_it: tuple[str, ...]) -> None:
    """Raise the alarm in the middle of it, and clear it some seconds later."""
    env.queue("inbox")
    env.declare_ladder("inbox")
    env.consumer("inbox")
    publisher = env.publisher(["inbox"], 600, 100)
    env.wait_for(CONFIRMED, 300)
    env.broker.ctl(*raise_it)
    # It is when the publisher sends another message: it has got the confirm of the last one then.
    env.wait_until(lambda: "blocked" in states(env), "the publisher is blocked")
    before = env.count(CONFIRMED)
    time.sleep(BLOCKED)
    env.notes["confirmed while blocked"] = env.count(CONFIRMED) - before
    env.check("publishes confirmed while blocked", env.count(CONFIRMED) - before, 0)
    env.broker.ctl(*clear_it)
    publisher.wait(180)
    env.wait_until_done()
    env.check("publishes that raised", env.verdict().refused, 0)


def states(env: Environment) -> list[str]:
    """Ask the broker for the state of each connection."""
    return env.broker.ctl("list_connections", "state", "--quiet", "--no-table-headers").split()


MEMORY = (("set_vm_memory_high_watermark", "0.00001"), ("set_vm_memory_high_watermark", "0.6"))
DISK = (("set_disk_free_limit", "1000000GB"), ("set_disk_free_limit", "50MB"))
CASES = (
    Case("broker alarm", "memory", partial(alarmed, raise_it=MEMORY[0], clear_it=MEMORY[1])),
    Case("broker alarm", "disk", partial(alarmed, raise_it=DISK[0], clear_it=DISK[1])),
)
