"""A broker is upgraded while messages wait: the next RabbitMQ goes on with the data of the last.

As far as RabbitMQ allows with the releases that Debian has: it refuses 3.10 to 4.0, in its own
words, since 3.11 to 3.13 are to come between. There, a new broker is put beside the old one:
consumers take from both, publishers use the new one, until the old one is empty.
"""

from __future__ import annotations

import subprocess
import time
from functools import partial

from dev.broker import Broker, BrokerError
from dev.faults.environment import HERE, Case, Environment
from dev.faults.ledger import CONFIRMED

COUNT = 300
WAIT = (2.0, 40.0)  # seconds: some are due before, some during, some after the upgrade


def root_of(suite: str) -> str:
    """Unpack the RabbitMQ of a Debian release, if it is not."""
    argv = [str(HERE / "dev" / "unpack.sh"), suite]
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def enable_feature_flags(env: Environment) -> None:
    """Enable what a later RabbitMQ requires."""
    rows = env.broker.api("GET", "feature-flags")
    for name in [row["name"] for row in rows if row["state"] == "disabled"]:
        # RabbitMQ 4.3 has no Mnesia any more; in 4.0, its successor has to be asked for.
        opt_in = ["--opt-in"] if name == "khepri_db" else []
        env.broker.ctl("enable_feature_flag", *opt_in, name)


def upgraded(env: Environment, to: str) -> None:
    """Stop the broker, and start a later one on its data."""
    env.queue("inbox")
    env.declare_ladder("inbox")
    env.publisher(["inbox"], COUNT, 200, WAIT, name="before").wait(180)
    env.wait_for(CONFIRMED, COUNT, 5)
    enable_feature_flags(env)
    down = time.monotonic()
    env.broker.stop()
    with Broker(root_of(to), data=env.broker.folder / "data") as new:
        env.notes["to"] = new.version
        env.notes["down, s"] = time.monotonic() - down
        env.move_to(new)
        env.consumer("inbox")
        env.publisher(["inbox"], COUNT, 200, WAIT, name="after").wait(180)
        env.wait_for(CONFIRMED, 2 * COUNT, 5)
        env.wait_until_done()


def refused(env: Environment, to: str) -> None:
    """Try the same where RabbitMQ refuses; go on with the old broker, beside a new one."""
    env.queue("inbox")
    env.declare_ladder("inbox")
    env.consumer("inbox")
    env.publisher(["inbox"], COUNT, 200, WAIT, name="before").wait(180)
    env.wait_for(CONFIRMED, COUNT, 5)
    enable_feature_flags(env)
    env.broker.stop()
    words = "it was not refused"
    try:
        with Broker(root_of(to), data=env.broker.folder / "data"):
            pass
    except BrokerError as refusal:
        lines = str(refusal).splitlines()
        words = next((line for line in lines if "disabled_required" in line), "?")
    env.notes["words"] = words.partition("] ")[2]
    env.check("not refused", int("disabled_required" not in words), 0)
    # The data were a copy.
    env.broker.start()
    with Broker(root_of(to)) as new:
        env.notes["to"] = new.version
        env.move_to(new)
        env.queue("inbox")
        env.consumer("inbox")
        env.publisher(["inbox"], COUNT, 200, (0.5, 20.0), name="after").wait(180)
        env.wait_for(CONFIRMED, 2 * COUNT, 5)
        env.wait_until_done()


CASES = (
    Case(
        "broker upgraded",
        "4.0 to 4.3, same data",
        partial(upgraded, to="forky"),
        on=partial(root_of, "trixie"),
    ),
    Case(
        "broker upgraded",
        "3.10 to 4.0, refused: side by side",
        partial(refused, to="trixie"),
        on=partial(root_of, "bookworm"),
    ),
)
