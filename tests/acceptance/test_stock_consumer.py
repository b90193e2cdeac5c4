"""A consumer that has not changed its one line yet still gets what others delay."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.acceptance.journal import wait_until
from tests.acceptance.local_system import LocalSystem
from tests.acceptance.system import System


@pytest.fixture(scope="module")
def worker_transport():
    return None


@pytest.fixture(scope="module")
def worker_options():
    return ["--pool=threads", "--concurrency=1", "--without-mingle", "--queues=celery,foo"]


@pytest.mark.parametrize("queue", ["celery", "foo"])
def test_a_delayed_task_runs_at_its_time(system: System, queue: str):
    # when
    task = system.send_note(countdown=1, queue=queue)
    # then
    system.journal.wait_for(task)
    system.journal.assert_on_time([task])


@pytest.mark.parametrize("queue", ["celery", "foo"])
def test_its_retries_come_back_to_it_at_their_times(system: System, queue: str):
    # when
    task = system.send("retry", 3, 0.5, countdown=0.5, queue=queue).id
    # then
    runs = system.journal.wait_for(task, times=4)
    assert [run.retries for run in runs] == [0, 1, 2, 3]
    assert all(later.at - run.at >= 0.5 for run, later in pairwise(runs))


def test_what_expires_before_it_is_due_does_not_run_there_either(system: System):
    # when
    expired = system.send_note(countdown=1, expires=0.5)
    other = system.send_note(countdown=1.5, expires=60)
    # then
    system.journal.wait_for(other)
    assert not system.journal.ran(expired)


def test_what_a_stock_worker_retries_a_worker_of_ours_can_take_over(new_system):
    # given
    system: LocalSystem = new_system()
    stock = system.worker("--pool=solo", stock=True)
    task = system.send("retry", 1000, 0.5, countdown=0.5).id
    system.journal.wait_for(task, times=2)
    # when
    ours = system.worker("--pool=solo")
    stock.stop()
    # then
    wait_until(lambda: system.journal.ran(task)[-1].worker == ours.name, "a run by our worker")
    count = len(system.journal.ran(task))
    last = system.journal.wait_for(task, times=count + 3)[-1]
    assert last.worker == ours.name
    assert (last.exchange, last.routing_key) == ("", "celery")
    assert system.parked() == 0
