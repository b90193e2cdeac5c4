"""One bad destination never delays another by more than a second.

A good queue gets the same messages twice: alone, and among as many for a bad destination. The worst
of the second time may be a second worse than the worst of the first, which is what tick, hops and
machine take.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import amqp
from kombu import Connection, Exchange, Queue

from dev.faults.environment import BUSY, Case, Environment
from dev.faults.ledger import CONFIRMED
from dev.faults.programs import TRANSPORT

if TYPE_CHECKING:
    from collections.abc import Callable

    Destination = tuple[str, str, list[str]]

COUNT, RATE, DELAYS = 150, 50.0, (0.3, 4.0)
# The bad messages of each level queue fill the hands of its dead-letter worker, which is to take no
# more than these. RabbitMQ's own prefetch is 32.
FEW_IN_HAND = """
[{rabbit, [{dead_letter_worker_publisher_confirm_timeout, 5000},
           {dead_letter_worker_consumer_prefetch, 4}]}].
"""
#: Seconds after the last due time in which a good message is waited for.
PATIENCE = 15.0


def deleted(env: Environment) -> Destination:
    """Name a queue that was there, and is not."""
    env.queue("bad")
    env.declare_ladder("bad")
    with env.vhost.connect() as connection:
        connection.channel().queue_delete("bad")
    return "", "bad", []


def unbound(env: Environment) -> Destination:
    """Name an exchange from which its only queue was unbound."""
    with connect(env) as connection:
        queue = Queue("once", Exchange("bad", "direct"), "key")(connection.default_channel)
        queue.declare()
        queue.get()
        queue.unbind_from(Exchange("bad", "direct"), "key")
    return "bad", "key", []


def unheard(env: Environment, kind: str) -> Destination:
    """Name an exchange that nobody listens to any more; the transport has seen a queue of it."""
    env.notes["kind"] = kind
    with connect(env) as connection:
        queue = Queue("once", Exchange("bad", kind), "key")(connection.default_channel)
        queue.declare()
        queue.get()
        queue.delete()
    return "bad", "key", []


def full(env: Environment, kind: str, *, by_transport: bool = True) -> Destination:
    """Name a queue that holds one message, may hold no more, and rejects.

    :param by_transport: whether it is declared through the transport; by an administrator
        otherwise.
    """
    arguments = {"x-queue-type": kind, "x-max-length": 1, "x-overflow": "reject-publish"}
    if by_transport:
        with connect(env) as connection:
            queue = Queue("bad", queue_arguments=arguments)(connection.default_channel)
            queue.declare()
            queue.get()
        env.declare_ladder()
    else:
        env.queue("bad", x_queue_type=kind, x_max_length=1, x_overflow="reject-publish")
        env.declare_ladder("bad")
    fill(env)
    return "", "bad", ["bad"]


def full_by_policy(env: Environment) -> Destination:
    """Name such a queue that rejects because of a policy, which no AMQP client can see."""
    env.queue("bad")
    policy = {
        "pattern": "^bad$",
        "definition": {"max-length": 1, "overflow": "reject-publish"},
        "apply-to": "queues",
    }
    env.broker.api("PUT", f"policies/{env.vhost.name}/full", policy)
    env.declare_ladder()
    fill(env)
    return "", "bad", ["bad"]


def fill(env: Environment) -> None:
    """Publish straight to the bad queue until it is full."""
    with env.vhost.connect() as plain:
        channel = plain.channel()
        for _ in range(3):
            channel.basic_publish(amqp.Message("fills it"), routing_key="bad")


def down(env: Environment, **arguments: object) -> Destination:
    """Name a queue on a node that goes down, with all that the queue has, and stays down."""
    last = env.nodes[-1]
    env.queue("bad", node=last, **arguments)
    env.declare_ladder()
    last.kill()
    time.sleep(5)
    return "", "bad", ["bad"]


def connect(env: Environment) -> Connection:
    """Connect as an application would."""
    return Connection(env.vhost.url, transport=TRANSPORT)


def scenario_of(
    make: Callable[[Environment], Destination],
    *,
    relays: bool = False,
    declares: bool = False,
    limit: bool = True,
) -> Callable[[Environment], None]:
    """Make the scenario of one kind of bad destination.

    :param relays: whether the publisher's settings name the bad queue in `relays`.
    :param declares: whether the publisher declares the bad queue, as one that never refuses.
    :param limit: whether the promise is made; else it must be seen not to hold.
    """

    def scenario(env: Environment) -> None:
        options: dict[str, Any] = {
            "settings": {"relays": ["bad"]} if relays else {},
            "declares": ["bad"] if declares else [],
        }
        env.queue("good")
        bad = make(env)
        env.declare_ladder("good")
        env.consumer("good")
        compare(env, bad, options, limit=limit)

    return scenario


def compare(env: Environment, bad: Destination, options: dict[str, Any], *, limit: bool) -> None:
    """Publish for the good queue alone, then among as many for the bad destination."""
    publish(env, ["good"], COUNT, RATE, "alone", {})
    env.wait_until(lambda: max(env.lateness("good")) < float("inf"), "all, alone")
    alone = max(env.lateness("good"))
    before = len(env.lateness("good"))
    publish(env, ["good", bad], COUNT * 2, RATE * 2, "among", options)
    patience = BUSY if env.short else PATIENCE
    deadline = time.monotonic() + DELAYS[1] + patience
    while max(env.lateness("good")) == float("inf") and time.monotonic() < deadline:
        time.sleep(0.2)
    among = env.lateness("good")[before:]
    env.notes["worst alone"] = alone
    env.notes["worst among bad"] = max(among)
    env.notes["good not there in time"] = among.count(float("inf"))
    if limit:
        cost = max(among) - alone
        env.check_time("seconds that the bad destination cost the good one", cost, 1.0)
    else:
        # Otherwise the promise would hold whatever the ladder does, and show nothing.
        stuck = env.notes["good not there in time"]
        env.check("the same without a relay did no harm", int(stuck == 0), 0)
    if bad[2]:
        # The bad destination takes its messages again: none of them is lost.
        for node in env.nodes:
            node.start()
        env.notes["parked"] = env.parked()
        env.redrive()
        env.consumer(*bad[2])
        env.wait_until_done()
    elif env.notes.get("kind") != "headers":
        # A headers exchange drops what nobody wants, as it does without a delay.
        deadline = time.monotonic() + patience
        while env.parked() < COUNT and time.monotonic() < deadline:
            time.sleep(0.2)
        env.check("bad messages that are not parked", COUNT - env.parked(), 0)


def publish(  # noqa: PLR0913, PLR0917 - the options of a publisher
    env: Environment,
    to: list[str | Destination],
    count: int,
    rate: float,
    name: str,
    options: dict[str, Any],
) -> None:
    """Publish, and wait until all is confirmed."""
    confirmed = env.count(CONFIRMED)
    publisher = env.publisher(to, count, rate, DELAYS, name=name, **options)
    publisher.wait(count / rate + 180)
    env.wait_for(CONFIRMED, confirmed + count, 5)


SCENARIO = "bad destination"
classic_down = partial(down, x_queue_type="classic")
quorum_down = partial(down, x_quorum_initial_group_size=1)
BadDestination = partial(Case, SCENARIO, advanced=FEW_IN_HAND)
CASES = (
    BadDestination("queue deleted", scenario_of(deleted)),
    BadDestination("queue unbound", scenario_of(unbound)),
    BadDestination("fanout, nobody listens", scenario_of(partial(unheard, kind="fanout"))),
    BadDestination("topic, nobody listens", scenario_of(partial(unheard, kind="topic"))),
    BadDestination("headers, nobody listens", scenario_of(partial(unheard, kind="headers"))),
    BadDestination(
        "quorum queue full, rejects",
        scenario_of(partial(full, kind="quorum")),
        short=True,
    ),
    BadDestination("classic queue full, rejects", scenario_of(partial(full, kind="classic"))),
    BadDestination(
        "queue full by others' doing",
        scenario_of(partial(full, kind="quorum", by_transport=False)),
    ),
    BadDestination(
        "queue full by a policy, named in relays",
        scenario_of(full_by_policy, relays=True, declares=True),
    ),
    BadDestination(
        "queue full by a policy, not named",
        scenario_of(full_by_policy, declares=True, limit=False),
    ),
    BadDestination("classic queue, node down", scenario_of(classic_down), nodes=3),
    BadDestination("quorum queue without majority", scenario_of(quorum_down), nodes=3),
)
