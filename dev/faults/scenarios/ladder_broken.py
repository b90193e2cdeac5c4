"""Somebody deletes the ladder, or a part of it, under a running publisher; or made it otherwise.

Messages that wait in a queue are gone with it. So exchanges go, and queues only when they are
empty. What an exchange's absence makes unroutable is parked; it is sent on at the end.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from kombu import Connection
from kombu.exceptions import KombuError

from dev.faults.environment import Case, Environment
from dev.faults.ledger import CONFIRMED
from dev.faults.programs import TRANSPORT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LOWEST, HIGHEST = 0, 1  # delays are shorter than 16 s


def delete(env: Environment, exchanges: Iterable[str]) -> None:
    """Delete exchanges, as an administrator would."""
    with env.vhost.connect() as connection:
        channel = connection.channel()
        for name in exchanges:
            channel.exchange_delete(name)


def one_level(env: Environment) -> list[str]:
    """Name the exchange of the level that messages pass, or wait in, at last."""
    return [env.topology.level_name(LOWEST)]


def delivery(env: Environment) -> list[str]:
    """Name the delivery exchange."""
    return [env.topology.delivery]


def parking(env: Environment) -> list[str]:
    """Name the exchange before the parking queue."""
    return [env.topology.parking]


def all_levels(env: Environment) -> list[str]:
    """Name the exchanges of all levels, entry exchanges included."""
    levels = reversed(env.topology.levels[: HIGHEST + 1])
    return [exchange.name for level in levels for exchange in level.exchanges]


def deleted(env: Environment, parts: Callable[[Environment], list[str]]) -> None:
    """Delete a part twice; a publisher that starts later has it made whole again."""
    env.queue("inbox")
    env.declare_ladder("inbox")
    env.consumer("inbox")
    publisher = env.publisher(["inbox"], 600, 60)
    for round_ in (1, 2):
        env.wait_for(CONFIRMED, round_ * 200)
        delete(env, parts(env))
    publisher.wait(180)
    env.publisher(["inbox"], 30, 30, name="later").wait(180)
    time.sleep(10)
    parked = env.parked()
    # Whatever was in the way is mended: what is sent from here on needs nobody's help.
    env.publisher(["inbox"], 300, 100, name="mended").wait(180)
    time.sleep(10)
    env.notes["parked"] = parked
    env.check("parked after the ladder was mended", env.parked() - parked, 0)
    env.redrive()
    env.wait_until_done()
    # One may meet the ladder twice while it goes: then it raises, and the publisher knows.
    env.check("publishes that raised", env.verdict().refused, 2)


def otherwise(env: Environment) -> None:
    """Make a level queue with other arguments: a clear error, and nothing else is disturbed."""
    env.queue("inbox")
    env.declare_ladder("inbox", longest=1.0)
    name = env.topology.levels[HIGHEST + 1].queues[0].name
    env.queue(name, x_message_ttl=1)
    env.consumer("inbox")
    short = env.publisher(["inbox"], 200, 100, (0.2, 0.9), name="short")
    with Connection(env.vhost.url, transport=TRANSPORT) as connection:
        producer = connection.Producer()
        refused = ""
        try:
            producer.publish("x", routing_key="inbox", headers={"x-delay": 20_000})
        except KombuError as exc:
            refused = str(exc)
        env.notes["error"] = refused
        env.check("no error that names the queue", int(name not in refused), 0)
        env.check("no remedy in it", int("delete it" not in refused), 0)
        # The channel is as it was.
        producer.publish("plain", routing_key="elsewhere")
    short.wait(180)
    env.wait_until_done()


CASES = (
    Case("ladder broken", "one level's exchange deleted", partial(deleted, parts=one_level)),
    Case("ladder broken", "all levels' exchanges deleted", partial(deleted, parts=all_levels)),
    Case("ladder broken", "delivery exchange deleted", partial(deleted, parts=delivery)),
    Case("ladder broken", "parking exchange deleted", partial(deleted, parts=parking)),
    Case("ladder broken", "a queue with other arguments", otherwise, short=True),
)
