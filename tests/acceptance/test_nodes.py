"""Nodes that are processes keep what nodes of pytest-celery promise."""

from __future__ import annotations

import time

import pytest

from tests.acceptance.journal import LATE, wait_until
from tests.acceptance.setup import PROCESSES, Setup


@pytest.fixture(scope="module")
def nodes() -> str:
    """Containers are pytest-celery's own."""
    return PROCESSES


def test_a_setup_of_processes_is_ready_and_knows_its_nodes(celery_setup: Setup):
    assert celery_setup.ready(control=True, docker=True)
    assert len(celery_setup) == 3
    worker = celery_setup.worker
    assert celery_setup.app.control.ping([worker.hostname()], timeout=LATE) == [
        {worker.hostname(): {"ok": "pong"}}
    ]
    assert worker.app is celery_setup.app
    assert celery_setup.worker_cluster.versions == {worker.version}


def test_what_a_worker_logs_can_be_waited_for(celery_setup: Setup):
    task = celery_setup.send_note(countdown=0.5)

    celery_setup.worker.wait_for_log(f"Task note[{task}] succeeded", timeout=int(LATE))
    celery_setup.worker.assert_log_exists(task)
    with pytest.raises(AssertionError, match="did not log -> something else"):
        celery_setup.worker.assert_log_exists("something else", timeout=1)


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGTERM"])
def test_a_worker_takes_a_signal_and_comes_back_under_its_name(celery_setup: Setup, signal: str):
    worker = celery_setup.worker
    name, (main,) = worker.hostname(), worker.get_running_processes_info(["pid"])

    worker.kill(signal)
    wait_until(lambda: worker.container.status == "exited", "the worker's end")
    worker.restart()

    assert worker.container.status == "running"
    assert worker.hostname() == name
    assert worker.get_running_processes_info(["pid"]) != [main]
    assert worker.logs().count(f"{name} ready.") >= 2


def test_a_result_comes_back_through_the_backend(celery_setup: Setup):
    start = time.time()

    assert celery_setup.send("note", "kept", countdown=0.5).get(timeout=LATE) == "kept"

    assert time.time() - start >= 0.5


@pytest.mark.own_broker
def test_what_cannot_be_killed_says_so(celery_setup: Setup):
    with pytest.raises(TypeError, match="a folder takes no signals"):
        celery_setup.backend.kill()
    with pytest.raises(ValueError, match="takes SIGKILL, SIGTERM, SIGSTOP, SIGCONT, not 'SIGHUP'"):
        celery_setup.broker.kill("SIGHUP")
