"""A destination is made anew, unbound or moved while messages for it wait; parked ones go on."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kombu import Connection, Exchange, Queue

from dev.faults.environment import BUSY, Case, Environment, ScenarioError
from dev.faults.ledger import CONFIRMED
from dev.faults.programs import TRANSPORT

if TYPE_CHECKING:
    from collections.abc import Iterator

COUNT = 200
#: Seconds: all still wait when the destination changes; and where that took too long, or there is
#: only one try.
WAIT, LONG_WAIT = (40.0, 43.0), (90.0, 93.0)
#: Seconds that a step may take between its look at the clock and what it does.
SPARE = 30.0


@contextmanager
def channel(env: Environment) -> Iterator[Any]:
    """Open a channel of the transport, as a consumer has one."""
    with Connection(env.vhost.url, transport=TRANSPORT) as connection:
        yield connection.default_channel


def orders(queue: str) -> Queue:
    """Describe a queue bound to an exchange."""
    kind = {"x-queue-type": "quorum"}
    return Queue(queue, Exchange("orders", "topic"), "order.#", queue_arguments=kind)


def publish(
    env: Environment,
    queues: list[str],
    exchange: str = "",
    key: str = "a",
    wait: tuple[float, float] = LONG_WAIT,
) -> None:
    """Publish all, and wait until they are confirmed."""
    before = env.count(CONFIRMED)
    name = f"due-after-{wait[0]:g}"
    env.publisher([(exchange, key, queues)], COUNT, 200, wait, name=name).wait(180)
    env.wait_for(CONFIRMED, before + COUNT, 5)


def wait_for_parked(env: Environment, count: int) -> None:
    """Wait until so many are in the parking queue."""
    env.wait_until(lambda: env.parked() >= count, f"{count} parked", LONG_WAIT[1] + BUSY)


def publish_and_delete(env: Environment, queue: str, wait: tuple[float, float]) -> bool:
    """Publish to the queue, and delete it before anything is due.

    :returns: whether it was in time: what has arrived in a queue goes with it, so it stays then.
    """
    env.queue(queue)
    env.declare_ladder(queue)
    begin = time.monotonic()
    publish(env, [queue], key=queue, wait=wait)
    with env.vhost.connect() as connection:
        channel = connection.channel()
        in_time = time.monotonic() < begin + wait[0] - SPARE
        if in_time:
            channel.queue_delete(queue)
    return in_time


def made_anew(env: Environment) -> None:
    """Delete the queue, and declare it again before anything is due."""
    # Each try has a queue of its own.
    for name, wait in (("a", WAIT), ("b", LONG_WAIT)):
        begin = time.monotonic()
        in_time = publish_and_delete(env, name, wait)
        if in_time:
            with channel(env) as app:
                queue = Queue(name, queue_arguments={"x-queue-type": "quorum"})(app)
                queue.declare()
                # When it consumes, a connection of the transport leads delayed messages there.
                queue.get()
            in_time = time.monotonic() < begin + wait[0]
        env.consumer(name)
        if in_time:
            break
        # The machine was too slow: some may have been due while there was no queue.
        time.sleep(wait[1])
        env.redrive()
    else:
        raise ScenarioError(f"the queue was not made anew within {LONG_WAIT[0]:g} s")
    env.wait_until_done()
    env.check("parked", env.parked(), 0)


def parked(env: Environment) -> None:
    """Delete the queue; what is parked is seen, and sent on when the queue is there again."""
    if not publish_and_delete(env, "a", LONG_WAIT):
        raise ScenarioError(f"the queue was not deleted within {LONG_WAIT[0]:g} s")
    wait_for_parked(env, COUNT)
    env.queue("a")
    env.check("parked, and not sent on", COUNT - env.redrive(), 0)
    env.consumer("a")
    env.wait_until_done()


def unbound(env: Environment) -> None:
    """Unbind the queue: it gets nothing more, all is parked, and goes on when it is bound again."""
    with channel(env) as app:
        a = orders("a")(app)
        a.declare()
        a.get()
        publish(env, ["a"], "orders", "order.paid")
        a.unbind_from(Exchange("orders"), "order.#")
        wait_for_parked(env, COUNT)
        env.check("in the unbound queue", env.vhost.waiting("a")["a"], 0)
        a.bind_to(Exchange("orders"), "order.#")
    env.redrive()
    env.consumer("a")
    env.wait_until_done()


def moved(env: Environment) -> None:
    """Bind another queue in place of the first: what waits arrives in the other, and only there."""
    with channel(env) as app:
        a, b = orders("a")(app), orders("b")(app)
        a.declare()
        a.get()
        publish(env, ["b"], "orders", "order.paid")
        a.unbind_from(Exchange("orders"), "order.#")
        b.declare()
    env.consumer("a", "b")
    env.wait_until_done()
    env.check("parked", env.parked(), 0)
    time.sleep(1)


CASES = (
    Case("destination changed", "made anew", made_anew, short=True, since=(3, 8)),
    Case("destination changed", "deleted, parked, sent on", parked, since=(3, 8)),
    Case("destination changed", "unbound, parked, sent on", unbound, since=(3, 8)),
    Case("destination changed", "moved to another queue", moved, since=(3, 8)),
)
