"""A real worker does with the permissions that the documentation grants it, and no more."""

from __future__ import annotations

import uuid

import pytest

from tests.acceptance.journal import LATE
from tests.acceptance.local_system import LocalSystem

#: docs/how-to/permissions.md: a Celery application of the default queue, with the ladder.
WITH_CELERY = {
    "configure": r"^(kbd\.|celery|reply\.celery\.pidbox$)|\.pidbox$",
    "write": r"^(kbd\.|celery|reply\.celery\.pidbox$|amq\.default$)|\.pidbox$",
    "read": r"^(kbd\.|celery|reply\.celery\.pidbox$)|\.pidbox$",
}


@pytest.fixture
def user(broker):
    name, password = f"celery-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
    broker.api("PUT", f"users/{name}", {"password": password, "tags": ""})
    yield name, password
    broker.api("DELETE", f"users/{name}")


def test_a_worker_needs_no_more_than_the_documented_permissions(broker, new_system, user):
    # given
    name, password = user
    system: LocalSystem = new_system("careful", url=f"amqp://{name}:{password}@{{place}}")
    broker.api("PUT", f"permissions/{system.vhost.name}/{name}", WITH_CELERY)
    worker = system.worker(mingle=True)
    # when
    task = system.send_note(countdown=0.5)
    retried = system.send("retry", 1, 0.5).id
    # then
    system.journal.wait_for(task)
    system.journal.wait_for(retried, times=2)
    system.journal.assert_on_time([task, retried])
    assert system.app.control.ping(destination=[worker.name], timeout=LATE)
    assert "delayed messages may not" not in worker.log()
    worker.stop()
