"""The fault scenarios in short form: what is confirmed arrives, and not early."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import amqp
import pytest

from dev.broker import Broker
from dev.faults.environment import Outcome, run_case
from dev.faults.proxy import Proxy
from dev.faults.scenarios import CASES
from tests.waits import PATIENCE

#: The cases that leave a broker as it was, but for their virtual host: one is enough for all.
ON_ONE_BROKER = {
    "publisher ends, SIGKILL between confirm and return",
    "consumer ends, SIGKILL before or after the ack",
    "connection cut, publisher and consumer",
    "ladder broken, a queue with other arguments",
    "clock stepped, 5 s forward",
    "destination changed, made anew",
    "amended, no consumer up, then killed",
    "amended, no Celery worker up, then killed",
    "amended, publisher killed between message and record",
    "amended, streams deleted",
    "amended, poison, and a record of next year",
    "broker killed, confirm timeout 5 s",
    "amended, broker killed",
    "amended, memory alarm, nothing ever amended",
}
SHORT = {f"{case.scenario}, {case.name}": case for case in CASES if case.short}
#: Each of the three that fail is shown once, on one broker. The rest is slow.
FIRST = {
    "publisher ends, SIGKILL between confirm and return",
    "consumer ends, SIGKILL before or after the ack",
    "broker killed, confirm timeout 5 s",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FIRST else pytest.mark.slow)
        for name in SHORT
        if name in ON_ONE_BROKER
    ],
)
def test_nothing_confirmed_is_lost_early_or_misdelivered(name: str, own_broker: Broker) -> None:
    judge(run_case(SHORT[name], short=True, broker=own_broker))


@pytest.mark.own_broker
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHORT if name not in ON_ONE_BROKER])
def test_nor_is_it_where_the_broker_is_a_special_one(name: str) -> None:
    judge(run_case(SHORT[name], os.environ.get("RABBITMQ_ROOT"), short=True))


def judge(outcome: Outcome | None) -> None:
    if outcome is None:
        pytest.skip("this RabbitMQ cannot promise it: its levels are classic queues")
    assert outcome.verdict.is_clean, outcome
    assert all(check.holds for check in outcome.checks), outcome.checks
    assert outcome.verdict.confirmed > 0
    assert outcome.verdict.lateness


def test_a_proxy_passes_bytes_on_until_its_budget_is_spent(broker) -> None:
    with Proxy(urlsplit(broker.url).port or 5672) as proxy:
        connection = amqp.Connection(f"127.0.0.1:{proxy.port}", read_timeout=PATIENCE)
        connection.connect()
        channel = connection.channel()
        channel.queue_declare("through", exclusive=True)
        proxy.cut()
        with pytest.raises((OSError, amqp.ConnectionError)):
            channel.queue_declare("through", passive=True)
        connection.collect()
        assert proxy.cuts == 1
        # The handshake alone is more than that.
        proxy.budget = (100, 200)
        connection = amqp.Connection(f"127.0.0.1:{proxy.port}", read_timeout=PATIENCE)
        with pytest.raises((OSError, amqp.ConnectionError)):
            connection.connect()
        connection.collect()
        assert proxy.cuts == 2
