"""The fault scenarios in short form: what is confirmed arrives, and not early."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import amqp
import pytest

from dev.faults.environment import Case, run_case
from dev.faults.proxy import Proxy
from dev.faults.scenarios import CASES
from tests.waits import PATIENCE

ROOT = os.environ.get("RABBITMQ_ROOT")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.short],
    ids=lambda case: f"{case.scenario}, {case.name}",
)
def test_nothing_confirmed_is_lost_early_or_misdelivered(case: Case) -> None:
    outcome = run_case(case, ROOT, short=True)
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
