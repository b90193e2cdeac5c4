"""Schedules in virtual time: what runs, whatever breaks."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from unittest.mock import patch
from zoneinfo import ZoneInfoNotFoundError

import pytest
import time_machine
from celery.schedules import crontab
from hypothesis import given, settings
from hypothesis import strategies as st

from kombu_binary_delay import schedules
from kombu_binary_delay.errors import ScheduleError
from kombu_binary_delay.schedules.scheduler import Scheduler
from kombu_binary_delay.schedules.when import When
from kombu_binary_delay.testing import Delayed
from tests.testing.programs import Shop


@pytest.fixture
def shop():
    with Shop() as shop:
        shop.app.conf.result_expires = None
        yield shop


def entry(schedule, name="a", **ours):
    given = {"options": {"binary_delay": ours}} if ours else {}
    return {"task": "note", "schedule": schedule, "args": [name], **given}


def ran(delayed, name="a"):
    return [run.at for run in delayed.ran() if run.args[0] == name]


def apply(shop, **entries):
    shop.app.conf.beat_schedule = entries
    return schedules.apply(shop.app)


def test_the_tasks_of_beat_schedule_run_when_they_are_due(delayed, shop):
    begin = delayed.now
    shop.app.conf.beat_schedule = {"a": entry(60.0), "b": entry(crontab(minute="*/5"), "b")}
    assert schedules.apply(shop.app, dry_run=True).added == ("a", "b")
    assert schedules.apply(shop.app).added == ("a", "b")
    assert schedules.apply(shop.app).unchanged == ("a", "b")
    delayed.advance(hours=2)
    at = ran(delayed)
    assert len(at) == 120
    # It does not drift: each is late by a tick at most.
    minutes = [begin + timedelta(minutes=passed) for passed in range(1, 121)]
    assert all(
        timedelta(0) <= a - m < timedelta(seconds=0.2) for a, m in zip(at, minutes, strict=True)
    )
    assert {(at.minute % 5, at.second) for at in ran(delayed, "b")} == {(0, 0)}
    assert len(ran(delayed, "b")) == 24


def test_what_is_listed_is_how_far_each_has_come(delayed, shop):
    apply(shop, a=entry(60.0), b=entry(crontab(0, 4), "b"))
    delayed.advance(minutes=2, seconds=30)
    listed = schedules.listed(shop.app)
    first, second = listed.schedules
    assert (first.name, first.when, first.state) == ("a", "every 60 s", "waiting")
    assert first.next_due == (first.last_due or 0) + 60_000
    assert 0 <= (first.last_sent or 0) - (first.last_due or 0) < 200
    assert (second.when, second.last_due) == ("0 4 * * * (UTC)", None)
    assert (listed.workers, listed.overdue) == (1, [])


def test_a_schedule_is_paused_resumed_triggered_and_removed(delayed, shop):
    apply(shop, a=entry(60.0))
    schedules.pause(shop.app, "a")
    delayed.advance(minutes=5)
    assert ran(delayed) == []
    assert apply(shop, a=entry(30.0)).changed == ("a",)
    assert schedules.listed(shop.app).schedules[0].state == "paused"
    schedules.trigger(shop.app, "a")
    delayed.run()
    assert len(ran(delayed)) == 1
    schedules.resume(shop.app, "a")
    delayed.advance(minutes=1, seconds=1)
    assert len(ran(delayed)) == 3
    schedules.remove(shop.app, "a")
    delayed.advance(minutes=5)
    assert len(ran(delayed)) == 3
    with pytest.raises(ScheduleError, match="there is no schedule 'a'; there are none"):
        schedules.pause(shop.app, "a")


def test_a_schedule_that_changes_while_an_occurrence_is_on_its_way_loses_none(delayed, shop):
    begin = delayed.now
    apply(shop, a=entry(60.0))
    # Due, and not yet arrived.
    with patch.object(Scheduler, "step", lambda *_: False):
        delayed.advance(seconds=61)
    apply(shop, a=entry(10.0))
    delayed.advance(seconds=31)
    seconds = [round((at - begin).total_seconds()) for at in ran(delayed)]
    assert seconds == [61, 71, 81, 91]


def test_arguments_that_change_count_from_the_next_run_on(delayed, shop):
    apply(shop, a=entry(60.0))
    delayed.advance(seconds=50)
    apply(shop, a=entry(60.0, "b"))
    delayed.advance(seconds=11)
    assert len(ran(delayed, "b")) == 1


@pytest.mark.parametrize(("catch_up", "runs"), [({}, 1), ({"catch_up": 3}, 3)])
def test_after_an_outage_one_occurrence_runs_or_the_last_so_many(delayed, shop, catch_up, runs):
    apply(shop, a=entry(60.0, **catch_up))
    delayed.outage(minutes=10, seconds=30)
    delayed.advance(seconds=25)
    assert len(ran(delayed)) == runs
    assert schedules.listed(shop.app).schedules[0].missed == 10 - runs
    delayed.advance(seconds=60)
    assert len(ran(delayed)) == runs + 1


def test_a_run_is_left_out_while_the_last_one_runs(delayed, shop):
    apply(shop, a=entry(60.0, overlap="skip"))
    delayed.advance(minutes=1, seconds=1)
    holds = "kbd.schedules.shop.running.a"
    with shop.app.connection_for_write() as running:
        running.default_channel.queue_declare(queue=holds, exclusive=True)
        delayed.advance(minutes=2)
    delayed.advance(minutes=1)
    assert len(ran(delayed)) == 2
    assert schedules.listed(shop.app).schedules[0].skipped == 2


def test_a_series_that_is_broken_goes_on(delayed, shop):
    apply(shop, a=entry(60.0))
    delayed.advance(minutes=2, seconds=1)
    # Somebody deletes what waits.
    delete_what_waits(delayed)
    delayed.advance(seconds=65)
    assert len(ran(delayed)) == 2
    delayed.advance(seconds=5)
    assert len(ran(delayed)) == 3
    delayed.advance(minutes=2)
    assert len(ran(delayed)) == 5


def test_a_deleted_queue_is_made_again_by_the_next_worker(delayed, shop):
    apply(shop, a=entry(60.0))
    with shop.app.connection_for_write() as connection:
        connection.default_channel.queue_delete("kbd.schedules.shop")
    with shop.app.connection_for_write() as connection:
        assert Scheduler(shop.app, connection).begin()
    delayed.advance(seconds=75)
    assert len(ran(delayed)) == 1


def delete_what_waits(delayed):
    for queue in delayed._broker.queues.values():  # noqa: SLF001 - no other program is here
        if ".level-" in queue.name:
            queue.ready.clear()


def test_without_amendments_there_are_no_schedules(delayed, shop):
    shop.app.conf.broker_transport_options = {"binary_delay": {"amendments": False}}
    with pytest.raises(ScheduleError, match="schedules need streams, as amendments do"):
        apply(shop, a=entry(60.0))


def test_what_finds_no_queue_is_parked_and_holds_up_no_other(delayed, shop):
    def to(exchange):
        options = {"exchange": exchange, "routing_key": "nobody", "exchange_type": "direct"}
        return {**entry(60.0), "options": options}

    apply(shop, lost=to("amq.direct"), refused=to("nowhere"), good=entry(60.0, "good"))
    delayed.advance(minutes=2, seconds=40)
    assert len(ran(delayed, "good")) == 2
    assert len(delayed.parked()) == 2


def test_a_schedule_whose_zone_a_worker_does_not_know_holds_up_no_other(delayed, shop):
    apply(shop, odd=entry(crontab()), good=entry(60.0, "good"))
    following = When.following

    def unknown(when, last):
        if when.kind == "crontab":
            raise ZoneInfoNotFoundError(when.zone)
        return following(when, last)

    with patch.object(When, "following", unknown):
        delayed.advance(minutes=2, seconds=1)
    assert len(ran(delayed, "good")) == 2


SCHEDULES = {
    "minute": crontab(),
    "five": crontab(minute="*/5"),
    "every": 47.0,
    "hour": crontab(minute=17),
}
BREAKS = st.sampled_from(
    ["nothing", "duplicate", "killed before", "killed after", "outage", "deleted"]
)


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.lists(st.tuples(st.integers(1, 400), BREAKS), min_size=1, max_size=6),
)
@settings(max_examples=25)
def test_each_due_time_runs_whatever_breaks(kind, story):
    """What runs twice was sent before a worker was killed, or doubled on its way to the worker."""
    at = datetime(2026, 3, 29, tzinfo=UTC)
    with time_machine.travel(at, tick=False), Delayed() as delayed, Shop() as shop:
        begin = round(delayed.now.timestamp() * 1000)
        apply(shop, a=entry(SCHEDULES[kind], catch_up=1000))
        sent = Sent()
        with patch.object(Scheduler, "_send", sent.send):
            for seconds, breaks in story:
                sent.breaks = breaks
                if breaks == "duplicate":
                    delayed.duplicate_next()
                if breaks == "deleted":
                    delete_what_waits(delayed)
                if breaks == "outage":
                    delayed.outage(seconds=seconds)
                else:
                    delayed.advance(seconds=seconds)
            sent.breaks = "nothing"
            delayed.advance(seconds=30)
        when, wanted = When.of(SCHEDULES[kind], shop.app), []
        end = round(delayed.now.timestamp() * 1000) - 15_000
        due = begin
        while (due := when.following(due)) < end:
            wanted.append(due)
        runs = Counter(run.id for run in delayed.ran())
        assert set(wanted) <= set(sent.ids.values())
        assert runs.keys() == sent.ids.keys()
        doubled = sum(breaks == "duplicate" for _, breaks in story)
        assert runs.total() - len(runs) <= sent.told + doubled


class Sent:
    """Notes what a scheduler sends, and kills it before or after the broker has that."""

    def __init__(self):
        self.breaks = "nothing"
        self.ids = {}
        self.told = 0
        self.real = Scheduler._send  # noqa: SLF001 - what is broken

    @property
    def send(self):
        def send(scheduler, runs, following):
            if self.breaks == "killed before":
                self.breaks = "nothing"
                raise OSError("killed")
            self.real(scheduler, runs, following)
            self.ids.update({run.id: run.due for run in runs})
            if self.breaks == "killed after":
                self.breaks, self.told = "nothing", self.told + len(runs)
                raise OSError("killed")

        return send
