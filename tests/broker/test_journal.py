"""The journal records what happened, and harms nothing."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import FrameType
from unittest.mock import patch

import amqp
import pytest
from amqp.exceptions import NotFound, RecoverableConnectionError
from celery import Celery
from click.testing import CliRunner
from kombu import Queue

from kombu_binary_delay import Ladder, Settings, SettingsError, UnconfirmedError
from kombu_binary_delay.celery_side import executed as executed_tasks
from kombu_binary_delay.cli import binary_delay
from kombu_binary_delay.journal import events as journal_events
from kombu_binary_delay.journal import files, writer
from kombu_binary_delay.ladder import versions
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.publishing.batch import PublishBatch
from kombu_binary_delay.routing.commands import OutOfReachError
from kombu_binary_delay.wire import alarms
from kombu_binary_delay.wire.executor import Executor
from tests.starting import take_away
from tests.waits import PATIENCE, consume_until, drain_until, unread, wait_until


@pytest.fixture(params=["stream", "folder"])
def setting(request, broker, tmp_path):
    """Where the journal goes; without streams, "stream" is a folder, too."""
    return "stream" if request.param == "stream" else str(tmp_path / "journal")


@pytest.fixture
def journalling(connect, setting):
    """Connect, with a journal."""
    return connect(binary_delay={"journal": setting})


@pytest.fixture
def events(vhost, setting, tmp_path):
    def events(count):
        if setting == "stream":
            return of_stream(vhost, "kbd.v2.journal", count)
        wait_until(lambda: len(of_files()) >= count)
        return of_files()

    def of_files():
        files = (tmp_path / "journal").glob("*.jsonl*")
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    return events


def of_stream(vhost, stream, count):
    read: list[dict[str, object]] = []
    with vhost.connect() as connection:
        channel = connection.channel()
        channel.basic_qos(0, 100, a_global=False)
        channel.basic_consume(
            stream,
            callback=lambda message: read.extend(map(json.loads, message.body.split("\n"))),
            arguments={"x-stream-offset": "first"},
        )
        drain_until(connection, lambda: len(read) >= count)
    return read


def publish(connection, delay, message_id="m-1", **headers):
    Queue("mail")(connection.default_channel).declare()
    connection.Producer().publish(
        "Hello", routing_key="mail", headers={"x-delay": delay, **headers}, message_id=message_id
    )


def test_a_delayed_message_is_scheduled_and_released(  # noqa: PLR0913, PLR0917
    connect, collect, events, setting, confirm, broker
):
    connection = connect(
        binary_delay={"journal": setting, "radix": None},
        confirm_publish=confirm,
        read_timeout=PATIENCE,
    )
    before = time.time_ns() // 1000
    publish(connection, 300)
    collect(connection, [Queue("mail")], 1)
    scheduled, released = events(2)
    due = scheduled.pop("due")
    assert before + 300_000 - 999 <= due <= scheduled["at"] + 300_000
    at = released.pop("at")
    assert at >= due == released.pop("due")
    # As RabbitMQ says it: in whole seconds.
    assert due - 1_000_000 < released.pop("left") <= at
    assert scheduled.pop("at") >= before
    # 300 ms are three ticks, or fewer once the ladder has been declared: one digit.
    assert scheduled.pop("hops") == 1
    ladder = Ladder.default().name
    same = {"id": "m-1", "key": "mail"}
    prefix = Settings().topology().prefix
    assert scheduled == {"event": "scheduled", "ladder": ladder, "levels": prefix, **same}
    assert released == {"event": "released", **same}


def test_what_is_published_in_a_transaction_is_recorded_when_that_is_committed(connect, tmp_path):
    connection = connect(binary_delay={"journal": str(tmp_path)})
    channel = connection.default_channel
    queue = Queue("mail")(channel)
    queue.declare()

    def publish(text):
        connection.Producer().publish(
            text, routing_key="mail", headers={"x-delay": 3_600_000}, message_id=text
        )

    def recorded():
        files = tmp_path.glob("*.jsonl*")
        lines = [line for file in files for line in file.read_text().splitlines()]
        return [json.loads(line)["id"] for line in lines]

    channel.tx_select()
    publish("rolled back")
    channel.tx_rollback()
    publish("first")
    publish("second")
    assert recorded() == []
    channel.tx_commit()
    assert recorded() == ["first", "second"]
    publish("lost with the channel")
    with pytest.raises(NotFound):
        channel.queue_declare("nowhere", passive=True)
    # py-amqp has opened it again, without a transaction.
    publish("third")
    assert recorded() == ["first", "second", "third"]


def task(connection, **asked):
    Queue("mail")(connection.default_channel).declare()
    headers = {"task": "shop.pay", "id": "t-1", "retries": 3, "argsrepr": "('secret',)"}
    connection.Producer().publish("x", routing_key="mail", headers={**headers, **asked})


def hence(seconds):
    return datetime.fromtimestamp(time.time_ns() / 1_000_000_000 + seconds, UTC).isoformat()


def test_a_task_is_called_a_task_only_where_celery_knows_its_eta(journalling, events):
    task(journalling, eta=hence(3600))
    task(journalling, **{"x-delay": 3_600_000})
    # For the second, no event would say that it has been executed.
    called = [(event.get("task"), event.get("name"), event["retries"]) for event in events(2)]
    assert called == [("shop.pay", None, 3), (None, "shop.pay", 3)]


def test_the_arguments_of_a_task_that_waits_are_noted_up_to_a_length(
    journalling, collect, events, setting
):
    # In no time: what is due when it is published does not wait.
    with patch("time.time_ns", return_value=time.time_ns()):
        task(journalling, eta=hence(1), kwargsrepr="{}" * 1000)
    task(journalling, eta=hence(-60))
    task(journalling, eta=hence(3600), argsrepr=["no text"])
    collect(journalling, [Queue("mail")], 2)
    noted = [(event.get("args"), event.get("kwargs")) for event in events(5)]
    assert sorted(noted, key=str) == [
        ("('secret',)", "{}" * 126 + "{..."),
        *[(None, None)] * 4,
    ]


def test_arguments_stay_out_of_a_journal_that_is_not_to_have_them(connect, events, setting):
    connection = connect(binary_delay={"journal": setting, "journal_arguments": False})
    task(connection, eta=hence(60))
    [event] = events(1)
    assert event["task"] == "shop.pay"
    assert "secret" not in json.dumps(event)


@pytest.mark.parametrize(
    "case",
    [
        (2**31 - 1, 2**31 - 1),
        (2**31, None),
        (-1, None),
        (True, None),
        ("3", None),
        (b"3", None),
        (Decimal(3), None),
        (datetime(2030, 1, 1, tzinfo=UTC), None),
    ],
    ids=str,
)
def test_only_a_count_of_retries_is_noted_as_one_and_the_message_arrives_all_the_same(
    journalling, collect, events, case
):
    retries, noted = case
    publish(journalling, 10, task="t", id="i", retries=retries)
    publish(journalling, 10)
    assert len(collect(journalling, [Queue("mail")], 2)) == 2
    noted_events = events(4)
    assert len(noted_events) == 4
    assert {event.get("retries") for event in noted_events if event["id"] == "i"} == {noted}


def test_a_message_that_cannot_be_written_down_is_missing_alone(
    journalling, collect, events, monkeypatch, caplog
):
    writer.warnings.clear()  # another test may have been warned
    whole = journal_events.to_line  # as if something slipped past its checks
    monkeypatch.setattr(
        journal_events,
        "to_line",
        lambda event: whole({**event, "bad": object()} if event["id"] == "i" else event),
    )
    publish(journalling, 10, task="t", id="i")
    publish(journalling, 10)
    assert len(collect(journalling, [Queue("mail")], 2)) == 2
    assert [(event["event"], event["id"]) for event in events(2)] == [
        ("scheduled", "m-1"),
        ("released", "m-1"),
    ]
    assert caplog.text.count("an event is missing in the journal") == 1


def test_a_full_disk_is_told_in_one_line_and_harms_neither_a_message_nor_the_journal_after_it(
    connect, collect, tmp_path, caplog, capsys
):
    writer.warnings.clear()  # another test may have been warned
    folder = str(tmp_path / "journal")
    connection = connect(binary_delay={"journal": folder})
    publish(connection, 10)
    file = files._files[folder, os.getpid()]  # noqa: SLF001 - to fill its disk
    full = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115 - to close it fails, too
    file.stream, before = full, file.stream
    publish(connection, 10)
    publish(connection, 10)
    assert len(collect(connection, [Queue("mail")], 3)) == 3
    file.stream = before
    with suppress(OSError):
        full.close()
    assert caplog.text.count("the journal misses events") == 1
    assert "No space left on device" in caplog.text
    assert "Traceback" not in capsys.readouterr().err

    rest(connection)
    publish(connection, 10, "there is room")
    assert '"there is room"' in Path(file.stream.name).read_text(encoding="utf-8")


def test_a_journal_that_may_not_be_declared_is_only_looked_for(connect, vhost, caplog):
    writer.warnings.clear()  # another test may have been warned
    options = {"journal": "stream", "declare": "never"}
    publish(connect(), 60_000)
    before = {row["name"] for row in vhost.queues()}
    for _ in range(2):
        publish(connect(binary_delay=options), 60_000)
    assert {row["name"] for row in vhost.queues()} == before
    assert caplog.text.count("the stream 'kbd.v2.journal' does not exist") == 1
    assert "make it with kombu-binary-delay create" in caplog.text
    create = ("--radix", "2", "--journal", "stream", "--journal-max-age", "2h", "create", "--json")
    made = CliRunner().invoke(binary_delay, ["-b", vhost.url, *create])
    assert "kbd.v2.journal" in json.loads(made.stdout)["queues"]
    publish(connect(binary_delay=options), 60_000)
    [row] = [row for row in vhost.queues() if row["name"] == "kbd.v2.journal"]
    assert row["arguments"] == {"x-queue-type": "stream", "x-max-age": "2h"}
    assert [event["event"] for event in of_stream(vhost, "kbd.v2.journal", 1)] == ["scheduled"]


def rest(connection):
    """As after half a minute since the last failure of the journal."""
    connection.connection.delay_mechanism.journal._rests_until = time.monotonic()  # noqa: SLF001


def delete_stream(vhost):
    with vhost.connect() as other:
        other.channel().queue_delete("kbd.v2.journal")


@pytest.mark.parametrize("batched", [False, True])
def test_what_is_published_after_the_stream_was_deleted_is_in_a_new_one(
    connect, vhost, batched, caplog
):
    writer.warnings.clear()  # another test may have been warned
    connection = connect(binary_delay={"journal": "stream"})
    publish(connection, 60_000, "before")
    delete_stream(vhost)

    for number in "012":
        if batched:
            message = amqp.Message("m", application_headers={"x-delay": 9000}, message_id=number)
            with PublishBatch(connection.default_channel) as batch:
                batch.publish(message, "", "mail")
        else:
            publish(connection, 60_000, number)
        if number != "0":
            continue
        if batched:
            drain_until(connection, lambda: "was deleted, with the events in it" in caplog.text)
        else:
            # What the broker returns is read by the next publish.
            wait_until(lambda: unread(connection))

    written = of_stream(vhost, "kbd.v2.journal", 3)
    assert sorted(event["id"] for event in written) == ["0", "1", "2"]


def test_what_is_consumed_after_the_stream_was_deleted_is_in_a_new_one(connect, vhost, collect):
    writer.warnings.clear()  # another test may have been warned
    consumer, publisher = connect(binary_delay={"journal": "stream"}), connect()
    publish(publisher, 10)
    collect(consumer, [Queue("mail")], 1)
    delete_stream(vhost)
    publish(publisher, 10)

    def is_there():
        return "kbd.v2.journal" in {row["name"] for row in vhost.queues()}

    collect(consumer, [Queue("mail")], 1, until=is_there)

    assert [event["event"] for event in of_stream(vhost, "kbd.v2.journal", 1)] == ["released"]


def test_a_deleted_stream_that_may_not_be_declared_is_named_and_used_again(connect, vhost, caplog):
    writer.warnings.clear()  # another test may have been warned
    connection = connect(binary_delay={"journal": "stream", "declare": "never"})
    publish(connect(binary_delay={"journal": "stream"}), 60_000, "before")
    publish(connection, 60_000, "before")
    delete_stream(vhost)

    publish(connection, 60_000, "returned")
    wait_until(lambda: unread(connection))
    publish(connection, 60_000, "missing")
    assert "make it with kombu-binary-delay create" in caplog.text
    publish(connect(binary_delay={"journal": "stream"}), 60_000, "of another one")
    publish(connection, 60_000, "missing")
    rest(connection)
    publish(connection, 60_000, "written")

    written = of_stream(vhost, "kbd.v2.journal", 3)
    assert sorted(event["id"] for event in written) == ["of another one", "returned", "written"]


@pytest.mark.own_broker
@pytest.mark.parametrize("more", [{}, {"declare": "never"}], ids=str)
def test_the_journal_waits_for_the_stream_of_a_node_that_is_just_starting(
    connect, vhost, more, monkeypatch
):
    publish(connect(binary_delay={"journal": "stream"}), 60_000)
    bring_back, do, refused = take_away(vhost, "kbd.v2.journal"), Executor.do, []

    def do_or_bring_back(executor, command):
        try:
            return do(executor, command)
        except OutOfReachError:
            refused.append(command)
            if len(refused) == 1:
                bring_back()
            raise

    monkeypatch.setattr(Executor, "do", do_or_bring_back)
    monkeypatch.setattr("kombu_binary_delay.journal.stream._LOCK_TIMEOUT", PATIENCE)
    publish(connect(binary_delay={"journal": "stream", **more}), 60_000)
    kinds = [event["event"] for event in of_stream(vhost, "kbd.v2.journal", 2)]
    assert kinds == ["scheduled", "scheduled"]
    assert refused


@pytest.fixture
def app(vhost):
    app = Celery(broker=vhost.url, set_as_current=False)
    app.conf.broker_connection_timeout = PATIENCE
    app.conf.broker_transport = "kombu_binary_delay:Transport"
    app.conf.broker_transport_options = {"binary_delay": {"journal": "stream"}}
    return app


@pytest.fixture
def executed():
    """What the signals of a worker's Celery reach."""
    executed = executed_tasks.ConfirmedWriter()
    yield executed
    executed.close()


def ended(executed, app, number):
    executed.write(app, json.dumps({"id": f"{number}", "event": "executed"}))


@pytest.mark.parametrize("logs_channels", [False, True], ids=["", "KOMBU_LOG_CHANNEL"])
def test_what_is_executed_after_the_stream_was_deleted_is_in_a_new_one(
    executed, app, vhost, monkeypatch, logs_channels
):
    monkeypatch.setattr("kombu.connection._log_channel", logs_channels)
    ended(executed, app, 1)
    with vhost.connect() as other:
        other.channel().queue_delete("kbd.v2.journal")
    ended(executed, app, 2)
    # An event whose confirm comes late is written again.
    assert {event["id"] for event in of_stream(vhost, "kbd.v2.journal", 1)} == {"2"}


@pytest.mark.timeout(300)
def test_of_the_tasks_that_end_in_an_alarm_few_wait(own_broker, app, executed, vhost, monkeypatch):
    ended(executed, app, 1)
    tries: list[int] = []
    publish = PublishBatch.publish

    def publish_for_a_moment(*args, **options):
        tries.append(1)
        publish(*args, **{**options, "timeout": 1})

    monkeypatch.setattr(executed_tasks, "_LONG", 0.5)
    monkeypatch.setattr(executed_tasks, "_RESTS", PATIENCE)
    with own_broker.alarm(), monkeypatch.context() as patch:
        patch.setattr(PublishBatch, "publish", publish_for_a_moment)
        for number in range(2, 9):
            ended(executed, app, number)
    assert len(tries) == 1
    monkeypatch.setattr(executed, "_rests_until", 0.0)
    ended(executed, app, 9)
    # The broker may have read the second, which was sent in the alarm, twice.
    count = vhost.waiting("kbd.v2.journal")["kbd.v2.journal"]
    events = of_stream(vhost, "kbd.v2.journal", count)
    assert {event["id"] for event in events} == set("123456789")


def test_in_an_outage_one_task_waits_for_a_moment_and_the_others_only_look(
    executed, app, vhost, monkeypatch, caplog
):
    writer.warnings.clear()  # another test may have been warned
    waits: list[float] = []
    sleep, me = time.sleep, threading.get_ident()

    def note(seconds):
        # Other threads sleep, too, such as the one that Py4J starts with Spark.
        if threading.get_ident() == me:
            waits.append(seconds)
        else:
            sleep(seconds)

    monkeypatch.setattr("kombu.utils.functional.sleep", note)
    monkeypatch.setattr("time.sleep", note)
    publish = PublishBatch.publish

    def publish_patiently(*args, **options):
        publish(*args, **{**options, "timeout": PATIENCE})

    monkeypatch.setattr(PublishBatch, "publish", publish_patiently)  # some have only one try

    def waited(url, number):
        waits.clear()
        app.conf.broker_url = app.conf.broker_write_url = url
        ended(executed, app, number)
        executed.close()  # so that the next one connects
        return sum(waits)

    nobody = "amqp://guest:guest@127.0.0.1:1//"
    # The time limit of a task goes on meanwhile.
    assert 0 < waited(nobody, 1) <= 5
    assert not waited(nobody, 2)
    assert not waited(f"{nobody};{vhost.url}", 3)
    assert waited(nobody, 4)
    # What ended in the outage is written with the next one; the last has none.
    assert [event["id"] for event in of_stream(vhost, "kbd.v2.journal", 3)] == ["1", "2", "3"]
    assert caplog.text.count("executed tasks are missing in the journal") == 1


def test_a_batch_tells_of_every_message_once(connect, events, setting):
    connection = connect(binary_delay={"journal": setting})
    channel = connection.default_channel
    Queue("mail")(channel).declare()
    with PublishBatch(channel, 10) as batch:
        for number in range(25):
            message = channel.prepare_message(
                b"x", headers={"x-delay": 60_000}, properties={"message_id": f"{number}"}
            )
            batch.publish(message, routing_key="mail")
    assert sorted(int(event["id"]) for event in events(25)) == list(range(25))


def test_what_is_not_delayed_is_not_in_the_journal(connect, collect, events, setting):
    connection = connect(binary_delay={"journal": setting})
    publish(connection, 0)
    publish(connection, 300)
    collect(connection, [Queue("mail")], 2)
    assert [event["event"] for event in events(2)] == ["scheduled", "released"]


@pytest.mark.parametrize("batch", [False, True])
def test_a_task_that_is_due_when_sent_is_told_of_without_a_hop(
    connect, collect, events, setting, batch
):
    connection = connect(binary_delay={"journal": setting})
    channel = connection.default_channel
    Queue("mail")(channel).declare()
    eta = {"task": "t", "id": "i", "eta": "2020-01-01T00:00:00+00:00"}
    message = channel.prepare_message(b"[]", headers=eta)
    if batch:
        with PublishBatch(channel, 10) as many:
            many.publish(message, routing_key="mail")
    else:
        channel.basic_publish(message, "", "mail")
    collect(connection, [Queue("mail")], 1)
    seen = [(event["event"], event["id"], event["key"], event.get("hops")) for event in events(2)]
    assert seen == [("scheduled", "i", "mail", 0), ("released", "i", "mail", None)]


def test_a_task_of_who_does_not_send_by_the_ladder_is_none_of_the_journals(
    connect, collect, events, setting
):
    stock, ours = connect(transport="pyamqp"), connect(binary_delay={"journal": setting})
    Queue("mail")(ours.default_channel).declare()
    eta = {"task": "t", "id": "i", "eta": "2999-01-01T00:00:00+00:00"}
    stock.Producer().publish("[]", routing_key="mail", headers=eta)
    publish(ours, 300)
    collect(ours, [Queue("mail")], 2)
    assert {event["id"] for event in events(2)} == {"m-1"}


def test_the_journal_is_off_unless_asked_for(connect, collect, vhost):
    connection = connect()
    publish(connection, 10)
    collect(connection, [Queue("mail")], 1)
    assert not [row for row in vhost.queues() if "journal" in row["name"]]


def test_a_stream_keeps_events_as_long_as_is_said(connect, vhost):
    connection = connect(binary_delay={"journal": "stream", "journal_max_age": "2h"})
    publish(connection, 60_000)
    [row] = [row for row in vhost.queues() if row["name"] == "kbd.v2.journal"]
    assert row["arguments"] == {"x-queue-type": "stream", "x-max-age": "2h"}


@pytest.mark.parametrize("namespace", [f"n{number}" for number in range(3)])
def test_those_who_begin_the_journal_together_do_each_other_no_harm(
    connect, vhost, namespace, monkeypatch
):
    monkeypatch.setattr("kombu_binary_delay.journal.stream._LOCK_TIMEOUT", PATIENCE)
    start = threading.Barrier(3)

    def begin(connection):
        start.wait()
        connection.delay_mechanism.journal.write('{"event": "begun"}')

    options = {"journal": "stream", "namespace": namespace}
    connections = [connect(binary_delay=options).connection for _ in range(3)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(begin, connections))
    for connection in connections:
        # Had the broker closed it, this would raise.
        connection.channel().close()
    assert of_stream(vhost, f"{namespace}.v2.journal", 3) == [{"event": "begun"}] * 3


def test_a_journal_that_cannot_be_written_harms_no_message(connect, collect, vhost, caplog):
    writer.warnings.clear()  # another test may have been warned
    with vhost.connect() as other:
        # A queue of that name which is no stream: the broker refuses to declare it again.
        other.channel().queue_declare("kbd.v2.journal", durable=True, auto_delete=False)
    connection = connect(binary_delay={"journal": "stream"})
    publish(connection, 10)
    publish(connection, 10)
    assert len(collect(connection, [Queue("mail")], 2)) == 2
    assert caplog.text.count("the journal misses events") == 1


def test_a_broker_without_streams_has_a_local_file(connect, tmp_path, monkeypatch, events, setting):
    monkeypatch.setattr(versions, "OLDEST", (99, 0))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    connection = connect(binary_delay={"journal": "stream"})
    publish(connection, 60_000)
    [file] = (tmp_path / "kbd-journal").glob("*.jsonl")
    assert json.loads(file.read_text())["event"] == "scheduled"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"journal": True},
            "journal must be 'stream', a folder's path with a slash in it .* or None, got True",
        ),
        ({"journal": ""}, "got ''"),
        ({"journal_max_age": "7"}, "a number and a unit such as '7D' or '12h', got '7'"),
        ({"journal_max_age": 7}, "got 7"),
        ({"journal_arguments": 1}, "journal_arguments must be True or False, got 1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(options, words):
    with pytest.raises(SettingsError, match=words):
        Settings(**options)


def depth(frame: FrameType | None) -> int:
    count = 0
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


def test_many_messages_at_once_are_journalled_one_after_the_other(connect, vhost):
    connection = connect(binary_delay={"journal": "stream"}, confirm_publish=True)
    queue = Queue("mail")(connection.default_channel)
    queue.declare()
    eta = {"task": "t", "id": "i", "eta": "2020-01-01T00:00:00+00:00"}
    plain = vhost.connect()
    for _ in range(1000):
        message = amqp.Message("[]", application_headers=eta)
        plain.channel(1).basic_publish(message, "", "mail")
    plain.close()
    depths = []

    def take(body, message):
        depths.append(depth(sys._getframe()))  # noqa: SLF001 - there is no other cheap way
        message.ack()

    with connection.Consumer(queue, callbacks=[take], accept=["text/plain"]):
        drain_until(connection, lambda: len(depths) == 1000)
    # Each would run inside the one before it, and Python allow some dozens of them.
    assert max(depths) < min(depths) + 50


@pytest.mark.timeout(300, func_only=True)
@pytest.mark.parametrize("batched", [False, True])
def test_the_limit_of_a_publish_counts_for_the_journal_too(connect, own_broker, batched):
    """A connection that has published in an alarm gets no answer."""
    # All that has to be declared: in the alarm, the limit is for the publish alone.
    before = connect(binary_delay={"journal": "stream"})
    before.Producer().publish("m", routing_key="mail", headers={"x-delay": 9000})
    with own_broker.alarm():
        connection = connect(binary_delay={"journal": "stream"})
        message = amqp.Message("m", application_headers={"x-delay": 9000, "id": "1", "task": "t"})
        # The limit is one of each declaration, too, which a slow broker answers late.
        if batched:
            declaring = PublishBatch(connection.channel())
            declaring.publish(message, "", "mail")
            declaring.discard()
            declaring.close()
            with pytest.raises(UnconfirmedError), PublishBatch(connection.channel()) as batch:
                batch.publish(message, "", "mail", confirm_timeout=2)
        else:
            connection.default_channel.basic_publish(message, "", "mail", timeout=PATIENCE)
        connection.collect()


def test_the_wait_for_the_stream_is_a_part_of_the_delay(connect):
    """Also where the topology is not declared, so that nothing else takes time."""
    connection = connect(binary_delay={"journal": "stream", "declare": "never"})
    channel = connection.default_channel
    with patch.object(writer.Journal, "prepare", lambda _: time.sleep(2)):
        begin = time.time_ns() // 1000
        out = channel.way_out.ready_at({}, Destination("", "mail"), begin + 60_000_000)
    topology = connection.connection.delay_mechanism.router.topology
    digits, _ = topology.parse(out.routing_key)
    assert topology.ladder.delay(digits) <= 58_000 + topology.ladder.tick


def test_events_of_an_alarm_are_written_once_and_end_no_publisher(connect, vhost):
    publisher = connect(binary_delay={"journal": "stream"})
    connection = publisher.connection
    journal = connection.delay_mechanism.journal
    journal._later.append({"event": "released", "at": 1, "id": "1"})  # noqa: SLF001 - as in an alarm
    connection.is_held_up = True

    drain_until(publisher, lambda: not journal.is_holding)
    connection.is_blocked = True
    journal.end_if_blocked()

    assert [event["id"] for event in of_stream(vhost, "kbd.v2.journal", 1)] == ["1"]


@pytest.fixture
def held_up(connect):
    """A connection, and its journal, with three events that an alarm has held up."""

    def held_up(url=None):
        connection = connect(url=url, binary_delay={"journal": "stream", "amendments": False})
        journal = connection.connection.delay_mechanism.journal
        held = [{"event": "released", "at": 1, "id": id_} for id_ in "123"]
        journal._later.extend(held)  # noqa: SLF001 - as in an alarm
        connection.connection.is_held_up = True
        return connection, journal

    return held_up


def test_the_last_event_of_an_alarm_is_read_before_it_is_over(held_up, monkeypatch):
    """Until then, it can be why the broker blocks the connection in the next alarm."""
    _, journal = held_up()
    done: list[str] = []
    monkeypatch.setattr(
        journal.stream,
        "publish",
        lambda lines: done.extend(json.loads(line)["id"] for line in lines),
    )
    monkeypatch.setattr(journal.stream, "wait", lambda: done.append("wait"))

    journal.release()

    assert done == ["1", "wait", "2", "3", "wait"]


@pytest.fixture
def who_writes(vhost):
    """Make a user who may write to what matches, and do all else; return the URL."""
    name = f"user-{vhost.name}"
    vhost.broker.api("PUT", f"users/{name}", {"password": "x", "tags": ""})

    def who_writes(pattern):
        permissions = {"configure": ".*", "write": pattern, "read": ".*"}
        vhost.broker.api("PUT", f"permissions/{vhost.name}/{name}", permissions)
        return vhost.url_of(name, "x")

    yield who_writes
    vhost.broker.api("DELETE", f"users/{name}")


def test_a_refused_event_fails_no_later_publish(connect, collect, who_writes, caplog):
    writer.warnings.clear()  # another test may have been warned
    queues = [Queue("mail"), Queue("other")]
    for queue in queues:
        queue(connect().default_channel).declare()
    url = who_writes("kbd.*|mail|other")
    connection = connect(url=url, binary_delay={"journal": "stream"})
    producer, delayed = connection.Producer(), {"x-delay": 10}

    producer.publish("first", routing_key="mail", headers=delayed)
    # The broker has refused its event. The next publish has something to declare.
    wait_until(lambda: unread(connection))
    producer.publish("second", routing_key="other", headers=delayed)

    assert len(collect(connect(), queues, 2)) == 2
    assert caplog.text.count("the journal misses events") == 1


def test_events_of_an_alarm_that_a_user_may_not_write_stop_no_program(held_up, who_writes, caplog):
    held_up()[1].prepare()  # the stream
    connection, journal = held_up(who_writes("kbd.*"))

    drain_until(connection, lambda: "the journal misses events" in caplog.text)

    assert journal.is_holding


def test_what_an_alarm_holds_up_is_no_reason_to_look_all_the_time(held_up):
    """The broker says when it does not block the connection any more."""
    connection, _ = held_up()
    connection.connection.is_blocked = True
    publish(connection, 500)

    def take(*_):
        raise TimeoutError("of the program")

    def look():
        for _ in range(10):
            connection.drain_events()

    connection.Consumer(Queue("mail"), callbacks=[take]).consume()
    with pytest.raises(TimeoutError, match="of the program"):
        look()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_process_leaves_the_events_of_an_alarm_to_its_parent():
    code = (
        "import os\n"
        "from kombu_binary_delay.journal import writer\n"
        "writer._later['broker', '/', 'journal'] = ['event']\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(len(writer._later))\n"
        "kept = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "print(kept, len(writer._later))\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["0", "1"]


def test_a_consumer_with_a_journal_goes_on_while_the_broker_blocks_publishers(
    connect, vhost, own_broker, monkeypatch
):
    """What it has got is noted when the alarm is over."""
    monkeypatch.setattr(alarms, "PAUSE", 4.0)
    publisher, consumer = (connect(binary_delay={"journal": "stream"}) for _ in range(2))
    for number in range(10):
        publish(publisher, 2000, id=f"{number}", task="t", eta=None)
    arrived: set[str] = set()

    def take(_, message):
        arrived.add(message.headers["id"])
        message.ack()

    with own_broker.alarm():
        # So long that it is tried again in vain.
        end = time.monotonic() + 3 * alarms.PAUSE
        consume_until(
            consumer,
            Queue("mail"),
            take,
            lambda: len(arrived) == 10 and time.monotonic() > end,
            prefetch_count=1,
        )
    journal = consumer.connection.delay_mechanism.journal
    assert journal.is_holding
    drain_until(consumer, lambda: not journal.is_holding)

    # The event that made the broker block the connection may be lost with it.
    noted = of_stream(vhost, "kbd.v2.journal", 19)
    assert len({event["id"] for event in noted if event["event"] == "released"}) >= 9


@pytest.mark.parametrize("within", [True, False], ids=["in a callback", "between two events"])
def test_a_program_that_publishes_hides_no_end_of_its_connection(connect, own_broker, within):
    """Kombu would connect again, and not consume."""
    # Or the end would come where the consumer looks for amendments.
    settings = {"journal": "stream", "amendments": False}
    publisher, consumer = (connect(binary_delay=settings) for _ in range(2))
    Queue("mail")(consumer.default_channel).declare()
    published: list[str] = []
    taken: list[object] = []

    def is_readable():
        return select.select([consumer.connection.sock], [], [], 0)[0]

    def again(name):
        headers = {"x-delay": 9000, "id": name, "task": "t", "eta": None}
        consumer.Producer().publish("Hello", routing_key="mail", headers=headers, retry=True)
        published.append(name)

    def take(_, message):
        wait_until(is_readable, "the broker does not block the connection for its event")
        message.ack()
        taken.append(message)
        if within:
            again("while it is blocked")

    again("before, so that the ladder exists")
    publish(publisher, 500, id="1", task="t", eta=None)
    consumer.Consumer(Queue("mail"), callbacks=[take], prefetch_count=1).consume()
    wait_until(is_readable, "nothing is delivered")

    def go_on():
        drain_until(consumer, lambda: taken)
        if not within:
            drain_until(consumer, lambda: consumer.connection.is_blocked)
            again("while it is blocked")
        drain_until(consumer, lambda: False)

    with own_broker.alarm(), pytest.raises(RecoverableConnectionError, match="alarm"):
        go_on()

    assert len(published) == 2


def test_a_stream_that_exists_keeps_its_age_and_takes_events(connect, vhost, caplog):
    with vhost.connect() as other:
        channel = other.channel()
        channel.queue_declare(
            "kbd.v2.journal",
            durable=True,
            auto_delete=False,
            arguments={"x-queue-type": "stream", "x-max-age": "7D"},
        )
        # The first program finds no events yet, and the second some.
        for _ in range(2):
            publish(connect(binary_delay={"journal": "stream", "journal_max_age": "30D"}), 60_000)
            wait_until(lambda: channel.queue_declare("kbd.v2.journal", passive=True).message_count)
    assert len(of_stream(vhost, "kbd.v2.journal", 2)) == 2
    assert "the journal misses events" not in caplog.text
    assert "the stream 'kbd.v2.journal' keeps records for as long as it was made to" in caplog.text


def test_each_app_of_a_process_has_a_writer_of_executed_events(app):
    other = Celery(set_as_current=False)
    assert executed_tasks._writer_of(app) is executed_tasks._writer_of(app)  # noqa: SLF001 - as the signals do
    assert executed_tasks._writer_of(app) is not executed_tasks._writer_of(other)  # noqa: SLF001


def test_executed_events_go_to_a_folder_without_the_broker(tmp_path):
    app = Celery(broker="amqp://guest:guest@127.0.0.1:1//", set_as_current=False)
    app.conf.broker_transport_options = {"binary_delay": {"journal": str(tmp_path)}}
    request = {"id": "one", "eta": "2020-01-01T00:00:00Z"}
    executed_tasks._executed(app, request, "t", None, "SUCCESS")  # noqa: SLF001 - as the signals do
    [line] = [line for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert (json.loads(line)["id"], json.loads(line)["event"]) == ("one", "executed")


def test_while_a_host_answers_nothing_few_executed_tasks_wait(executed, app, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("time.sleep", lambda _: None)
    tries: list[float] = []

    def connect_in_vain(_):
        tries.append(clock[0])
        clock[0] += 4.0  # less than what ends a first try
        return TimeoutError("nobody answers")

    monkeypatch.setattr(executed, "_try", connect_in_vain)
    for number in range(100):
        ended(executed, app, number)
        clock[0] += 1.0
    # The first asks twice, and each of the others rests for as long as it has waited.
    assert tries[:2] == [0.0, 4.0]
    assert len(tries) == 25
