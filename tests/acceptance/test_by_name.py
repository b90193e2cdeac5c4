"""`send_task` by name, from a process that has declared nothing, before any worker and after."""

from __future__ import annotations

from celery import Celery, chain, chord, group

from tests.acceptance.app import OURS
from tests.acceptance.journal import wait_until
from tests.acceptance.local_system import LocalSystem
from tests.waits import PATIENCE


def stranger(system: LocalSystem, **settings: object) -> Celery:
    """Make an app that knows the broker and our transport, and no task and no queue."""
    app = Celery("stranger", broker=system.vhost.url, set_as_current=False)
    app.conf.broker_transport = OURS
    app.conf.update(settings)
    return app


def test_a_task_sent_by_its_name_arrives_before_any_worker_ran_and_after(new_system):
    # given
    system: LocalSystem = new_system()
    app = stranger(system)
    early = app.send_task("note", countdown=0.5).id
    wait_until(lambda: system.vhost.waiting("celery").get("celery"), "the task in its queue")
    # when
    system.worker("--pool=threads")
    late = app.send_task("note", countdown=0.5).id
    # then
    system.journal.wait_for(early, late)
    system.journal.assert_on_time([late])
    assert system.parked() == 0
    app.close()


def test_routes_of_the_settings_lead_delayed_tasks_as_others(new_system):
    # given
    system: LocalSystem = new_system("exchanges")
    system.worker("--pool=threads", "--queues=celery,images,left,foo")
    routes = {
        "note": {"exchange": "media", "exchange_type": "topic", "routing_key": "image.new"},
        "add_up": {"queue": "foo"},
    }
    app = stranger(system, task_routes=routes)
    # when
    image = app.send_task("note", countdown=0.5).id
    foo = app.send_task("add_up", ([1, 2],), countdown=0.5).id
    # then
    places = {
        run.id: (run.exchange, run.routing_key) for run in system.journal.wait_for(image, foo)
    }
    assert places == {image: ("media", "image.new"), foo: ("", "foo")}
    system.journal.assert_on_time([image, foo])
    app.close()


def test_a_canvas_in_a_canvas_keeps_every_countdown(new_system):
    # given
    system: LocalSystem = new_system()
    system.worker("--concurrency=2")

    def note(value: int) -> object:
        return system.task("note", value).set(countdown=0.5)

    # when
    inner = group(chain(note(1), system.task("note", 2).set(countdown=0.25)), note(3))
    result = chain(
        note(0),
        chord(inner, system.task("add_up").set(countdown=0.5), app=system.app),
        system.task("note").set(countdown=0.5),
        app=system.app,
    ).apply_async(countdown=0.5)
    # then
    assert result.get(timeout=PATIENCE) is not None
    (last,) = system.journal.ran(result.id)
    first = system.journal.ran()[0]
    assert last.at >= first.at + 0.5 + 0.5 + 0.5
    notes = {run.id for run in system.journal.ran()}
    system.journal.assert_on_time(notes)
