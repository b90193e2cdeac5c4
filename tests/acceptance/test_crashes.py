"""A worker dies while tasks wait: all arrive, and none early."""

from __future__ import annotations

import time

import pytest

from tests.acceptance.journal import wait_until
from tests.acceptance.setup import Setup

pytestmark = pytest.mark.slow

#: Whoever comes after a killed worker has its tasks to take over.
AFTER_A_DEATH = 60.0


@pytest.fixture(scope="module")
def shape():
    return "careful"


@pytest.fixture(scope="module")
def worker_options():
    return ["--concurrency=2", "--without-mingle"]


def test_a_worker_killed_with_sigkill_loses_nothing(celery_setup: Setup):
    # given
    journal = celery_setup.journal
    tasks = [celery_setup.send_note(n, countdown=0.5 + n / 10) for n in range(40)]
    wait_until(lambda: len(journal.ran()) >= 5, "the first runs")
    # when
    celery_setup.worker.kill()
    at_death, died = len({run.id for run in journal.ran()}), time.time()
    assert at_death < len(tasks)
    wait_until(lambda: celery_setup.waiting() == 0, "an empty ladder, with no worker there")
    # then
    celery_setup.worker.restart()
    runs = journal.wait_for(*tasks)
    assert len([run for run in runs if run.at > died]) >= len(tasks) - at_death
    journal.assert_on_time(tasks, late=AFTER_A_DEATH)


def test_a_worker_killed_before_anything_is_due_delays_nothing(celery_setup: Setup):
    # given
    tasks = [celery_setup.send_note(countdown=4) for _ in range(10)]
    # when
    celery_setup.worker.kill()
    # then
    celery_setup.worker.restart()
    assert len(celery_setup.journal.wait_for(*tasks)) == len(tasks)
    celery_setup.journal.assert_on_time(tasks)
