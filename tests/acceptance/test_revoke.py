"""A revoke holds, by every way that Celery has to revoke, and looks as any revoke of Celery's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kombu_binary_delay import replace
from tests.acceptance.journal import LATE, wait_until
from tests.acceptance.local_system import LocalSystem
from tests.acceptance.revoked import assert_revoked
from tests.acceptance.worker import APP, environment_of
from tests.waits import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery.result import AsyncResult

    Ways = dict[Callable[[LocalSystem, list[AsyncResult]], None], int]


#: How long tasks wait here, in seconds; no worker takes one before it is revoked.
SHORT = 0.5

STAMP = "tenant"


def by_result(system: LocalSystem, results: list[AsyncResult]) -> None:
    results[0].revoke()


def by_control(system: LocalSystem, results: list[AsyncResult]) -> None:
    system.app.control.revoke([result.id for result in results])


def by_terminate(system: LocalSystem, results: list[AsyncResult]) -> None:
    system.app.control.terminate([result.id for result in results], signal="SIGKILL")


def by_group(system: LocalSystem, results: list[AsyncResult]) -> None:
    system.app.GroupResult(uuid.uuid4().hex, results).revoke()


def by_stamp(system: LocalSystem, results: list[AsyncResult]) -> None:
    # An empty value stamps nothing.
    system.app.control.revoke_by_stamped_headers({STAMP: ["", *(result.id for result in results)]})


def by_listed_stamp(system: LocalSystem, results: list[AsyncResult]) -> None:
    system.app.control.revoke_by_stamped_headers([f"{STAMP}={results[0].id}"])


def by_command(system: LocalSystem, results: list[AsyncResult]) -> None:
    run_control(system, "revoke", *(result.id for result in results))


def by_command_with_stamp(system: LocalSystem, results: list[AsyncResult]) -> None:
    run_control(system, "revoke_by_stamped_headers", f"{STAMP}={results[0].id}")


def by_command_to_terminate(system: LocalSystem, results: list[AsyncResult]) -> None:
    run_control(system, "terminate", "SIGTERM", *(result.id for result in results))


#: Each way to revoke, and how many tasks it is tried with.
WAYS: Ways = {
    by_result: 1,
    by_control: 2,
    by_terminate: 1,
    by_group: 2,
    by_stamp: 2,
    by_listed_stamp: 1,
}
COMMANDS: Ways = {
    by_command: 2,
    by_command_with_stamp: 1,
    by_command_to_terminate: 1,
}


def run_control(system: LocalSystem, *arguments: str) -> None:
    argv = [sys.executable, "-m", "celery", "-A", APP, "control", "-t", "0.1", *arguments]
    environment = {**os.environ, **environment_of(system.deployment)}
    done = subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    # Where no worker is up, none answers.
    assert done.returncode == 0 or "No nodes replied" in done.stderr, done


def send(system: LocalSystem, count: int, **options: Any) -> list[AsyncResult]:
    ids = [str(uuid.uuid4()) for _ in range(count)]
    stamps = {"stamped_headers": [STAMP]}
    return [system.send("note", task_id=id_, **{STAMP: id_}, **stamps, **options) for id_ in ids]


def revoke_by_all(ways: Ways, system: LocalSystem) -> list[AsyncResult]:
    sent = {way: send(system, count, countdown=SHORT) for way, count in ways.items()}
    threads = [threading.Thread(target=way, args=(system, sent[way])) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [result for results in sent.values() for result in results]


@contextmanager
def events(system: LocalSystem) -> Iterator[list[str]]:
    """Collect the ids of the ``task-revoked`` events."""
    heard: list[str] = []
    with system.app.connection_for_read() as connection:
        receiver = system.app.events.Receiver(
            connection, handlers={"task-revoked": lambda event: heard.append(event["uuid"])}
        )
        ready = threading.Event()

        def begin(*_: object, **__: object) -> None:
            ready.set()

        receiver.on_consume_ready = begin
        thread = threading.Thread(target=receiver.capture, kwargs={"wakeup": False})
        thread.start()
        assert ready.wait(LATE)
        yield heard
        receiver.should_stop = True
        thread.join()


def test_a_task_revoked_in_any_way_while_a_worker_runs_is_discarded(new_system):
    system: LocalSystem = new_system()
    worker = system.worker("-E")
    # The discarding is not left to what Celery keeps.
    system.fill_revoked(worker.name)
    with events(system) as heard:
        with system.held(worker.name):
            other = system.send_note(countdown=SHORT)
            results = revoke_by_all(WAYS, system)
        assert_revoked(system, results, worker.log)
        system.journal.wait_for(other)
        wait_until(lambda: {result.id for result in results} <= set(heard), "events")


def test_a_task_revoked_in_any_way_while_no_worker_runs_is_discarded(new_system):
    system: LocalSystem = new_system()
    other, batched = system.send_note(countdown=SHORT), system.send("batched", countdown=SHORT)
    results = revoke_by_all({**WAYS, **COMMANDS}, system)
    batched.revoke()
    with events(system) as heard:
        worker = system.worker("-E")
        assert_revoked(system, results, worker.log)
        system.journal.wait_for(other, batched.id)
        wait_until(
            lambda: f"batched {batched.id} was cancelled, but may run" in worker.log(), "a warning"
        )
        wait_until(lambda: {result.id for result in results} <= set(heard), "events")
    # What replaces it, without its stamp, runs on the worker that has discarded it.
    for result in results:
        replace(system.task("note", "new"), result.id)
    system.journal.wait_for(*(result.id for result in results))


def test_a_revoke_outlives_all_workers_that_heard_it(new_system):
    system: LocalSystem = new_system()
    first = system.worker()
    system.hold(first.name)
    other = system.send_note(countdown=SHORT)
    results = revoke_by_all(WAYS, system)
    first.kill()
    assert not system.journal.revoked()
    second = system.worker()
    assert_revoked(system, results, second.log)
    system.journal.wait_for(other)
