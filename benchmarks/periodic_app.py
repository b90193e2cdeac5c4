"""Purpose: the app whose periodic tasks are measured, for each way to send them."""

from __future__ import annotations

import os

from celery import Celery
from celery.schedules import crontab

BROKER, REDIS, OURS, COUNT = "PERIODIC_BROKER", "PERIODIC_REDIS", "PERIODIC_OURS", "PERIODIC_COUNT"

app = Celery("periodic", broker=os.environ.get(BROKER, "amqp://"), set_as_current=False)
if os.environ.get(OURS):
    app.conf.broker_transport = "kombu_binary_delay:Transport"
app.conf.broker_connection_retry_on_startup = True
app.conf.redbeat_redis_url = os.environ.get(REDIS)
# RedBeat's lock lasts five times as long.
app.conf.beat_max_loop_interval = 5
app.conf.result_expires = None


@app.task(name="note")
def note(number: int) -> None: ...


_COUNT = int(os.environ.get(COUNT, "0"))
_OPTIONS = {"binary_delay": {"catch_up": 1000}} if os.environ.get(OURS) else {}
# None: one, each second.
app.conf.beat_schedule = {
    f"schedule-{number}": {
        "task": "note",
        "schedule": crontab() if _COUNT else 1.0,
        "args": [number],
        "options": _OPTIONS,
    }
    for number in range(_COUNT or 1)
}
