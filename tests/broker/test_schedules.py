"""Schedules on a real broker: what dies, who applies at once, and what is seen of a standstill."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import kombu
import pytest
from starlette.testclient import TestClient

from kombu_binary_delay import schedules
from kombu_binary_delay.cli.web import asgi_app
from kombu_binary_delay.schedules.store import Store
from tests.acceptance.journal import wait_until
from tests.broker.schedules_app import app
from tests.broker.schedules_story import APP, ROOT, Story

OURS = "kombu_binary_delay:Transport"


@pytest.fixture
def connection(vhost):
    with kombu.Connection(vhost.url, transport=OURS) as connection:
        yield connection


def command(vhost, *arguments):
    """Begin a command of ours on the app's schedules."""
    return subprocess.Popen(
        [sys.executable, "-m", "kombu_binary_delay.cli", "-A", APP, "-b", vhost.url, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def answer(process):
    said, _ = process.communicate(timeout=120)
    return json.loads(said), process.returncode


def test_workers_are_killed_and_the_broker_restarted_and_each_due_time_runs(own_broker):
    vhost = own_broker.vhost()
    with ExitStack() as stack:
        story = Story(stack, vhost.url)
        wait_until(story.went_on, "the first runs")
        for fault in (story.kill_a_worker, own_broker.restart, story.kill_a_worker):
            fault()
            wait_until(story.went_on, "the runs after a fault")
        for ledger in story.ledgers():
            assert ledger.missing == ()
            assert (ledger.strange, ledger.early) == (0, 0)
            # Sent before a worker died, and again after it.
            assert ledger.twice <= 2
    vhost.delete()


def test_five_programs_apply_at_once_and_one_of_them_changes_something(vhost):
    def apply(_):
        with kombu.Connection(vhost.url, transport=OURS) as connection:
            return schedules.apply(app, connection=connection)

    with ThreadPoolExecutor(5) as pool:
        applied = list(pool.map(apply, range(5)))
    assert sorted(len(done.added) for done in applied) == [0, 0, 0, 0, 2]
    assert sorted(len(done.unchanged) for done in applied) == [0, 2, 2, 2, 2]


def test_what_stands_still_is_seen_by_list_verify_and_on_the_page(vhost, connection):
    schedules.apply(app, connection=connection)
    store, ago = Store(app, connection), int(time.time() * 1000) - 60_000
    old = {name: replace(schedule, since=ago) for name, schedule in store.definitions().items()}
    store.write(old)
    listed, code = answer(command(vhost, "schedule", "list", "--json"))
    assert [schedule["state"] for schedule in listed["schedules"]] == ["overdue", "overdue"]
    assert (listed["workers"], code) == (0, 1)
    said, code = answer(command(vhost, "-m", vhost.broker.management_url, "verify", "--json"))
    differences = [
        difference for difference in said["differences"] if "schedule" in difference["what"]
    ]
    assert [difference["what"] for difference in differences] == [
        "the schedule second of shop",
        "the schedule two of shop",
    ]
    assert differences[0]["remedy"] == "start a worker of that app"
    assert code == 1
    page = asgi_app(None, broker=vhost.url, management=vhost.broker.management_url)
    with TestClient(page, base_url="http://127.0.0.1") as client:
        wait_until(lambda: "overdue" in client.get("/schedules").text, "the schedules on the page")
