"""Delayed tasks in virtual time."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from zoneinfo import ZoneInfo

import freezegun
import pytest
import time_machine
from kombu import Connection, Queue

from kombu_binary_delay import DelayError, cancel
from kombu_binary_delay.testing import Delayed, DelayedOnBroker, KitError, StandsStillError, call
from tests.testing.programs import OURS, Shop

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shop():
    with Shop() as shop:
        yield shop


def numbers(delayed):
    return [ran.args[1] for ran in delayed.ran()]


def test_a_task_waits_until_it_is_due_and_then_runs_at_its_time(delayed, shop):
    begin = delayed.now
    shop.note.apply_async(("a", 7), countdown=3600)
    assert delayed.waiting() == [call(shop.note, "a", 7, due_in=3600)]
    delayed.assert_waiting(call(shop.note, "a", 7))
    with pytest.raises(AssertionError, match=r"not waiting: \[call\(note, 'a', 8\)\]"):
        delayed.assert_waiting(call(shop.note, "a", 8))
    delayed.advance(minutes=59)
    assert delayed.ran() == []
    delayed.advance(minutes=1)
    assert delayed.ran() == [call(shop.note, "a", 7)]
    assert delayed.ran()[0].at - begin == timedelta(hours=1)
    delayed.assert_no_more()


def test_a_year_passes_at_once(delayed, shop):
    shop.note.apply_async(("a", 1), eta=delayed.now + timedelta(days=365))
    delayed.run_until_idle()
    assert numbers(delayed) == [1]


def test_time_may_be_moved_to_a_moment_and_never_back(delayed, shop):
    shop.note.apply_async(("a", 1), countdown=60)
    delayed.advance_to(delayed.now + timedelta(seconds=60))
    assert numbers(delayed) == [1]
    with pytest.raises(KitError, match="does not go back"):
        delayed.advance(seconds=-1)
    with pytest.raises(KitError, match="does not go back"):
        delayed.advance_to(datetime(2000, 1, 1, tzinfo=UTC))
    with pytest.raises(KitError, match="has no zone"):
        delayed.advance_to(datetime(2100, 1, 1))  # noqa: DTZ001 - what is tested


def test_what_is_revoked_does_not_run_and_is_listed(delayed, shop):
    result = shop.note.apply_async(("a", 1), countdown=60)
    result.revoke()
    assert delayed.waiting() == []
    delayed.run_until_idle()
    assert delayed.ran() == []
    assert [(gone.id, gone.reason) for gone in delayed.cancelled()] == [(result.id, "revoked")]
    assert result.state == "REVOKED"


def test_a_retry_backs_off_in_virtual_time(delayed, shop):
    begin = delayed.now
    shop.backs_off.delay("a")
    delayed.run_until_idle()
    ran = [(run.state, (run.at - begin).total_seconds()) for run in delayed.ran()]
    assert ran == [("RETRY", 0), ("RETRY", 1), ("SUCCESS", 3)]


def test_what_is_cancelled_on_a_ladder_of_a_name_of_its_own_does_not_wait(delayed):
    options = {"binary_delay": {"namespace": "shop", "radix": 2}}
    with Connection("amqp://", transport=OURS, transport_options=options) as connection:
        publish = partial(connection.Producer().publish, routing_key="mail")
        for name in ("kept", "gone"):
            publish(name, headers={"x-delay": 60_000, "mine": 1}, message_id=name)
        cancel("gone", connection=connection)
        [waits] = delayed.waiting(queue="mail")
        assert waits == call("", "kept", due_in=60)
        assert (waits.id, waits.headers) == ("kept", {"mine": 1})


def test_the_next_message_can_come_twice(delayed, shop):
    shop.note.apply_async(("a", 1), countdown=60)
    delayed.duplicate_next()
    delayed.run_until_idle()
    assert numbers(delayed) == [1, 1]


@pytest.mark.parametrize(("late", "runs"), [(True, 1), (False, 0)])
def test_a_worker_that_is_killed_loses_only_what_was_acknowledged_early(delayed, shop, late, runs):
    shop.note.acks_late = late
    shop.note.apply_async(("a", 1), countdown=60)
    delayed.crash_worker()
    delayed.run_until_idle()
    assert len(delayed.ran()) == runs
    shop.note.apply_async(("a", 2), countdown=60)
    delayed.run_until_idle()
    assert len(delayed.ran()) == runs + 1


def test_after_an_outage_tasks_run_late_and_none_is_lost(delayed, shop):
    begin = delayed.now
    shop.note.apply_async(("a", 1), countdown=10)
    shop.note.apply_async(("a", 2), countdown=1000)
    delayed.outage(seconds=60)
    delayed.run_until_idle()
    late = [(ran.args[1], (ran.at - begin).total_seconds()) for ran in delayed.ran()]
    # Each level that a message has not left when the outage begins may be left late.
    assert [number for number, _ in late] == [1, 2]
    assert 60 <= late[0][1] < 70
    assert 1000 <= late[1][1] < 1060


def test_plain_kombu_programs_have_virtual_time_too(delayed):
    with Connection("amqp://", transport=OURS) as connection:
        queue = Queue("mail")(connection.channel())
        queue.declare()
        connection.Producer().publish("hello", routing_key="mail", headers={"x-delay": 60_000})
        connection.Producer().publish("lost", routing_key="nowhere", headers={"x-delay": 60_000})
        assert delayed.waiting(queue="mail") == [call("", "hello", due_in=60)]
        delayed.advance(minutes=1)
        assert queue.get().payload == "hello"
        assert delayed.parked() == [call("", "lost")]


@pytest.mark.parametrize("moves", ["time-machine", "freezegun"])
def test_a_clock_that_the_test_moves_already_is_the_one_that_counts(shop, moves):
    begin = datetime(2030, 1, 1, tzinfo=UTC)
    clock = (
        time_machine.travel(begin, tick=False)
        if moves == "time-machine"
        else freezegun.freeze_time(begin)
    )
    with clock as moved, Delayed() as delayed:
        assert delayed.now == begin
        shop.note.apply_async(("a", 1), countdown=3600)
        delayed.advance(minutes=30)
        assert datetime.now(UTC) == begin + timedelta(minutes=30)
        moved.move_to(begin + timedelta(hours=2))
        assert delayed.ran() == []
        delayed.run()
        assert numbers(delayed) == [1]


def test_a_program_that_waits_for_real_time_is_an_error_that_says_so(delayed):
    with pytest.raises(StandsStillError, match="time stands still"):
        time.sleep(1)
    with (
        Connection("amqp://", transport=OURS) as connection,
        connection.Consumer(Queue("mail"), callbacks=[print]),
        pytest.raises(StandsStillError, match="call `advance`"),
    ):
        connection.drain_events()


def test_an_app_that_cannot_be_tested_so_is_an_error_that_names_the_remedy(delayed, shop):
    shop.app.conf.task_always_eager = True
    with pytest.raises(KitError, match="task_always_eager"):
        shop.note.apply_async(("a",), countdown=1)
    shop.app.conf.task_always_eager = False
    shop.app.conf.broker_transport = "pyamqp"
    shop.note.delay("a")
    with pytest.raises(KitError, match="broker_transport = 'kombu_binary_delay:Transport'"):
        delayed.run()


def run_page(folder, url, *options):
    page = (ROOT / "docs" / "how-to" / "test-delayed-tasks.md").read_text()
    tests = page.partition("<!-- file: test_shop.py -->\n```python\n")[2].partition("```\n")[0]
    (folder / "test_shop.py").write_text(tests.replace("amqp://", url))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert "5 passed" in done.stdout, done.stdout


def test_the_tests_of_the_page_pass_as_a_user_would_run_them(tmp_path):
    run_page(tmp_path, "amqp://")


def test_the_tests_of_the_page_pass_on_a_real_broker_too(tmp_path, vhost):
    run_page(tmp_path, vhost.url, "--delayed-broker")


def test_what_no_queue_takes_is_parked_on_a_real_broker_too(vhost):
    with DelayedOnBroker() as delayed, Connection(vhost.url, transport=OURS) as connection:
        connection.Producer().publish("lost", routing_key="nowhere", headers={"x-delay": 500})
        delayed.advance(seconds=1)
        # It is given back each time.
        assert delayed.parked() == delayed.parked() == [call("", "lost")]


@pytest.mark.parametrize("headers", [None, {"x-delay": 0}, {"some": "header"}])
def test_what_is_not_delayed_has_no_jitter(delayed, headers):
    options = {"binary_delay": {"jitter": 3_600_000}}
    with Connection("amqp://", transport=OURS, transport_options=options) as connection:
        queue = Queue("mail")(connection.default_channel)
        queue.declare()
        connection.Producer().publish("x", routing_key="mail", headers=headers)
        assert "x-delay-jitter" not in queue.get().headers


def test_a_message_that_replaces_others_may_have_jitter(delayed):
    options = {"binary_delay": {"jitter": 1000}}
    with Connection("amqp://", transport=OURS, transport_options=options) as connection:
        queue = Queue("mail")(connection.default_channel)
        queue.declare()
        for body in "first", "second":
            headers = {"x-delay": 300, "x-delay-key": "key"}
            connection.Producer().publish(body, routing_key="mail", headers=headers)
        delayed.run_until_idle()
        assert [message.payload for message in iter(queue.get, None)] == ["second"]


@pytest.mark.parametrize(
    "conf", [{"timezone": "Asia/Kathmandu"}, {"timezone": "America/New_York", "enable_utc": False}]
)
def test_an_eta_of_any_zone_is_kept_whatever_the_zone_of_the_app(delayed, shop, conf):
    shop.app.conf.update(conf)
    due = delayed.now + timedelta(hours=1)
    for zone in ("UTC", "America/New_York", "Asia/Kathmandu", "Pacific/Chatham", "Europe/Berlin"):
        shop.note.apply_async((zone,), eta=due.astimezone(ZoneInfo(zone)))
    # A Celery worker reads a naive eta as UTC, whatever the settings.
    shop.note.apply_async(("naive",), eta=due.replace(tzinfo=None))
    shop.note.apply_async(("countdown",), countdown=3600)
    delayed.run_until_idle()
    assert [ran.at for ran in delayed.ran()] == [due] * 7


def test_what_a_real_broker_cannot_do_is_an_error_that_says_so():
    with DelayedOnBroker() as delayed:
        with pytest.raises(KitError, match="to advance by 3600 s takes as long"):
            delayed.advance(hours=1)
        for fault in (delayed.duplicate_next, delayed.crash_worker, delayed.outage):
            with pytest.raises(KitError, match="faults can be had only in memory"):
                fault()


def test_one_kit_at_a_time_and_time_goes_on_after_it(shop):
    with (
        Delayed() as delayed,
        pytest.raises(KitError, match="another Delayed"),
        Delayed(),
    ):
        pass
    before = time.time()
    assert abs(before - delayed.now.timestamp()) < 60
    time.sleep(0.01)
    assert time.time() > before


@pytest.mark.parametrize("late", [False, True])
def test_a_message_expires_so_long_after_it_is_due(delayed, late):
    with Connection("amqp://", transport=OURS) as connection:
        queue = Queue("mail")(connection.channel())
        queue.declare()
        headers = {"x-delay": 60_000, "x-delay-expires": 5000}
        connection.Producer().publish("hello", routing_key="mail", headers=headers)
        connection.Producer().publish("always", routing_key="mail", headers={"x-delay": 60_000})
        delayed.advance(seconds=66 if late else 64)
        bodies = [message.payload for message in iter(queue.get, None)]
    assert bodies == (["always"] if late else ["hello", "always"])
    assert [gone.reason for gone in delayed.cancelled()] == ["expired"] * late


def test_a_task_expires_so_long_after_it_is_due_and_so_does_its_retry(delayed, shop):
    options = {"countdown": 60, "headers": {"x-delay-expires": 5000}}
    shop.note.apply_async(("a", 1), **options)
    shop.retries.apply_async(("a",), **options)
    delayed.run_until_idle()
    assert [ran.state for ran in delayed.ran()] == ["SUCCESS", "RETRY", "RETRY", "FAILURE"]
    late = shop.note.apply_async(("a", 2), **options)
    delayed.outage(seconds=120)
    delayed.run_until_idle()
    assert len(delayed.ran()) == 4
    assert [(gone.id, gone.reason) for gone in delayed.cancelled()] == [(late.id, "expired")]


def test_an_expiry_that_cannot_be_read_is_an_error_at_the_publish(delayed, shop):
    with pytest.raises(DelayError, match="x-delay-expires must be a number of milliseconds"):
        shop.note.apply_async(("a",), countdown=60, headers={"x-delay-expires": "soon"})


def test_a_plain_kombu_program_may_begin_with_the_kit():
    """Nothing has imported Celery then, or Kombu's pools."""
    program = "from kombu_binary_delay.testing import Delayed\nwith Delayed(): pass"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
