"""The broker in memory: when something happens next, and what stays from test to test."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue

from kombu_binary_delay.testing import Delayed
from kombu_binary_delay.testing.broker import Broker, Consumer
from tests.testing.programs import OURS


def next_of_all(broker):
    """Return when something happens next, by a look at each queue."""
    events = [
        event
        for queue in broker.queues.values()
        for event in (
            queue.ready[0].expires if queue.ready else None,
            None if queue.consumers else queue.ends,
        )
        if event is not None
    ]
    return min(events, default=None)


class Anything:
    """Does to a broker whatever its clients may do, at random."""

    def __init__(self, seed: int) -> None:
        self.random, self.broker = Random(seed), Broker(0)
        self.taken: list[Any] = []
        self.consumers: list[Any] = []

    def declare(self, name: str) -> None:
        limits = [("x-message-ttl", 700), ("x-expires", 900), ("x-max-length", 3)]
        arguments: dict[str, Any] = dict(self.random.sample(limits, self.random.randrange(4)))
        arguments |= self.random.choice([{"x-queue-type": "quorum"}, {"x-max-priority": 9}])
        arguments |= {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": str(int(name) - 1)}
        if name not in self.broker.queues:
            self.broker.declare_queue(name, arguments)

    def publish(self, name: str) -> None:
        properties: dict[str, Any] = {"priority": self.random.randrange(10)}
        if self.random.random() < 0.5:
            properties["expiration"] = str(self.random.randrange(1000))
        self.broker.publish("", name, properties, b"")

    def consume(self, name: str) -> None:
        is_willing, queue = self.random.random() < 0.5, self.broker.queues.get(name)
        if queue is None:
            return
        consumer = Consumer(
            lambda _, queue, message: self.taken.append((queue, message)),
            lambda _: is_willing and len(self.taken) < 5,
            lambda _: None,
        )
        self.consumers.append((queue, consumer))
        self.broker.consume(queue, consumer)
        self.broker.dispatch(queue)

    def get(self, name: str) -> None:
        queue = self.broker.queues.get(name)
        if queue is not None and queue.ready:
            self.taken.append((queue, self.broker.take(queue)))

    def settle(self, _: str) -> None:
        requeue = self.random.random() < 0.5
        if self.taken:
            self.broker.settle(*self.taken.pop(), requeue=requeue, dead=not requeue)

    def leave(self, _: str) -> None:
        if self.consumers:
            self.broker.leave(*self.consumers.pop())

    def wait(self, _: str) -> None:
        self.broker.run_until(self.broker.now + self.random.randrange(500_000))


@pytest.mark.parametrize("seed", range(20))
def test_the_next_event_is_that_of_all_queues_whatever_was_done_to_them(seed):
    does = Anything(seed)
    steps = [does.declare, does.publish, does.publish, does.consume, does.get, does.settle]
    steps += [*steps, does.leave, does.wait]
    for _ in range(300):
        does.random.choice(steps)(str(does.random.randrange(5)))
        assert does.broker.next_event() == next_of_all(does.broker)


def test_a_binding_of_one_test_is_not_one_of_the_next():
    first, second = Exchange("first", "fanout"), Exchange("second", "fanout")
    for is_bound in (True, False):
        with Delayed() as delayed, Connection("amqp://", transport=OURS) as connection:
            channel = connection.channel()
            queue = Queue("mail", second)(channel)
            queue.declare()
            first(channel).declare()
            if is_bound:
                second(channel).bind_to(first)
            headers = {"x-delay": 60_000}
            connection.Producer().publish("hello", exchange="first", headers=headers)
            delayed.advance(minutes=1)
            assert (queue.get() is not None) is is_bound
            assert len(delayed.parked()) == (not is_bound)
