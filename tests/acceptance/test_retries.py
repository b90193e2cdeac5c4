"""A task may retry as often as it likes."""

from __future__ import annotations

import pytest

from tests.acceptance.local_system import LocalSystem
from tests.acceptance.system import System

RETRIES = 50


@pytest.fixture(scope="module")
def worker_options():
    return ["--pool=threads", "--concurrency=1", "--without-mingle", "--queues=celery,foo"]


def test_fifty_retries_stay_on_their_queue_and_nothing_grows(system: System):
    # when
    task = system.send("retry", RETRIES, 0.125, queue="foo").id
    # then
    runs = system.journal.wait_for(task, times=RETRIES + 1, timeout=900)
    assert [run.retries for run in runs] == list(range(RETRIES + 1))
    assert {(run.exchange, run.routing_key) for run in runs} == {("", "foo")}
    system.journal.assert_on_time([task])
    # and
    first, *others = system.journal.received(task)
    assert {(other.exchange, other.routing_key) for other in others} == {("", "foo")}
    assert {tuple(other.header_names) for other in others} == {tuple(first.header_names)}
    # The number of retries has two digits in the end, and an eta may lack its microseconds.
    assert max(other.header_bytes for other in others) <= others[0].header_bytes + 10


def test_a_retry_that_cannot_be_delayed_is_kept_by_a_worker_until_it_is_due(new_system):
    # given
    system: LocalSystem = new_system("any key", transport=None, url="binary-delay://{broker}")
    worker = system.worker("--pool=solo")
    # when
    task = system.send("retry", 1, 1, exchange="media", routing_key="k" * 200).id
    # then
    _, again = system.journal.wait_for(task, times=2)
    assert again.due is not None
    assert again.at >= again.due
    assert "is left to a worker to keep until it is due" in worker.log()
