"""`send_task` by name, from a process that has declared nothing, before any worker and after."""

from __future__ import annotations

import pytest
from celery import Celery, chain, chord, group

from tests.acceptance.app import OURS
from tests.acceptance.journal import PATIENCE, wait_until
from tests.acceptance.stage import Stage


def stranger(stage: Stage, **settings: object) -> Celery:
    """Make an app that knows the broker and our transport, and no task and no queue."""
    app = Celery("stranger", broker=stage.vhost.url, set_as_current=False)
    app.conf.broker_transport = OURS
    app.conf.update(settings)
    return app


@pytest.mark.slow
def test_a_task_sent_by_its_name_arrives_before_any_worker_ran_and_after(new_stage):
    # given
    stage: Stage = new_stage()
    app = stranger(stage)
    early = app.send_task("note", countdown=0.5).id
    wait_until(lambda: stage.vhost.waiting("celery").get("celery"), "the task in its queue")
    # when
    stage.worker("--pool=threads")
    late = app.send_task("note", countdown=0.5).id
    # then
    stage.journal.wait_for(early, late)
    stage.journal.assert_on_time([late])
    assert stage.parked() == 0
    app.close()


@pytest.mark.slow
def test_routes_of_the_settings_lead_delayed_tasks_as_others(new_stage):
    # given
    stage: Stage = new_stage("exchanges")
    stage.worker("--pool=threads", "--queues=celery,images,left,foo")
    routes = {
        "note": {"exchange": "media", "exchange_type": "topic", "routing_key": "image.new"},
        "add_up": {"queue": "foo"},
    }
    app = stranger(stage, task_routes=routes)
    # when
    image = app.send_task("note", countdown=0.5).id
    foo = app.send_task("add_up", ([1, 2],), countdown=0.5).id
    # then
    places = {run.id: (run.exchange, run.routing_key) for run in stage.journal.wait_for(image, foo)}
    assert places == {image: ("media", "image.new"), foo: ("", "foo")}
    stage.journal.assert_on_time([image, foo])
    app.close()


@pytest.mark.slow
def test_a_canvas_in_a_canvas_keeps_every_countdown(new_stage):
    # given
    stage: Stage = new_stage()
    stage.worker("--concurrency=2")

    def note(value: int) -> object:
        return stage.task("note", value).set(countdown=0.5)

    # when
    inner = group(chain(note(1), stage.task("note", 2).set(countdown=0.25)), note(3))
    result = chain(
        note(0),
        chord(inner, stage.task("add_up").set(countdown=0.5), app=stage.app),
        stage.task("note").set(countdown=0.5),
        app=stage.app,
    ).apply_async(countdown=0.5)
    # then
    assert result.get(timeout=PATIENCE) is not None
    (last,) = stage.journal.ran(result.id)
    first = stage.journal.ran()[0]
    assert last.at >= first.at + 0.5 + 0.5 + 0.5
    notes = {run.id for run in stage.journal.ran()}
    stage.journal.assert_on_time(notes)
