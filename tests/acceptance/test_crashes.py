"""Whatever dies while tasks wait: all arrive, and none early."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from lab.broker import SETTLES_SOON, Broker
from lab.keeper import Keeper
from tests.acceptance.journal import wait_until
from tests.acceptance.stage import Stage

pytestmark = pytest.mark.slow

#: A quorum queue that is younger than about a second when its broker is killed comes back empty.
OLD_ENOUGH = 1.5
#: A broker that comes back has its queues to recover, a worker waits longer each time it fails.
AFTER_A_RESTART = 60.0
#: A countdown that ends when the broker is most likely up again.
LAST = 6.0


def test_a_worker_killed_with_sigkill_loses_nothing(new_stage):
    # given
    stage: Stage = new_stage("careful")
    worker = stage.worker("--concurrency=2")
    tasks = [stage.send_note(n, countdown=0.5 + n / 10) for n in range(40)]
    wait_until(lambda: len(stage.journal.ran()) >= 5, "the first runs")
    # when
    worker.kill()
    at_death = len({run.id for run in stage.journal.ran()})
    assert at_death < len(tasks)
    wait_until(lambda: stage.waiting() == 0, "an empty ladder, with no worker there")
    # then
    other = stage.worker("--concurrency=2")
    runs = stage.journal.wait_for(*tasks)
    assert len([run for run in runs if run.worker == other.name]) >= len(tasks) - at_death
    stage.journal.assert_on_time(tasks, late=AFTER_A_RESTART)


def test_a_worker_killed_before_anything_is_due_delays_nothing(new_stage):
    # given
    stage: Stage = new_stage()
    worker = stage.worker("--pool=solo")
    tasks = [stage.send_note(countdown=4) for _ in range(10)]
    # when
    worker.kill()
    # then
    stage.worker("--pool=solo")
    assert len(stage.journal.wait_for(*tasks)) == len(tasks)
    stage.journal.assert_on_time(tasks)


@pytest.fixture(scope="module")
def mortal(keeper: Keeper) -> Iterator[Broker]:
    """Give a broker of our own to stop and to kill."""
    with Broker(os.environ.get("RABBITMQ_ROOT"), advanced=SETTLES_SOON) as broker:
        yield broker


@pytest.mark.own_broker
@pytest.mark.parametrize(
    ("end", "same_worker"),
    [(Broker.stop, False), (Broker.kill, True)],
    ids=["stopped, new worker", "killed, worker reconnects"],
)
def test_a_broker_that_restarts_loses_nothing(mortal: Broker, keeper: Keeper, end, same_worker):
    # given
    stage = Stage(mortal.vhost(), keeper, "careful")
    if end is Broker.kill and stage.topology.queue_type == "classic":
        pytest.skip("RabbitMQ before 3.10 may lose what moves between levels when it is killed")
    worker = stage.worker("--pool=threads")
    stage.send_note(countdown=LAST)  # makes the levels
    time.sleep(OLD_ENOUGH)
    before = [stage.send_note(n, countdown=0.5 + n / 8) for n in range(32)]
    after = [stage.send_note(n, countdown=LAST - n / 8) for n in range(8)]
    wait_until(lambda: stage.journal.ran(before[3]), "the first runs")
    # when
    end(mortal)
    mortal.start()
    if not same_worker:
        worker.kill()
        worker = stage.worker("--pool=threads")
    # then
    tasks = before + after
    stage.journal.wait_for(*tasks, timeout=AFTER_A_RESTART)
    stage.journal.assert_on_time(tasks, late=AFTER_A_RESTART)
    # and
    stage.journal.wait_for(stage.send_note(countdown=0.5))
    worker.kill()
    stage.close()
