"""A time is kept in every zone, whatever the app's own, with and without `enable_utc`."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from tests.acceptance.app import SHAPES
from tests.acceptance.journal import LATE
from tests.acceptance.local_system import LocalSystem

ZONES = ["UTC", "America/New_York", "Asia/Kathmandu", "Pacific/Chatham", "Europe/Berlin"]


@pytest.mark.parametrize("shape", ["abroad", "abroad without UTC"])
def test_an_eta_of_any_zone_and_a_countdown_are_kept(new_system, shape: str):
    # given
    assert shape in SHAPES
    system: LocalSystem = new_system(shape)
    system.worker("--pool=threads")
    start = time.time()
    due = datetime.now(UTC) + timedelta(seconds=1.5)
    # when
    tasks = [system.send_note(eta=due.astimezone(ZoneInfo(zone))) for zone in ZONES]
    # A Celery worker reads a naive eta as UTC, whatever the settings.
    tasks.append(system.send_note(eta=due.replace(tzinfo=None)))
    countdown = system.send_note(countdown=0.5)
    # then
    runs = system.journal.wait_for(*tasks)
    assert all(due.timestamp() <= run.at < due.timestamp() + LATE for run in runs)
    (run,) = system.journal.wait_for(countdown)
    assert start + 0.5 <= run.at < start + 0.5 + LATE
    system.journal.assert_on_time([*tasks, countdown])
    system.wait_for_waiting(0)
