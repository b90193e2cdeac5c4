"""A worker dies while tasks wait: all arrive, and none early."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.acceptance.journal import LATE, wait_until
from tests.acceptance.setup import Setup


@pytest.fixture(scope="module")
def shape():
    return "careful"


@pytest.fixture(scope="module")
def worker_options():
    return ["--concurrency=2", "--without-mingle"]


def test_a_worker_killed_with_sigkill_loses_nothing(celery_setup: Setup, tmp_path: Path):
    # given: each of its processes is at a task, so that it has others in its hands
    journal, signal = celery_setup.journal, tmp_path / "go"
    done = celery_setup.send_note(countdown=0.5)
    journal.wait_for(done)
    begun = [celery_setup.send("hold", str(signal)).id for _ in range(2)]
    journal.wait_for(*begun)
    sent = time.time()
    tasks = [celery_setup.send_note(n, countdown=0.5 + n / 10) for n in range(40)]
    wait_until(lambda: any(journal.received(task) for task in tasks), "the first")
    # when
    celery_setup.worker.kill()
    assert not any(journal.ran(task) for task in tasks)
    wait_until(lambda: celery_setup.waiting() == 0, "an empty ladder, with no worker there")
    signal.touch()
    # then
    celery_setup.worker.restart()
    back = time.time()
    journal.wait_for(*tasks)
    journal.wait_for(*begun, times=2)
    journal.assert_on_time([done, *begun, *tasks], late=back - sent + LATE)


def test_a_worker_killed_before_anything_is_due_delays_nothing(celery_setup: Setup):
    # given
    tasks = [celery_setup.send_note(countdown=4) for _ in range(10)]
    # when
    begun = time.time()
    celery_setup.worker.kill()
    celery_setup.worker.restart()
    away = time.time() - begun
    # then
    celery_setup.journal.wait_for(*tasks)
    celery_setup.journal.assert_on_time(tasks, late=away + LATE)
