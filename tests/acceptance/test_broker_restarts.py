"""The broker ends and comes back while tasks wait: all arrive, and none early."""

from __future__ import annotations

import time

import pytest

from dev.broker import Broker
from dev.service import START
from tests.acceptance.journal import wait_until
from tests.acceptance.setup import Setup
from tests.waits import PATIENCE

#: A quorum queue that is younger than about a second when its broker is killed comes back empty.
OLD_ENOUGH = 3.0
#: A broker that comes back has its queues to recover, a worker waits longer each time it fails.
AFTER_A_RESTART = START + PATIENCE
#: A countdown that ends when the broker is most likely up again.
LAST = 6.0


@pytest.fixture(scope="module")
def broker(own_broker: Broker) -> Broker:
    """Give a broker to stop and to kill."""
    return own_broker


@pytest.fixture(scope="module")
def shape():
    return "careful"


@pytest.fixture(scope="module")
def worker_stays_well():
    """Its log names the broker that was not there."""
    return False


@pytest.mark.parametrize(
    ("end", "same_worker"),
    [
        pytest.param("SIGTERM", False, id="stopped, new worker", marks=pytest.mark.slow),
        pytest.param("SIGKILL", True, id="killed, worker reconnects"),
    ],
)
def test_a_broker_that_restarts_loses_nothing(celery_setup: Setup, end: str, *, same_worker: bool):
    # given
    journal = celery_setup.journal
    celery_setup.send_note(countdown=LAST)  # makes the levels
    time.sleep(OLD_ENOUGH)
    before = [celery_setup.send_note(n, countdown=0.5 + n / 8) for n in range(32)]
    after = [celery_setup.send_note(n, countdown=LAST - n / 8) for n in range(8)]
    wait_until(lambda: journal.ran(before[3]), "the first runs")
    # when
    celery_setup.broker.kill(end)
    celery_setup.broker.restart()
    if not same_worker:
        celery_setup.worker.kill()
        celery_setup.worker.restart()
    # then
    tasks = before + after
    journal.wait_for(*tasks, timeout=AFTER_A_RESTART)
    journal.assert_on_time(tasks, late=AFTER_A_RESTART)
    # and
    journal.wait_for(celery_setup.send_note(countdown=0.5))
