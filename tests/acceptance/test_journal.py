"""A real worker writes down what it executes."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from celery import Celery

from dev.processes import Processes
from dev.worker import Worker
from tests.waits import drain_until

APP = """
from celery import Celery
app = Celery(broker={url!r})
app.conf.broker_transport = "kombu_binary_delay:Transport"
app.conf.broker_transport_options = {{"binary_delay": {{"journal": "stream", "radix": 2}}}}
app.conf.broker_connection_retry_on_startup = True

@app.task(name="fine")
def fine(): pass

@app.task(name="fails")
def fails(): raise ValueError("no")

@app.task(name="retries", bind=True)
def retries(self):
    if not self.request.retries: self.retry(countdown=0.2)
"""


@pytest.fixture
def processes():
    with Processes("journal") as processes:
        yield processes


def journalled(vhost, count):
    """Return all events, as soon as so many tasks are executed."""
    # By their text: an event whose confirm comes late is written again.
    by_text = {}

    def take(message):
        for line in message.body.split("\n"):
            by_text[line] = json.loads(line)

    def executed():
        return [event for event in by_text.values() if event["event"] == "executed"]

    with vhost.connect() as connection:
        channel = connection.channel()
        channel.basic_qos(0, 100, a_global=False)
        channel.basic_consume(
            "kbd.v2.journal", callback=take, arguments={"x-stream-offset": "first"}
        )
        drain_until(connection, lambda: len(executed()) >= count)
    return list(by_text.values())


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_each_pool_tells_what_it_has_executed_and_how_it_ended(broker, vhost, processes, pool):
    (processes.folder / "journal_app.py").write_text(APP.format(url=vhost.url))
    app = Celery(broker=vhost.url, set_as_current=False)
    app.conf.broker_transport = "kombu_binary_delay:Transport"
    app.conf.broker_transport_options = {"binary_delay": {"journal": "stream", "radix": 2}}
    jitter = {"headers": {"x-delay-jitter": 300}}
    ids = {
        name: app.send_task(name, countdown=0.2, **options).id
        for name, options in (("fine", {}), ("fails", jitter), ("retries", jitter))
    }
    app.send_task("fine")  # not delayed, so not in it
    env = {"PYTHONPATH": f"{processes.folder}:."}
    Worker(processes, "journal_app", env, "-P", pool, "-c", "2")
    events = journalled(vhost, 4)
    executed = sorted(
        (event["id"], event["task"], event.get("retries", 0), event["state"])
        for event in events
        if event["event"] == "executed"
    )
    assert executed == sorted(
        [
            (ids["fine"], "fine", 0, "SUCCESS"),
            (ids["fails"], "fails", 0, "FAILURE"),
            (ids["retries"], "retries", 0, "RETRY"),
            (ids["retries"], "retries", 1, "SUCCESS"),
        ]
    )
    # All events of a message have one due time, with its jitter, and a retry has jitter, too.
    due = defaultdict(set)
    for event in events:
        due[event["id"], event.get("retries", 0)].add(event["due"])
        assert event["event"] == "scheduled" or event["at"] >= event["due"]
    assert len(due) == 4
    assert all(len(times) == 1 for times in due.values()), events
