"""Publishers and consumers are killed, before and after a confirm, before and after an ack."""

from __future__ import annotations

import signal
import time
from functools import partial
from itertools import cycle

from dev.faults.environment import Case, Environment
from dev.faults.ledger import CONFIRMED, DELIVERED, SENT

PUBLISHED = 40  # by each publisher, until it ends


def publishers(env: Environment, number: int) -> None:
    """End publishers in the moment in which a confirm has come and the publish not returned.

    The next one cannot know, so it sends that message again, with the same id.
    """
    env.queue("inbox")
    env.declare_ladder("inbox")
    env.consumer("inbox")
    rounds = 3 if env.short else 20
    otherwise = 0
    for round_ in range(rounds):
        publisher = env.publisher(
            ["inbox"],
            PUBLISHED + 1,
            200,
            first=round_ * PUBLISHED,
            dies_after=PUBLISHED,
            dies_of=number,
        )
        otherwise += publisher.wait(180) != -number
    env.wait_until_done()
    env.check("publishers that ended otherwise", otherwise, 0)
    env.notes["times"] = rounds


def publishers_anywhere(env: Environment, number: int) -> None:
    """End publishers at random moments; the next one goes on after the last that was confirmed."""
    env.queue("inbox")
    env.declare_ladder("inbox")
    env.consumer("inbox")
    for round_ in range(15):
        before = env.count(SENT)
        publisher = env.publisher(["inbox"], 10_000, 300, name=f"p{round_}")
        env.wait_for(SENT, before + 20 + 7 * round_)
        if number == signal.SIGKILL:
            publisher.kill()
        else:
            publisher.stop()
    env.wait_until_done()
    env.notes["times"] = 15


def consumers(env: Environment) -> None:
    """Kill consumers with SIGKILL, in turns before and after they acknowledge."""
    env.queue("inbox")
    env.declare_ladder("inbox")
    rounds = 4 if env.short else 20
    count = rounds * 30
    publisher = env.publisher(["inbox"], count, 150, (0.2, 3.0))
    when = cycle(("before", "after"))
    for _ in range(rounds):
        env.consumer("inbox", dies_at=20, dies=next(when)).wait(180)
    env.consumer("inbox")
    publisher.wait(180)
    env.wait_until_done()
    env.notes["times"] = rounds


def workers(env: Environment, *, warm: bool) -> None:
    """Kill Celery workers, or ask them to stop, while they run tasks and hold others."""
    rounds = 2 if env.short else 6
    worker = env.worker("--concurrency=2")
    env.declare_ladder("tasks")
    env.send_tasks(rounds * 60, longest=10.0)
    for round_ in range(rounds):
        env.wait_for(DELIVERED, round_ * 40 + 20)
        time.sleep(0.1)
        if warm:
            worker.stop()
        else:
            worker.kill()
        worker = env.worker("--concurrency=2")
    env.wait_for(CONFIRMED, rounds * 60)
    env.wait_until_done()
    env.notes["times"] = rounds
    worker.stop()


_SIGKILL, _SIGTERM = int(signal.SIGKILL), int(signal.SIGTERM)
CASES = (
    Case(
        "publisher ends",
        "SIGKILL between confirm and return",
        partial(publishers, number=_SIGKILL),
        short=True,
        since=(3, 8),
    ),
    Case(
        "publisher ends",
        "SIGTERM between confirm and return",
        partial(publishers, number=_SIGTERM),
        since=(3, 8),
    ),
    Case(
        "publisher ends",
        "SIGKILL anywhere",
        partial(publishers_anywhere, number=_SIGKILL),
        since=(3, 8),
    ),
    Case("consumer ends", "SIGKILL before or after the ack", consumers, short=True, since=(3, 8)),
    Case("Celery worker ends", "SIGKILL", partial(workers, warm=False), since=(3, 8)),
    Case("Celery worker ends", "SIGTERM", partial(workers, warm=True), since=(3, 8)),
)
