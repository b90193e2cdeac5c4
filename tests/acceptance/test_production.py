"""The settings that docs/examples recommends for production lose nothing."""

from __future__ import annotations

import time

import pytest

from dev.broker import Broker
from dev.service import START
from tests.acceptance.journal import wait_until
from tests.acceptance.setup import Setup
from tests.waits import PATIENCE

pytestmark = pytest.mark.slow
#: A quorum queue that is younger than about a second when its broker is killed comes back empty.
OLD_ENOUGH = 3.0
#: Until a broker and a worker have recovered.
RECOVERED = START + PATIENCE


@pytest.fixture(scope="module")
def broker(own_broker: Broker) -> Broker:
    """Give a broker to kill."""
    return own_broker


@pytest.fixture(scope="module")
def shape():
    return "production"


@pytest.fixture(scope="module")
def worker_options():
    return ["--pool=prefork", "--autoscale=3,1", "--without-mingle"]


@pytest.fixture(scope="module")
def worker_stays_well():
    """Its log names the broker that was not there."""
    return False


def test_a_worker_is_killed_and_the_broker_restarts_under_another(celery_setup: Setup, tmp_path):
    journal, signal = celery_setup.journal, tmp_path / "go on"
    held = celery_setup.send("hold", str(signal)).id
    delayed = [celery_setup.send_note(n, countdown=3 + n / 4) for n in range(40)]
    journal.wait_for(held)
    result = celery_setup.app.AsyncResult(held)
    wait_until(lambda: result.state == "STARTED", "the state of a task that runs")

    celery_setup.worker.kill()
    celery_setup.worker.restart()
    wait_until(lambda: len(journal.ran(held)) == 2, "the task of the killed worker")
    time.sleep(OLD_ENOUGH)
    later = [celery_setup.send_note(n, countdown=6) for n in range(8)]
    celery_setup.broker.kill("SIGKILL")
    celery_setup.broker.restart()
    signal.touch()

    journal.wait_for(*delayed, *later, timeout=RECOVERED)
    journal.assert_on_time([*delayed, *later], late=RECOVERED)
    wait_until(lambda: result.state == "SUCCESS", "the end of the task")
    # Its queue and its messages are on the disk.
    assert celery_setup.vhost.waiting("celery")["celery"] == 0
