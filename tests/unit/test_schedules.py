"""Schedules as data, their due times, and what follows from an occurrence."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from itertools import count
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import crontab, solar
from hypothesis import given, settings
from hypothesis import strategies as st

from kombu_binary_delay.errors import ScheduleError
from kombu_binary_delay.schedules import definitions
from kombu_binary_delay.schedules.definitions import Schedule, merge, of_entry
from kombu_binary_delay.schedules.series import Occurrence, step
from kombu_binary_delay.schedules.when import When

ZONES = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"
HOUR = 3_600_000


@pytest.fixture
def app():
    return Celery("shop", set_as_current=False)


def milliseconds(moment):
    return round(moment.timestamp() * 1000)


def dues(when, first, end):
    """List the local due times between two days."""
    zone = ZoneInfo(when.zone)
    last, stop = (milliseconds(datetime.combine(day, time(), zone)) for day in (first, end))
    times = []
    while (last := when.following(last)) < stop:
        times.append(datetime.fromtimestamp(last / 1000, zone))
    return times


@pytest.mark.parametrize(
    ("zone", "day", "there"),
    [
        ("Europe/Berlin", date(2026, 3, 29), "03:30"),
        ("America/New_York", date(2026, 3, 8), "03:30"),
        ("Australia/Lord_Howe", date(2026, 10, 4), "02:45"),
    ],
)
def test_a_local_time_that_does_not_exist_runs_once_at_the_next_that_does(app, zone, day, there):
    wanted = "02:15" if zone == "Australia/Lord_Howe" else "02:30"
    hour, minute = map(int, wanted.split(":"))
    when = When.of(crontab(minute, hour), app, zone)
    times = dues(when, day - timedelta(days=1), day + timedelta(days=2))
    assert [f"{due:%d %H:%M}" for due in times] == [
        f"{day - timedelta(days=1):%d} {wanted}",
        f"{day:%d} {there}",
        f"{day + timedelta(days=1):%d} {wanted}",
    ]


@pytest.mark.parametrize(
    ("zone", "day"),
    [
        ("Europe/Berlin", date(2026, 10, 25)),
        ("America/New_York", date(2026, 11, 1)),
        ("Australia/Lord_Howe", date(2026, 4, 5)),
    ],
)
@pytest.mark.parametrize("fields", [{"minute": "*/20"}, {"minute": 45, "hour": 1}])
def test_a_local_time_that_exists_twice_runs_once(app, zone, day, fields):
    times = dues(When.of(crontab(**fields), app, zone), day, day + timedelta(days=1))
    faces = [due.replace(tzinfo=None) for due in times]
    assert len(set(faces)) == len(faces) == (71 if fields == {"minute": "*/20"} else 1)


FIELD = st.sampled_from(["*", "*/7", "5", "10-40/15", "1,30"])


@settings(max_examples=30)
@given(FIELD, st.sampled_from(["*", "*/5", "2", "1,2,3"]), st.sampled_from(ZONES), st.data())
def test_due_times_are_those_of_celerys_own_crontab(minute, hour, zone, data):
    """What beat would find, if it looked each minute."""
    app = Celery("shop", set_as_current=False)
    app.conf.timezone = zone
    month = data.draw(st.sampled_from([3, 4, 10, 11]))
    begin = datetime(
        2026,
        month,
        data.draw(st.integers(1, 28)),
        data.draw(st.sampled_from([3, 12, 20])),
        tzinfo=UTC,
    )
    own = crontab(minute, hour, app=app)
    last, theirs = begin, []
    for passed in range(1, 12 * 60):
        now = begin + timedelta(minutes=passed)
        own.nowfun = lambda now=now: now.astimezone(ZoneInfo(zone))
        if own.is_due(last.astimezone(ZoneInfo(zone))).is_due:
            theirs.append(now)
            last = now
    when = When.of(crontab(minute, hour), app)
    end = begin + timedelta(minutes=12 * 60 - 1)
    ours, at = [], milliseconds(begin)
    while (at := when.following(at)) <= milliseconds(end):
        ours.append(datetime.fromtimestamp(at / 1000, UTC))
    assert ours == theirs


def test_an_interval_follows_from_the_last_due_time_across_a_change_of_clocks(app):
    when = When.of(3600, app, "Europe/Berlin")
    begin = milliseconds(datetime(2026, 3, 28, 23, 59, 59, tzinfo=UTC))
    assert when.following(begin) == begin + HOUR


def test_a_schedules_own_zone_is_kept_as_its_name(app):
    zone = ZoneInfo("Asia/Tokyo")
    own = crontab(0, 9, nowfun=lambda: datetime.now(zone))
    assert When.of(own, app).data() == {"crontab": "0 9 * * *", "zone": "Asia/Tokyo"}
    assert When.of(crontab({0, 30}, [9, 10]), app).value == "0,30 9,10 * * *"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"task": "note"}, "an entry has 'task' and 'schedule'"),
        ({"task": "note", "schedule": 0}, "an interval must be at least 100 ms"),
        ({"task": "note", "schedule": object()}, "no crontab, interval or solar event"),
        ({"task": "note", "schedule": 9, "args": [object()]}, "is not data for JSON"),
        ({"task": "note", "schedule": 9, "options": {"task_id": "a"}}, "leave out the option"),
        (
            {"task": "note", "schedule": 9, "options": {"binary_delay": {"overlap": "no"}}},
            "overlap must be 'allow' or 'skip'",
        ),
    ],
)
def test_what_cannot_be_kept_as_data_is_an_error_that_names_the_schedule(app, entry, said):
    with pytest.raises(ScheduleError, match=said) as raised:
        of_entry("nightly", entry, app)
    assert "the schedule 'nightly' cannot be applied" in str(raised.value)


def test_schedules_come_back_from_their_line(app):
    when = datetime(2030, 1, 1, tzinfo=UTC)
    options = {"queue": "mail", "binary_delay": {"catch_up": 5, "overlap": "skip"}}
    entries = {
        "a": {"task": "note", "schedule": crontab(), "kwargs": {"when": when}, "options": options},
        "b": {"task": "note", "schedule": timedelta(hours=1), "relative": True, "args": (1, [2])},
    }
    schedules = {name: of_entry(name, entry, app) for name, entry in entries.items()}
    assert definitions.from_line(definitions.to_line(schedules)) == schedules
    assert schedules["a"].kwargs == {"when": when}
    assert definitions.from_line(b'{"cancel":[],"at":1}') is None


EVERY = Schedule("a", "note", When("every", 1000, "UTC"), series="s", since=0)


def names():
    return map("series-{}".format, count())


def test_apply_keeps_the_series_of_a_schedule_whose_times_stay():
    before = {"a": EVERY, "b": replace(EVERY, name="b"), "c": replace(EVERY, name="c")}
    wanted = {
        "a": replace(EVERY, args=[1], series=""),
        "b": replace(EVERY, name="b", when=When("every", 2000, "UTC"), series=""),
        "d": replace(EVERY, name="d", series=""),
    }
    after, done = merge(before, wanted, names(), 5000)
    assert done == definitions.Applied(("d",), ("a", "b"), ("c",), ())
    assert (after["a"].series, after["a"].since, after["a"].args) == ("s", 0, [1])
    assert (after["b"].series, after["b"].since, after["b"].before) == (
        "series-0",
        5000,
        {"s": 5000},
    )
    again, done = merge(after, wanted, names(), 9000)
    assert again == after
    assert done == definitions.Applied(unchanged=("a", "b", "d"))


def test_an_occurrence_of_an_earlier_series_runs_if_it_was_due_by_then():
    changed = EVERY.renewed("t", 5000)
    assert step(changed, Occurrence("a", "s", 5000), 4000, 5100).runs == (5000,)
    assert step(changed, Occurrence("a", "s", 5000), 4000, 5100).following is None
    assert (
        step(changed, Occurrence("a", "s", 6000), 5000, 6000).dropped == "the schedule has changed"
    )
    resumed = changed.renewed("t", 7000, paused=True).renewed("u", 9000)
    assert step(resumed, Occurrence("a", "t", 8000), 5000, 9100).dropped


@pytest.mark.parametrize(("catch_up", "runs"), [(1, (9000,)), (3, (7000, 8000, 9000))])
def test_after_an_outage_the_last_so_many_run(catch_up, runs):
    schedule = replace(EVERY, catch_up=catch_up)
    done = step(schedule, Occurrence("a", "s", 2000), 1000, 9500)
    assert done == (runs, 10_000, 8 - catch_up, "")


def test_a_solar_event_is_due_as_celery_says(app):
    when = When.of(solar("sunset", 52.5, 13.4), app)
    due = when.following(milliseconds(datetime(2026, 6, 21, tzinfo=UTC)))
    assert datetime.fromtimestamp(due / 1000, UTC).hour in {19, 20}
