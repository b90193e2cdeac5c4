"""The publisher's clock is put forward or back between two publishes.

Due times are the publisher's: by any other clock, a message is early by the step at most.
"""

from __future__ import annotations

from functools import partial

from dev.faults.environment import Case, Environment

STEP = 5.0  # seconds


def stepped(env: Environment, step: float) -> None:
    """Step the clock after half of the messages."""
    env.queue("inbox")
    env.consumer("inbox")
    env.publisher(["inbox"], 300, 100, clock_step=step).wait(180)
    env.ahead = max(0.0, step)
    env.wait_until_done()
    # Back by five seconds, and a message comes five seconds later than the others think.
    late = env.verdict().late(1) - max(0.0, -step)
    env.check_time("seconds late, beyond the step", late, 1.0)


CASES = (
    Case("clock stepped", "5 s forward", partial(stepped, step=STEP), short=True, since=(3, 8)),
    Case("clock stepped", "5 s back", partial(stepped, step=-STEP), since=(3, 8)),
)
