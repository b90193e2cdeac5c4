"""Whom a revoke reaches, and where it cannot last."""

from __future__ import annotations

import threading
import uuid
from contextlib import suppress
from dataclasses import replace
from functools import partial
from urllib.parse import quote

import pytest

from dev.server import BrokerError
from kombu_binary_delay import AmendmentError, cancel
from kombu_binary_delay import replace as replace_task
from tests.acceptance.app import make_app
from tests.acceptance.journal import LATE, wait_until
from tests.acceptance.local_system import LocalSystem
from tests.acceptance.revoked import assert_revoked
from tests.acceptance.worker import Worker

#: How long tasks wait here, in seconds; no worker takes one before it is amended.
SHORT = 0.5


def test_a_worker_that_starts_amid_a_burst_of_revokes_runs_none_of_them(new_system):
    system: LocalSystem = new_system()
    results = [system.send("note", countdown=SHORT) for _ in range(100)]
    ids = [result.id for result in results]

    def revoke() -> None:
        for number, task_id in enumerate(ids):
            # Of a thousand each, as of a program that revokes all it has.
            others = [f"{number}-{place}" for place in range(1000 if number % 10 == 0 else 2)]
            system.app.control.revoke([task_id, *others])

    thread = threading.Thread(target=revoke)
    thread.start()
    # It reads amendments as soon as it consumes any queue.
    worker = system.worker("--pool=threads", "--queues=other")
    thread.join()
    system.release(worker.name)
    system.wait_until_idle()
    for task_id in ids:
        wait_until(partial(system.journal.revoked, task_id), "the discarding")
    assert not [run for run in system.journal.ran() if run.id in ids]
    assert not worker.complaints()


def test_what_a_stock_app_revokes_or_is_revoked_for_some_workers_is_left_to_those(new_system):
    """The broadcast reaches who is up; the next worker knows nothing of it."""
    system: LocalSystem = new_system()
    first = system.worker("--pool=solo")
    system.hold(first.name)
    by_stock, for_some, for_others = (system.send("note", countdown=SHORT) for _ in range(3))
    with make_app(replace(system.deployment, transport=None)) as stock:
        stock.control.revoke(by_stock.id)
        stock.pool.force_close_all()
    system.app.control.revoke(for_some.id, destination=[first.name])
    system.app.control.revoke(for_others.id, destination=["nobody@nowhere"])
    system.hears_of(first.name, by_stock.id, for_some.id)
    assert for_others.id not in revoked_in(system, first)
    assert not {name for name in system.exchanges() | system.queues() if "amendments" in name}
    first.kill()
    system.worker("--pool=solo")
    system.journal.wait_for(by_stock.id, for_some.id, for_others.id)


def revoked_in(system: LocalSystem, worker: Worker) -> list[str]:
    answer = system.app.control.inspect([worker.name], timeout=LATE).revoked()
    return list((answer or {}).get(worker.name, []))


def test_virtual_hosts_do_not_hear_of_each_others_revokes(new_system):
    here, there = new_system(), new_system()
    for system in (here, there):
        system.send("note", system.vhost.name, task_id="same", countdown=1)
    here.app.control.revoke("same")
    for system in (here, there):
        system.worker("--pool=solo")
    there.journal.wait_for("same")
    wait_until(lambda: here.journal.revoked("same"), "the discarding")
    assert not here.journal.ran("same")


# -- where the broker cannot, or may not -----------------------------------------------------------


def test_where_amendments_are_off_a_revoke_is_what_it_is_in_celery(new_system, caplog):
    system: LocalSystem = new_system("no amendments")
    worker = system.worker("--pool=solo")
    with system.held(worker.name):
        revoked, other = (system.send("note", countdown=SHORT) for _ in range(2))
        revoked.revoke()
        system.hears_of(worker.name, revoked.id)
    system.journal.wait_for(other.id)
    assert_revoked(system, [revoked], worker.log)
    assert not {name for name in system.exchanges() | system.queues() if "amendments" in name}
    assert "a revoke is not" not in caplog.text
    assert "amendments are not read" not in worker.log()


@pytest.fixture
def limited_user(broker):
    """Make users who may do all but what their names say."""
    made = []

    def make(system: LocalSystem, **refused: str) -> str:
        name, password = f"limited-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
        broker.api("PUT", f"users/{name}", {"password": password, "tags": ""})
        made.append(name)
        allowed = dict.fromkeys(("configure", "write", "read"), ".*")
        for right, pattern in refused.items():
            allowed[right] = f"^(?!{pattern})"
        broker.api("PUT", f"permissions/{system.vhost.name}/{name}", allowed)
        return system.vhost.url_of(name, password)

    yield make
    for name in made:
        broker.api("DELETE", f"users/{name}")


def test_who_may_publish_and_not_cancel_revokes_for_the_workers_that_are_up(
    new_system, limited_user, caplog
):
    system: LocalSystem = new_system()
    worker = system.worker("--pool=solo")
    url = limited_user(system, write=r"kbd\.v2\.amendments")
    with system.held(worker.name), make_app(replace(system.deployment, url=url)) as app:
        revoked, kept = (app.tasks["note"].apply_async(countdown=SHORT) for _ in range(2))
        app.control.revoke(revoked.id)
        system.hears_of(worker.name, revoked.id)
        with pytest.raises(AmendmentError, match=r"grant the permission write on 'kbd.v2.amend"):
            cancel(kept)
        with pytest.raises(AmendmentError, match="may not amend"):
            replace_task(app.tasks["note"].s("replaced"), kept.id, countdown=1)
        with pytest.raises(AmendmentError, match="may not amend"):
            app.tasks["note"].apply_async(("keyed",), headers={"x-delay-key": "k"})
        app.pool.force_close_all()
    assert_revoked(system, [system.app.AsyncResult(revoked.id)], worker.log)
    system.journal.wait_for(kept.id)
    # Nothing was half-done.
    assert [run.args for run in system.journal.ran()] == [[]]
    (warning,) = [message for message in caplog.messages if "a revoke is not" in message]
    assert "grant the permission write on 'kbd.v2.amendments'" in warning


def test_a_worker_that_may_not_read_amendments_runs_on_with_one_warning(new_system, limited_user):
    system: LocalSystem = new_system()
    cancelled, revoked = (system.send("note", countdown=1) for _ in range(2))
    cancel(cancelled)
    url = limited_user(system, read=r"kbd\.v2\.amendments")
    limited = replace(system.deployment, url=url)
    worker = system.worker("--pool=solo", deployment=limited)
    system.journal.wait_for(cancelled.id)
    system.journal.wait_for(revoked.id)
    with system.held(worker.name):
        later = system.send("note", countdown=SHORT)
        later.revoke()
        system.hears_of(worker.name, later.id)
    assert_revoked(system, [later], worker.log)
    (line,) = [line for line in worker.log().splitlines() if "amendments" in line]
    assert "grant this user the permission read on names that begin with 'kbd.v2.amend" in line
    # Its user is about to go.
    worker.kill()


def test_a_revoke_holds_when_the_worker_fails_over_and_connects_anew(new_system):
    # Kombu shares pools by the first URL: that of another test may be closed by now.
    nobody = f"amqp://guest:guest@127.0.0.1:1/{uuid.uuid4().hex}"
    system: LocalSystem = new_system(url=f"{nobody};amqp://{{broker}}")
    worker = system.worker("--pool=solo")
    system.hold(worker.name)
    results = [system.send("note", countdown=SHORT) for _ in range(3)]
    results[0].revoke()
    cancel(results[1])
    wait_until(lambda: is_cut_off(worker, system), "the loss of the connection")
    cancel(results[2])
    wait_until(lambda: pings(system, worker), "the worker's new connection")
    # Celery's own command: nothing but the new connection's first consumer has it read amendments.
    options = {"destination": [worker.name], "reply": True, "timeout": LATE}
    assert system.app.control.add_consumer("celery", **options)
    system.wait_until_idle()
    assert_revoked(system, results, worker.log)
    # Its log has what it complained of.
    worker.kill()


def pings(system: LocalSystem, worker: Worker) -> bool:
    return bool(system.app.control.ping(destination=[worker.name], timeout=2))


def is_cut_off(worker: Worker, system: LocalSystem) -> bool:
    """Return whether a worker has lost its connection; if not, end all that RabbitMQ lists.

    It lists a connection when the first figures of that have come.
    """
    if "Connection to broker lost" in worker.log():
        return True
    broker = system.vhost.broker
    for row in broker.api("GET", f"vhosts/{system.vhost.name}/connections"):
        # One may have ended since.
        with suppress(BrokerError):
            broker.api("DELETE", f"connections/{quote(row['name'])}")
    return False
