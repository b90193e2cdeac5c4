"""A real worker writes down what it executes."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import pytest
from celery import Celery

from dev.processes import Processes
from dev.worker import Worker

APP = """
from celery import Celery
app = Celery(broker={url!r})
app.conf.broker_transport = "kombu_binary_delay:Transport"
app.conf.broker_transport_options = {{"binary_delay": {{"journal": "stream"}}}}
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


def executed(vhost, count):
    found: list[dict[str, object]] = []

    def take(message):
        event = json.loads(message.body)
        if event["event"] == "executed":
            found.append(event)

    with vhost.connect() as connection:
        channel = connection.channel()
        channel.basic_qos(0, 100, a_global=False)
        channel.basic_consume(
            "kbd.v2.journal", callback=take, arguments={"x-stream-offset": "first"}
        )
        deadline = time.monotonic() + 120
        while len(found) < count and time.monotonic() < deadline:
            with suppress(TimeoutError):
                connection.drain_events(timeout=0.2)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_each_pool_tells_what_it_has_executed_and_how_it_ended(broker, vhost, processes, pool):
    if broker.release < (3, 9):
        pytest.skip("this RabbitMQ has no streams")
    (processes.folder / "journal_app.py").write_text(APP.format(url=vhost.url))
    app = Celery(broker=vhost.url, set_as_current=False)
    app.conf.broker_transport = "kombu_binary_delay:Transport"
    app.conf.broker_transport_options = {"binary_delay": {"journal": "stream"}}
    ids = {name: app.send_task(name, countdown=0.2).id for name in ("fine", "fails", "retries")}
    app.send_task("fine")  # not delayed, so not in it
    env = {"PYTHONPATH": f"{processes.folder}:."}
    Worker(processes, "journal_app", env, "-P", pool, "-c", "2", timeout=120)
    journalled = sorted(
        (event["id"], event["task"], event.get("retries", 0), event["state"])
        for event in executed(vhost, 4)
    )
    assert journalled == sorted(
        [
            (ids["fine"], "fine", 0, "SUCCESS"),
            (ids["fails"], "fails", 0, "FAILURE"),
            (ids["retries"], "retries", 0, "RETRY"),
            (ids["retries"], "retries", 1, "SUCCESS"),
        ]
    )
