"""What was cancelled, postponed or superseded, as consumers on a real broker see it."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import amqp
import pytest
from amqp.exceptions import RecoverableConnectionError
from celery import Celery
from kombu import Connection, Exchange, Producer, Queue
from kombu.asynchronous import Hub
from kombu.mixins import ConsumerMixin
from kombu.pidbox import Mailbox

from kombu_binary_delay import (
    AmendmentError,
    DelayError,
    PublishBatch,
    UnconfirmedError,
    cancel,
    on_dropped,
    replace,
    reschedule,
)
from kombu_binary_delay.amendments import generations, memory, parts, reading, stream, way_in
from kombu_binary_delay.amendments.record import (
    GENERATION,
    KEY,
    REPLACES,
    Cancel,
    Postpone,
    Record,
    Supersede,
    new_generation,
    to_line,
)
from kombu_binary_delay.publishing import Outcome
from kombu_binary_delay.telemetry import watch
from kombu_binary_delay.wire import alarms, deliveries
from kombu_binary_delay.wire.streams import PREFETCH, StreamChannel
from tests.raw_messages import RAW, RawMessage
from tests.starting import take_away
from tests.waits import PATIENCE, consume_until, drain_until, unread, wait_until

QUEUE = Queue("mail")


@pytest.fixture
def dropped(monkeypatch):
    monkeypatch.setattr(watch, "dropped", [])
    seen: list[Any] = []
    on_dropped(seen.append)
    return seen


@pytest.fixture
def consumer(connect):
    connection = connect()
    QUEUE(connection.default_channel).declare()
    return connection


@pytest.fixture
def publisher(connect):
    return connect()


def publish(connection, name, delay=500, **headers):
    Producer(connection.default_channel).publish(
        name, routing_key="mail", message_id=name, headers={"x-delay": delay, **headers}
    )


def bodies(arrivals):
    return [arrival.body for arrival in arrivals]


def append(connection, body, exchange="kbd.v2.amendments", key="ids", **properties):
    channel = connection.default_channel
    message = amqp.Message(body, **properties)
    amqp.Channel._basic_publish(channel, message, exchange, key)  # noqa: SLF001 - past our transport


def records_in_stream(connection):
    channel = connection.default_channel
    return channel.queue_declare("kbd.v2.amendments.ids", passive=True).message_count


def first_record(connection, such=lambda _: True):
    """Read the first such record as the broker has it."""
    # Ours would leave the ladder's deaths out.
    channel = amqp.Channel(connection.connection)
    channel.open()
    got: list[Any] = []
    channel.basic_qos(0, 10, a_global=False)
    channel.basic_consume(
        "kbd.v2.amendments.ids", callback=got.append, arguments={"x-stream-offset": "first"}
    )
    records = drain_until(connection, lambda: [message for message in got if such(message)])
    channel.close()
    return records[0]


def names_something(message):
    """Whether it is no record of those that whoever makes the streams writes into them."""
    return json.loads(message.body).get("cancel") != []


def cancel_ahead(name, seconds, connection):
    """Cancel what is due then, in no time: how far ahead that is does not depend on the machine."""
    now = time.time_ns()
    eta = datetime.fromtimestamp(now / 1_000_000_000 + seconds, UTC)
    with patch("time.time_ns", return_value=now):
        cancel(name, eta=eta, connection=connection)


def ride(name, seconds, connection):
    """Write the cancellation of what is due then to the ladder alone."""
    now = time.time_ns() // 1_000_000
    due = now + seconds * 1000
    amendments = connection.connection.delay_mechanism.amendments
    amendments.write_ahead(Cancel((name,), now, due), due)


def remembered(connection):
    return len(connection.connection.delay_mechanism.amendments.memory)


QUEUES_OF_AMENDMENTS = ["queues/kbd.v2.amendments.ids", "queues/kbd.v2.amendments.keys"]


def streams_of_amendments():
    return [parts.stream_name("kbd", kind) for kind in (parts.IDS, parts.KEYS)]


def notice_deletion(connection):
    """Wait until the broker's word has come that a stream is gone."""
    amendments = connection.connection.delay_mechanism.amendments
    drain_until(connection, lambda: not amendments.reader.is_reading)


def test_a_consumer_that_began_before_the_first_amendment_keeps_to_it(
    consumer, publisher, collect, dropped, monkeypatch
):
    monkeypatch.setattr(reading, "LOOK_AGAIN", 0.0)
    publish(publisher, "first", delay=1)
    assert bodies(collect(consumer, [QUEUE], 1)) == ["first"]
    publish(publisher, "cancelled")
    publish(publisher, "kept")

    cancel("cancelled", connection=publisher)

    assert bodies(collect(consumer, [QUEUE], 1, until=lambda: dropped)) == ["kept"]
    assert [(message.id, message.reason, message.queue) for message in dropped] == [
        ("cancelled", "cancelled", "mail")
    ]


@pytest.fixture
def asked(monkeypatch):
    """Which reader has asked whether there are streams, each time."""
    begin, asked = reading.Reader._begin, []  # noqa: SLF001 - each call of it asks

    def begin_and_note(reader):
        asked.append(reader)
        begin(reader)

    monkeypatch.setattr(reading.Reader, "_begin", begin_and_note)
    monkeypatch.setattr(reading, "_LOOK_EVERY", 0.0)
    return asked


@pytest.mark.parametrize("news", ["a broadcast", "another broadcast", "a generation"])
def test_a_consumer_asks_rarely_for_streams_that_are_not_there_and_at_once_when_they_are(
    connect, consumer, publisher, asked, news
):
    workers, got = Mailbox("celery", type="fanout"), []
    hearing = connect() if news == "another broadcast" else consumer
    handlers = dict.fromkeys(("ping", "revoke"), lambda *_, **__: None)
    workers.Node("here", channel=hearing.channel(), handlers=handlers).listen()
    with consumer.Consumer(QUEUE, no_ack=True, callbacks=[lambda body, _: got.append(body)]):
        for expected in ("one", "two", "three"):
            publish(publisher, expected, delay=1)
            drain_until(consumer, partial(got.__contains__, expected))
        workers(connect())._broadcast("ping")  # noqa: SLF001 - as Celery's control does
        assert asked == [consumer.connection.delay_mechanism.amendments.reader]

        publish(publisher, "gone", delay=2000)
        if news == "a generation":
            publish(publisher, "last", delay=2000, **{REPLACES: "gone"})
        else:
            workers(connect())._broadcast("revoke", {"task_id": "gone"})  # noqa: SLF001
            publish(publisher, "last", delay=2000)
            # By the number of broadcasts that came.
            drain_until(hearing, lambda: reading._heard[asked[0]._place])  # noqa: SLF001
        drain_until(consumer, lambda: "last" in got)

    assert len(asked) == 2
    assert "gone" not in got or news == "a generation"


def test_a_message_that_is_got_one_by_one_is_amended_like_one_that_is_consumed(
    consumer, publisher, dropped
):
    publish(publisher, "cancelled", delay=125)
    publish(publisher, "kept", delay=250)
    cancel("cancelled", connection=publisher)
    queue, got = QUEUE(consumer.default_channel), []

    def both_came():
        message = queue.get(no_ack=True)
        got.extend([message.payload] if message else [])
        return got and dropped

    wait_until(both_came)
    assert got == ["kept"]
    assert [message.id for message in dropped] == ["cancelled"]


def test_what_is_dropped_as_its_consumer_ends_gets_no_ack_that_the_broker_does_not_want(
    consumer, publisher, connect, dropped
):
    cancel("x", connection=publisher)
    taking = consumer.Consumer(QUEUE, no_ack=True, callbacks=[lambda *_: None])
    taking.consume()
    connect("amqp").Producer().publish("x", routing_key="mail", message_id="x")
    wait_until(lambda: unread(consumer))

    taking.cancel()

    assert [message.id for message in dropped] == ["x"]
    # After an ack, the broker would have closed this channel.
    QUEUE(consumer.default_channel).queue_declare(passive=True)


@pytest.fixture
def forgetful(connect):
    """One whose stream keeps records for two seconds: what is due later than that is far ahead."""
    return connect(binary_delay={"amendments_max_age": "2s"})


def test_a_cancellation_from_the_ladder_spares_what_has_replaced_its_task_meanwhile(
    consumer, forgetful, publisher, collect, dropped
):
    cancel_ahead("task", 3, forgetful)
    publish(publisher, "task", delay=1, **{REPLACES: "task"})
    first_record(publisher, such=lambda record: parts.ENTERED in (record.headers or {}))

    assert bodies(collect(consumer, [QUEUE], 1)) == ["task"]
    assert dropped == []


def test_what_is_due_far_ahead_is_cancelled_by_a_record_that_rides_the_ladder(
    consumer, forgetful, publisher, collect
):
    publish(publisher, "cancelled")
    publish(publisher, "kept")
    ride("cancelled", 3, forgetful)
    first_record(publisher, such=lambda record: parts.ENTERED in (record.headers or {}))

    assert bodies(collect(consumer, [QUEUE], 1)) == ["kept"]
    assert remembered(consumer) == 1


@pytest.mark.parametrize("names", ["one", ["one", "two"]], ids=str)
def test_a_cancellation_far_ahead_is_there_at_once_and_again_before_the_last(
    publisher, monkeypatch, names
):
    monkeypatch.setattr(stream, "FAR_AHEAD", 1000)
    monkeypatch.setattr(stream, "LEAD", 500)
    cancel_ahead(names, 2, publisher)
    assert parts.ENTERED not in (first_record(publisher).headers or {})
    wait_until(lambda: records_in_stream(publisher) == 3)
    first_record(publisher, such=lambda record: parts.ENTERED in (record.headers or {}))


@pytest.fixture
def rogue(connect, user):
    """A channel of one that may write to the levels and the default exchange alone."""
    write = r"^(amq\.default|.*\.level-[0-9]+|.*\.delivery)$"
    return connect("amqp", url=user(configure="^$", read="^$", write=write)).default_channel


@pytest.fixture
def deaths(broker, topology):
    """Headers as of what has died in a queue of the ladder."""
    death = {"queue": topology.levels[0].queues[0].name, "reason": "expired", "count": 1}
    forged = {"x-death": [{**death, "exchange": "kbd.v2.amendments"}]}
    # Before 4.0, RabbitMQ takes a publisher's deaths for its own.
    return [{}, forged] if broker.release >= (4, 0) else [{}]


def test_who_may_write_to_the_levels_and_the_default_exchange_cannot_amend(  # noqa: PLR0913, PLR0917 - fixtures
    consumer, forgetful, publisher, rogue, deaths, collect, topology
):
    # So that there is a way through the ladder.
    cancel_ahead("x", 3, forgetful)
    level, later = topology.level_name(0), parts.way_of_records(topology)
    passing = f"{topology.ladder.word(0, 0)}.{topology.address((), later)}"
    waiting = topology.address(topology.ladder.digits(1), later)
    stream_of_ids = parts.stream_name("kbd", parts.IDS)
    first_queue = topology.levels[0].queues[0].name
    ways: list[tuple[str, str, dict[str, Any]]] = [
        (level, passing, {}),
        (level, waiting, {}),
        (level, "nowhere", {"CC": [passing]}),
        (level, "nowhere", {"BCC": [passing]}),
        (topology.delivery, passing, {}),
        ("", later.routing_key, {}),
        ("", stream_of_ids, {"x-exchange": "kbd.v2.amendments", "x-routing-key": "ids"}),
        ("", first_queue, {"CC": [waiting]}),
    ]
    names = [str(number) for number in range(len(ways) * len(deaths))]
    for name, ((exchange, key, headers), dead) in zip(names, product(ways, deaths), strict=True):
        publish(publisher, name, delay=2000)
        at = time.time_ns() // 1_000_000
        later_on = at + 3_600_000
        records: tuple[Record, ...] = (
            Cancel((name,), at),
            Postpone(name, later_on, at),
            Supersede(name, new_generation(at), later_on, at),
        )
        for record, message_id in product(records, (None, b"\xff")):
            forged = {**headers, **dead, parts.ENTERED: "kbd.v2.amendments"}
            message = amqp.Message(
                to_line(record), application_headers=forged, message_id=message_id
            )
            rogue.basic_publish(message, exchange, key)
    wait_until(lambda: records_in_stream(publisher) == 3 + len(names) * 6)

    assert sorted(bodies(collect(consumer, [QUEUE], len(names)))) == sorted(names)


def test_what_is_no_record_stops_nobody(consumer, publisher, collect):
    publish(publisher, "cancelled")
    publish(publisher, "kept")
    cancel("another", connection=publisher)
    bodies_of_none = [b"", b"\xff\xfe", b"null", b'{"cancel": "*"}', b'{"cancel":[1],"at":1}']
    for body in (*bodies_of_none, b"[" * 1_000_000):
        append(publisher, body)
    cancel("cancelled", connection=publisher)
    assert bodies(collect(consumer, [QUEUE], 1)) == ["kept"]


@pytest.fixture(params=["in bulk", "singly", "by who may only read"])
def reader(request, connect, user, monkeypatch):
    """Connect a consumer that reads the streams in one of three ways."""
    if request.param == "singly":
        monkeypatch.setattr(deliveries, "is_possible", lambda _: False)
    url = user(write="^(?!amq.default)") if request.param == "by who may only read" else None
    return lambda: connect(url=url)


def test_what_cannot_be_decoded_in_a_stream_stops_nobody(connect, publisher, collect, reader):
    """Given: who may write to the default exchange puts it there, before and while it is read."""
    QUEUE(publisher.default_channel).declare()
    cancel("another", connection=publisher)
    rogue = connect("amqp").default_channel

    def put_there():
        for name in streams_of_amendments():
            for raw in RAW.values():
                rogue.basic_publish(RawMessage(b"{}", raw), "", name)
            copy = amqp.Message("{}", application_headers={"CC": [name]})
            rogue.basic_publish(copy, "", b"\xff")
        rogue.queue_declare("mail", passive=True)

    put_there()
    first = reader()
    for number, consumer in enumerate((first, first, reader())):
        publish(publisher, f"cancelled {number}")
        publish(publisher, f"kept {number}")
        cancel(f"cancelled {number}", connection=publisher)
        assert bodies(collect(consumer, [QUEUE], 1)) == [f"kept {number}"]
        assert consumer.connection.delay_mechanism.amendments.reader.is_reading
        put_there()


def test_a_stream_that_is_deleted_is_made_again_and_what_was_read_still_counts(
    vhost, consumer, publisher, collect
):
    publish(publisher, "read", delay=1)
    cancel("cancelled", connection=publisher)
    assert bodies(collect(consumer, [QUEUE], 1)) == ["read"]
    vhost.broker.api("DELETE", f"queues/{vhost.name}/kbd.v2.amendments.ids")
    notice_deletion(consumer)
    publish(publisher, "cancelled")
    publish(publisher, "cancelled too")

    cancel("cancelled too", connection=publisher)
    publish(publisher, "kept", delay=750)

    assert bodies(collect(consumer, [QUEUE], 1)) == ["kept"]


@pytest.mark.parametrize("gone", ["exchanges/kbd.v2.amendments", *QUEUES_OF_AMENDMENTS])
@pytest.mark.parametrize("declare", ["lazy", "never"])
def test_a_publisher_notices_that_a_part_of_the_amendments_was_deleted(
    vhost, connect, publisher, gone, declare
):
    headers = {KEY: "a", REPLACES: "m"}
    publish(publisher, "m", 60_000, **headers)
    other = connect(binary_delay={"declare": declare})
    publish(other, "m", 60_000, **headers)
    kind, name = gone.split("/")
    vhost.broker.api("DELETE", f"{kind}/{vhost.name}/{name}")

    if declare == "never":
        # It is known only by the record of what is published, and then before anything is.
        with pytest.raises(AmendmentError, match=r"^2 messages were published, but not recorded"):
            publish(other, "m", 60_000, **headers)
        with pytest.raises(AmendmentError, match=r"^messages cannot be amended: .* create"):
            publish(other, "m", 60_000, **headers)
    else:
        publish(other, "m", 60_000, **headers)
        names = {row["name"] for row in vhost.broker.api("GET", f"{kind}/{vhost.name}")}
        assert name in names


@pytest.mark.timeout(300)
def test_nobody_waits_for_the_streams_of_a_starting_node_when_they_are_deleted(
    vhost, connect, publisher, collect, monkeypatch
):
    cancel("cancelled", connection=publisher)
    # Before the message is due: else it would be parked.
    QUEUE(publisher.default_channel).declare()
    publish(publisher, "read", delay=1)
    assert bodies(collect(connect(), [QUEUE], 1)) == ["read"]
    for name in streams_of_amendments():
        vhost.broker.api("DELETE", f"queues/{vhost.name}/{name}")

    monkeypatch.setattr(reading, "_START", 3600.0)
    publish(publisher, "kept", delay=1)
    assert bodies(collect(connect(), [QUEUE], 1)) == ["kept"]


@pytest.mark.own_broker
def test_a_consumer_waits_for_the_streams_of_a_node_that_is_just_starting(
    vhost, connect, publisher, collect, monkeypatch
):
    cancel("cancelled", connection=publisher)
    QUEUE(publisher.default_channel).declare()
    publish(publisher, "cancelled", delay=1)
    publish(publisher, "kept", delay=1)
    wait_until(lambda: vhost.waiting(QUEUE.name) == {QUEUE.name: 2})
    bring_back: list[Any] = [take_away(vhost, *streams_of_amendments())]
    ask = reading.Reader._existing  # noqa: SLF001 - it asks which streams there are

    def ask_then_bring_back(reader):
        try:
            return ask(reader)
        finally:
            if bring_back:
                bring_back.pop()()

    monkeypatch.setattr(reading.Reader, "_existing", ask_then_bring_back)
    monkeypatch.setattr(reading, "_START", PATIENCE)

    assert bodies(collect(connect(), [QUEUE], 1)) == ["kept"]
    assert not bring_back


@pytest.mark.own_broker
def test_a_consumer_that_waits_no_longer_for_streams_says_so_and_reads_them_later(  # noqa: PLR0913, PLR0917 - fixtures
    vhost, connect, publisher, collect, monkeypatch, caplog
):
    monkeypatch.setattr(reading, "_START", 0.5)
    reading._warnings.clear()  # noqa: SLF001 - another test may have been warned
    cancel("cancelled", connection=publisher)
    QUEUE(publisher.default_channel).declare()
    publish(publisher, "kept", delay=1)
    bring_back = take_away(vhost, *streams_of_amendments())

    consumer = connect()
    assert bodies(collect(consumer, [QUEUE], 1)) == ["kept"]
    words = "cancelled messages run: RabbitMQ has not started kbd.v2.amendments.ids"
    assert caplog.text.count(words) == 1

    bring_back()
    monkeypatch.setattr(reading, "_LOOK_EVERY", -reading.LOOK_AGAIN)
    publish(publisher, "cancelled", delay=1)
    publish(publisher, "kept too", delay=500)
    assert bodies(collect(consumer, [QUEUE], 1)) == ["kept too"]
    assert caplog.text.count("amendments are not read") == 1


def test_a_consumer_that_was_busy_knows_all_records_before_the_next_message(
    vhost, consumer, publisher
):
    amendments = publisher.connection.delay_mechanism.amendments
    for number, name in enumerate(("first", "second", "superseded"), 1):
        publish(publisher, name, delay=1, **{KEY: name})
        wait_until(lambda: vhost.waiting(QUEUE.name) == {QUEUE.name: number})  # noqa: B023
    arrived = []

    def write(count):
        amendments.write([Supersede("k", f"{n:x}-k", 0, 0, keyed=True) for n in range(count)])

    def work(body, message):
        arrived.append(body)
        if body == "first":
            # The second message comes between these records.
            write(PREFETCH // 2)
            message.ack()
            wait_until(lambda: vhost.waiting(QUEUE.name) == {QUEUE.name: 1})
            # More than the broker sends to a consumer that reads none.
            write(5 * PREFETCH)
            publish(publisher, "last", delay=1, **{KEY: "superseded"})
        else:
            message.ack()

    with consumer.Consumer(QUEUE, callbacks=[work], prefetch_count=1):
        drain_until(consumer, lambda: "last" in arrived)
    assert arrived == ["first", "second", "last"]


def cut(connection, _):
    connection.connection.transport.sock.shutdown(socket.SHUT_RDWR)


def close(_, vhost):
    vhost.broker.ctl("close_all_connections", "-p", vhost.name, "a test")


@pytest.mark.own_broker
@pytest.mark.parametrize("end", [cut, close])
def test_an_amendment_by_a_consuming_connection_hides_no_end_of_it(vhost, consumer, publisher, end):
    cancel("x", connection=publisher)
    with consumer.Consumer(QUEUE, callbacks=[lambda body, message: message.ack()]):
        end(consumer, vhost)
        for _ in range(2):
            with pytest.raises(consumer.connection_errors):
                cancel("y", connection=consumer)
    # One that does not consume connects again, and so does one of a pool, which nobody consumes by.
    end(publisher, vhost)
    cancel("y", connection=publisher)
    app = Celery(broker=vhost.url, set_as_current=False)
    app.conf.broker_transport = "kombu_binary_delay:Transport"
    with (
        app.pool.acquire() as pooled,
        closing(pooled.connection.sock),
        suppress(*pooled.connection_errors),
        pooled.Consumer(QUEUE, callbacks=[]),
    ):
        end(pooled, vhost)
        pooled.drain_events(timeout=1)
    cancel(app.AsyncResult("z"))
    app.pool.force_close_all()


@pytest.mark.parametrize("several", [tuple, set, iter, lambda results: {0: results[0]}.values()])
def test_results_are_cancelled_on_the_broker_of_their_app(vhost, several):
    theirs, other = (Celery(broker=url, set_as_current=False) for url in (vhost.url, "amqp://x"))
    theirs.conf.broker_transport = "kombu_binary_delay:Transport"
    with pytest.raises(AmendmentError, match="are of 2 Celery apps; give those of one app"):
        cancel([theirs.AsyncResult("a"), other.AsyncResult("b")])
    cancel(several([theirs.AsyncResult("a")]))
    assert "kbd.v2.amendments.ids" in {queue["name"] for queue in vhost.queues()}
    theirs.pool.force_close_all()


def test_what_is_in_a_stream_is_not_put_off_since_each_consumer_would_add_a_copy(
    consumer, publisher, caplog
):
    channel = consumer.default_channel
    channel.queue_declare(
        "log", durable=True, auto_delete=False, arguments={"x-queue-type": "stream"}
    )
    publisher.Producer().publish(
        "x", routing_key="log", message_id="put off", headers={"x-delay": 1}
    )
    reschedule("put off", countdown=3600, connection=publisher)
    got: list[Any] = []
    channel.basic_qos(0, 10, a_global=False)
    channel.basic_consume("log", callback=got.append, arguments={"x-stream-offset": "first"})
    drain_until(consumer, lambda: got)
    assert "put off is not postponed, but delivered now: it is in a stream" in caplog.text


def test_what_is_made_from_a_task_and_replaces_another_has_a_generation_of_its_own(vhost, consumer):
    app = Celery(broker=vhost.url, set_as_current=False)
    app.conf.broker_transport = "kombu_binary_delay:Transport"
    app.conf.task_default_queue = QUEUE.name
    made = app.signature("shop.pay").set(headers={GENERATION: "1-1", REPLACES: "other"})
    replace(made, "x")
    app.pool.force_close_all()
    headers = QUEUE(consumer.default_channel).get(no_ack=True).headers
    assert (headers[REPLACES], headers[GENERATION] != "1-1") == ("x", True)


def test_records_that_come_while_a_stream_is_deleted_leave_the_connection_as_it_is(
    vhost, consumer, publisher
):
    publish(publisher, "first", **{KEY: "other"})
    arrived = []
    with consumer.Consumer(QUEUE, callbacks=[lambda body, message: arrived.append(body)]):
        publisher.connection.delay_mechanism.amendments.write(
            [Supersede("k", f"{number:x}-k", 0, 0, keyed=True) for number in range(500)]
        )
        vhost.broker.api("DELETE", f"queues/{vhost.name}/kbd.v2.amendments.ids")
        publisher.connection.delay_mechanism.amendments.write(
            [Supersede("k", f"{number:x}-k", 0, 0, keyed=True) for number in range(500)]
        )
        publish(publisher, "last", delay=1)
        drain_until(consumer, lambda: "last" in arrived)


def test_a_stream_that_is_missing_keeps_nobody_from_the_other(
    vhost, connect, consumer, publisher, collect
):
    publish(publisher, "superseded", **{KEY: "document"})
    vhost.broker.api("DELETE", f"queues/{vhost.name}/kbd.v2.amendments.ids")
    publish(publisher, "latest", **{KEY: "document"})
    publish(publisher, "end", delay=1000)
    assert set(bodies(collect(consumer, [QUEUE], 2))) == {"latest", "end"}

    publish(publisher, "cancelled")
    cancel("cancelled", connection=publisher)
    publish(publisher, "superseded too", **{KEY: "document"})
    publish(publisher, "latest too", **{KEY: "document"})
    publish(publisher, "end too", delay=1000)
    assert set(bodies(collect(consumer, [QUEUE], 2))) == {"latest too", "end too"}


def test_a_consumer_that_the_broker_refuses_an_amendment_goes_on_to_read(
    user, connect, publisher, collect
):
    cancel("x", connection=publisher)
    QUEUE(publisher.default_channel).declare()
    reader = connect(url=user(write="^(?!kbd.v2.amendments$).*"))
    publish(publisher, "first", delay=1)
    assert bodies(collect(reader, [QUEUE], 1)) == ["first"]
    with pytest.raises(AmendmentError, match="may not amend"):
        cancel("y", connection=reader)
    publish(publisher, "cancelled")
    cancel("cancelled", connection=publisher)
    publish(publisher, "kept", delay=750)
    assert bodies(collect(reader, [QUEUE], 1)) == ["kept"]


def test_streams_that_come_and_go_leave_no_channel_and_no_consumer_behind(
    vhost, consumer, publisher, collect, dropped
):
    counts: list[int] = []
    for number in range(4):
        cancel(f"cancelled {number}", connection=publisher)
        publish(publisher, f"cancelled {number}", delay=1)
        publish(publisher, f"kept {number}", delay=250)
        assert bodies(
            collect(consumer, [QUEUE], 1, until=lambda count=number + 1: len(dropped) == count)
        ) == [f"kept {number}"]
        counts.append(len(consumer.connection.channels))
        # The broker's word on a channel that was left may still be to come.
        drain_until(consumer, lambda: len(consumer.connection.channels) == counts[0])
        for name in ("ids", "keys"):
            vhost.broker.api("DELETE", f"queues/{vhost.name}/kbd.v2.amendments.{name}")
        notice_deletion(consumer)
    assert remembered(consumer) == 4


def test_a_reading_that_is_interrupted_leaves_no_consumer_behind(consumer, publisher, monkeypatch):
    """Otherwise records would be read twice, and a key's latest message could be dropped."""
    amendments = consumer.connection.delay_mechanism.amendments
    now = time.time_ns() // 1_000_000
    # More than the broker sends ahead.
    names = [f"{number}" for number in range(5000)]
    publisher.connection.delay_mechanism.amendments.write(Cancel((name,), now) for name in names)
    with monkeypatch.context() as patched:
        patched.setattr(StreamChannel, "read_until", interrupted)
        with pytest.raises(KeyboardInterrupt):
            amendments.reader.catch_up()

    read: list[tuple[memory.Memory, str]] = []
    learn = memory.Memory.learn

    def learned(self, record, *given, **options):
        read.extend((self, name) for name in record.names)
        learn(self, record, *given, **options)

    monkeypatch.setattr(memory.Memory, "learn", learned)
    amendments.reader._looked = float("-inf")  # noqa: SLF001 - as a second later
    amendments.reader.catch_up()
    amendments.reader.refresh()
    assert [name for where, name in read if where is amendments.memory] == names


def interrupted(*_):
    raise KeyboardInterrupt


def test_more_records_than_are_sent_at_once_are_read_before_the_first_message(
    connect, publisher, consumer, collect
):
    names = [f"id-{number}" for number in range(3 * PREFETCH)]
    now = time.time_ns() // 1_000_000
    publisher.connect()
    amendments = publisher.connection.delay_mechanism.amendments
    amendments.write([Cancel((name,), now) for name in names])
    for body in (names[0], names[-1], "kept"):
        publish(publisher, body, delay=1)
    late = connect()
    assert bodies(collect(late, [QUEUE], 1)) == ["kept"]
    assert remembered(late) == len(names)


def test_of_twenty_messages_with_one_key_the_last_arrives(consumer, publisher, collect, dropped):
    for number in range(20):
        publish(publisher, f"{number}", **{KEY: "document"})
    publish(publisher, "end", delay=1000)
    arrivals = collect(consumer, [QUEUE], 2, until=lambda: len(dropped) == 19)
    assert set(bodies(arrivals)) == {"19", "end"}
    assert {message.reason for message in dropped} == {"superseded"}
    assert len(dropped) == 19


def test_a_retry_of_what_was_published_without_the_transport_supersedes_nothing(
    consumer, publisher, collect
):
    publish(publisher, "newer", **{KEY: "k"})
    # Longer than a message with a key may wait, which would be an error.
    for wait in (100, generations.LONGEST_KEYED + 60_000):
        eta = datetime.now(UTC) + timedelta(milliseconds=wait)
        retry = {"id": "a", "task": "t", "retries": 1, "eta": eta.isoformat(), KEY: "k"}
        publisher.Producer().publish("retry", routing_key="mail", headers=retry)
    assert sorted(bodies(collect(consumer, [QUEUE], 2))) == ["newer", "retry"]


def test_a_key_is_cancelled_until_a_message_has_it_again_for_a_consumer_that_starts_later(
    connect, consumer, publisher, collect
):
    cancel("x", connection=publisher)
    for key, names in (("a", ["cancelled"]), ("b", ["cancelled too", "anew"])):
        for name in names:
            publish(publisher, name, **{KEY: key})
            if name != "anew":
                cancel(key, connection=publisher)
    publish(publisher, "end", delay=1000)
    assert set(bodies(collect(connect(), [QUEUE], 2))) == {"anew", "end"}


def test_a_message_is_replaced_by_a_later_or_an_earlier_one(consumer, publisher, collect):
    for name, delay in ("sooner", 3000), ("later", 500):
        publish(publisher, name, delay=delay)
    for name, delay in ("sooner", 500), ("later", 1500):
        Producer(publisher.default_channel).publish(
            f"{name}, anew",
            routing_key="mail",
            message_id=name,
            headers={"x-delay": delay, REPLACES: name},
        )
    publish(publisher, "end", delay=3500)
    arrivals = collect(consumer, [QUEUE], 3)
    assert set(bodies(arrivals)) == {"sooner, anew", "later, anew", "end"}


def test_a_postponed_message_arrives_at_its_new_time_once(consumer, publisher, collect):
    publish(publisher, "postponed", delay=500)
    began = time.time()
    reschedule("postponed", countdown=2, connection=publisher)
    publish(publisher, "end", delay=2500)
    at = {arrival.body: arrival.at for arrival in collect(consumer, [QUEUE], 2)}
    assert set(at) == {"postponed", "end"}
    assert at["postponed"] - began >= 2


@pytest.mark.parametrize(
    ("settings", "ids"),
    [({}, ["a", "b"]), ({"declare": "never"}, "a"), ({"foreign_ladder": "nservicebus"}, "a")],
    ids=["several", "declare never", "foreign ladder"],
)
def test_what_the_stream_would_forget_before_it_is_due_is_an_error(connect, vhost, settings, ids):
    client = connect(binary_delay=settings)
    eta = datetime.now(UTC) + timedelta(days=60)
    with pytest.raises(AmendmentError, match=r"records are kept for 2678400 s; cancel each"):
        cancel(ids, eta=eta, connection=client)
    assert not any("amendments" in queue["name"] for queue in vhost.queues())


def test_a_postponed_message_looks_as_it_was_published_and_arrives_once_in_each_queue(
    consumer, publisher, collect
):
    exchange = Exchange("events", "topic")
    queues = [Queue("a", exchange, "user.*"), Queue("b", exchange, "user.created")]
    for queue in queues:
        bound = queue(consumer.default_channel)
        bound.declare()
        # From its first look on, delayed messages take this way.
        assert bound.get() is None
    Producer(publisher.default_channel).publish(
        "postponed",
        exchange="events",
        routing_key="user.created",
        message_id="postponed",
        priority=3,
        headers={"x-delay": 500, "CC": ["user.changed"]},
    )
    reschedule("postponed", countdown=2, connection=publisher)
    publish(publisher, "end", delay=4000)
    arrivals = collect(consumer, [*queues, QUEUE], 3)
    assert sorted(bodies(arrivals)) == ["end", "postponed", "postponed"]
    twins = [arrival for arrival in arrivals if arrival.body == "postponed"]
    assert {twin.queue for twin in twins} == {"a", "b"}
    assert {(twin.exchange, twin.key) for twin in twins} == {("events", "user.created")}
    assert [twin.headers["CC"] for twin in twins] == [["user.changed"]] * 2


#: Text in these, decoded and encoded again, can be other bytes, or none at all.
ENCODINGS = (
    "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be", "utf-7",
    "unicode_escape", "raw_unicode_escape", "shift_jis", "hz", "iso2022_jp", "latin-1", "cp1252",
    "gb18030",
)  # fmt: skip
BODIES: dict[str, tuple[str | None, bytes]] = {
    **{encoding: (encoding, "é ~{ ~~ \\ a\n".encode(encoding, "ignore")) for encoding in ENCODINGS},
    "utf-16 without a mark": ("utf-16", b"a\x00"),
    "utf-16 of the other order": ("utf-16", b"\xfe\xff\x00a"),
    "utf-7 in another form": ("utf-7", b"+AGE-"),
    "unicode_escape in another form": ("unicode_escape", b"\\x61"),
    "shift_jis in another form": ("shift_jis", b"\x81\x5f\\"),
    "hz in another form": ("hz", b"~{VP~}~{VP~}"),
    "not what it says": ("utf-8", b"\xff\x00"),
    "compressed": ("gzip", b"\x1f\x8b"),
    "of no encoding": (None, b"a"),
    "empty": (None, b""),
    "empty utf-16": ("utf-16", b""),
    "empty gzip": ("gzip", b""),
}


def test_what_is_postponed_keeps_the_bytes_of_its_body_whatever_it_is_encoded_in(
    consumer, publisher, vhost
):
    channel = publisher.default_channel
    for name, (encoding, body) in BODIES.items():
        properties = {"message_id": name, "application_headers": {"x-delay": 5000}}
        if encoding is not None:
            properties["content_encoding"] = encoding
        channel.basic_publish(amqp.Message(body, **properties), "", "mail")
    reschedule(list(BODIES), countdown=8, connection=publisher)
    publish(publisher, "first", delay=5000)
    publish(publisher, "end", delay=10_000)
    seen: list[str] = []

    def take(_: Any, message: Any) -> None:
        seen.append(message.properties["message_id"])
        message.ack()

    with consumer.Consumer(QUEUE, on_message=partial(take, None), accept=None):
        drain_until(consumer, lambda: "first" in seen)
    assert seen == ["first"], "they were not postponed"

    wait_until(lambda: vhost.waiting("mail")["mail"] == len(BODIES) + 1)
    reader = amqp.Channel(consumer.connection, auto_decode=False)
    reader.open()
    arrived = {}
    while (message := reader.basic_get("mail", no_ack=True)) is not None:
        encoding = message.properties.get("content_encoding")
        arrived[message.properties["message_id"]] = encoding, bytes(message.body or b"")
    del arrived["end"]
    assert arrived == BODIES


def test_what_cannot_be_delayed_again_is_delivered_and_holds_up_nobody(  # noqa: PLR0913, PLR0917
    user, connect, consumer, publisher, collect, caplog
):
    for name in ("postponed", "next"):
        publish(publisher, name)
    reschedule("postponed", countdown=3600, connection=publisher)
    url = user(write="^amq.default$", configure="^$")
    reader = connect(url=url, binary_delay={"declare": "never"})
    bare = Queue("mail", no_declare=True)
    assert sorted(bodies(collect(reader, [bare], 2))) == ["next", "postponed"]
    assert "is not postponed, but delivered now" in caplog.text


class Nested(amqp.Message):
    """A message whose header py-amqp can read, and cannot write."""

    def _serialize_properties(self):
        table = b"\0\0\0\0"
        for name in (b"\0",) * 600 + (b"\6nested",):
            entry = name + b"F" + table
            table = len(entry).to_bytes(4, "big") + entry
        name = self.properties["message_id"].encode()
        return b"\x20\x80" + table + bytes([len(name)]) + name


def test_what_cannot_be_written_again_is_delivered_and_holds_up_nobody(
    connect, consumer, publisher, collect, caplog
):
    """Given: a header that is nested too deep, and one that leaves no room for the ladder's."""
    full = amqp.Message(b"full", message_id="full", application_headers={"x": "x" * 131_000})
    for message in (full, Nested(b"nested", message_id="nested"), amqp.Message("next")):
        connect("amqp").default_channel.basic_publish(message, "", "mail")
    reschedule(["full", "nested"], countdown=3600, connection=publisher)

    assert sorted(bodies(collect(consumer, [QUEUE], 3))) == ["full", "nested", "next"]
    assert caplog.text.count("is not postponed, but delivered now: it cannot be written") == 2


def test_a_listener_that_fails_stops_no_consumer(consumer, publisher, collect, dropped, caplog):
    def fail(_: Any) -> None:
        raise ValueError("listener")

    watch.dropped.insert(0, fail)
    publish(publisher, "cancelled")
    cancel("cancelled", connection=publisher)
    publish(publisher, "kept", delay=750)
    assert bodies(collect(consumer, [QUEUE], 1, until=lambda: dropped)) == ["kept"]
    assert [message.id for message in dropped] == ["cancelled"]
    assert "listener" in caplog.text


def test_who_waits_for_results_gets_them_and_reads_no_amendments(vhost, publisher):
    cancel("another", connection=publisher)
    app = Celery(broker=vhost.url, backend="rpc://", set_as_current=False)
    app.conf.broker_transport = "kombu_binary_delay:Transport"
    backend = app.backend
    with closing(app):
        result = app.send_task("task")
        request = SimpleNamespace(reply_to=backend.oid, correlation_id=result.id)
        backend.store_result(result.id, "done", "SUCCESS", request=request)

        assert result.get(timeout=PATIENCE) == "done"
        assert not remembered(backend.result_consumer._connection)  # noqa: SLF001 - nothing else shows it
        backend.result_consumer.stop()


def test_the_queue_that_was_declared_last_is_amended_without_its_name(consumer, publisher):
    publish(publisher, "cancelled", delay=250)
    publish(publisher, "kept", delay=500)
    cancel("cancelled", connection=publisher)
    channel = consumer.channel()
    got: list[Any] = []
    channel.queue_declare("mail", durable=True, auto_delete=False)
    channel.basic_consume("", no_ack=True, callback=got.append)
    drain_until(consumer, lambda: got)
    assert [message.body for message in got] == ["kept"]


BAD: dict[str, Any] = {  # what is wrong with it, and the call
    "an empty id": lambda **kw: cancel("", **kw),
    "no id": lambda **kw: cancel([], **kw),
    "a number": lambda **kw: cancel(7, **kw),
    "an id that is too long": lambda **kw: cancel("x" * 256, **kw),
    "a naive time": lambda **kw: cancel("a", eta=datetime(2050, 1, 1), **kw),  # noqa: DTZ001
    "a time that has passed": lambda **kw: cancel("a", eta=datetime(2020, 1, 1, tzinfo=UTC), **kw),
    "no time": lambda **kw: reschedule("a", **kw),
    "two times": lambda **kw: reschedule(
        "a", countdown=1, eta=datetime(2050, 1, 1, tzinfo=UTC), **kw
    ),
    "no number": lambda **kw: reschedule("a", countdown="soon", **kw),  # type: ignore[arg-type]
    "the past": lambda **kw: reschedule("a", countdown=-1, **kw),
    "no end": lambda **kw: reschedule("a", eta=datetime.max.replace(tzinfo=UTC), **kw),
}


def test_bad_input_is_an_error_and_nothing_is_recorded(vhost, publisher, subtests):
    for what, act in BAD.items():
        with subtests.test(what), pytest.raises(AmendmentError):
            act(connection=publisher)
    assert not any("amendments" in queue["name"] for queue in vhost.queues())


#: Headers of a message that cannot replace another.
BAD_HEADERS: list[dict[str, Any]] = [
    {KEY: ""},
    {KEY: 7},
    {KEY: "x" * 256},
    {KEY: "a", "x-delay": 86_400_000},
    {KEY: "a", "x-delay-key-max-wait": "1 h"},
    {KEY: "a", "x-delay-key-max-wait": 86_400_000},
    {REPLACES: None},
    {REPLACES: "a", "x-delay": 10**12},
]


def test_a_message_that_cannot_replace_another_is_not_published(vhost, publisher, subtests):
    QUEUE(publisher.default_channel).declare()
    for headers in BAD_HEADERS:
        with subtests.test(repr(headers)), pytest.raises((AmendmentError, DelayError)):
            publish(publisher, "never", **{"x-delay": 1, **headers})
    assert QUEUE(publisher.default_channel).get() is None
    assert not any("amendments" in queue["name"] for queue in vhost.queues())


def test_a_retry_that_replaces_another_and_cannot_be_delayed_is_left_to_a_worker(publisher, caplog):
    QUEUE(publisher.default_channel).declare()
    task = {"id": "1", "task": "t", "retries": 1, "eta": "2100-01-01T00:00:00+00:00"}
    publisher.Producer().publish("again", routing_key="mail", headers={**task, REPLACES: "a"})
    assert QUEUE(publisher.default_channel).get().payload == "again"
    assert "a retry of t is left to a worker" in caplog.text


@pytest.mark.parametrize("transport", ["amqp", "memory"])
def test_an_amendment_by_a_connection_of_another_transport_is_an_error(connect, transport):
    connection = connect("amqp") if transport == "amqp" else Connection("memory://")
    for _ in range(2):
        with pytest.raises(AmendmentError, match="without the transport"):
            cancel("a", connection=connection)
        # Not only before it connects.
        connection.default_channel  # noqa: B018 - it connects


def test_where_amendments_are_switched_off_nothing_is_amended(connect, publisher, collect):
    off = connect(binary_delay={"amendments": False})
    QUEUE(off.default_channel).declare()
    with pytest.raises(AmendmentError, match="setting amendments is False"):
        cancel("a", connection=off)
    publish(publisher, "a")
    cancel("a", connection=publisher)
    assert bodies(collect(off, [QUEUE], 1)) == ["a"]


def test_a_record_says_in_json_what_the_wire_format_says(vhost, publisher):
    begin = time.time_ns() // 1_000_000
    cancel(["a", "b"], connection=publisher)
    end = time.time_ns() // 1_000_000
    written = json.loads(first_record(publisher, such=names_something).body)
    assert begin <= written.pop("at") <= end
    assert written == {"cancel": ["a", "b"]}


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_batch_records_what_its_messages_supersede(consumer, publisher, collect, dropped, size):
    publish(publisher, "a", delay=1000)
    producer = Producer(publisher.default_channel)
    with PublishBatch(publisher.default_channel, size) as batch:
        for number in range(10):
            for key in "xy":
                batch.publish(prepared(producer, f"{key}{number}", {KEY: key}), "", "mail")
        batch.publish(prepared(producer, "a", {REPLACES: "a"}, body="new"), "", "mail")
        batch.publish(prepared(producer, "other", {}), "", "mail")
        with pytest.raises(AmendmentError, match="must be a non-empty string, got 7"):
            batch.publish(prepared(producer, "bad", {KEY: 7}), "", "mail")
    publish(publisher, "end", delay=1500)
    arrived = bodies(collect(consumer, [QUEUE], 5, until=lambda: len(dropped) == 19))
    assert len(arrived) == 5
    assert set(arrived) == {"x9", "y9", "new", "other", "end"}
    assert len(dropped) == 19


def test_what_a_batch_has_sent_is_recorded_even_if_its_block_ends_with_an_error(
    consumer, publisher, collect
):
    producer = Producer(publisher.default_channel)
    outcomes: list[Outcome] = []
    with (
        suppress(ZeroDivisionError),
        PublishBatch(publisher.default_channel, 100, outcomes.append) as batch,
    ):
        for number in range(120):
            batch.publish(prepared(producer, f"{number}", {KEY: "x"}), "", "mail", tag=number)
        raise ZeroDivisionError
    publish(publisher, "end", delay=1500)

    # The last twenty were buffered.
    assert Counter(outcome.state for outcome in outcomes) == {"confirmed": 100, "discarded": 20}
    assert set(bodies(collect(consumer, [QUEUE], 2))) == {"99", "end"}


def test_a_batch_tells_what_was_published_and_not_recorded_when_the_connection_broke(
    consumer, publisher, monkeypatch
):
    producer, connection = Producer(publisher.default_channel), publisher.connection
    outcomes: list[Outcome] = []
    batch = PublishBatch(publisher.default_channel, 10, outcomes.append)
    batch.publish(prepared(producer, "a", {KEY: "x"}), "", "mail", tag="a")

    def broken(_):
        connection.collect()
        raise RecoverableConnectionError("gone")

    monkeypatch.setattr(connection.delay_mechanism.amendments, "write", broken)
    with pytest.raises(UnconfirmedError, match=r"'a' unknown .it was published, but not recorded"):
        batch.flush()
    batch.close()

    assert [(outcome.tag, outcome.state) for outcome in outcomes] == [("a", "unknown")]


@pytest.mark.parametrize("reports", [True, False], ids=["with on_outcome", "without"])
def test_a_record_that_is_refused_is_an_outcome_of_its_own_message_and_the_batch_goes_on(
    publisher, monkeypatch, reports
):
    producer, amendments = (
        Producer(publisher.default_channel),
        publisher.connection.delay_mechanism.amendments,
    )
    outcomes: list[Outcome] = []
    batch = PublishBatch(publisher.default_channel, 1, outcomes.append if reports else None)
    batch.publish(prepared(producer, "a", {KEY: "x"}), "", "mail", tag="a")
    write = amendments.write

    def refuses(records):
        monkeypatch.setattr(amendments, "write", write)
        raise AmendmentError("the streams did not take it")

    monkeypatch.setattr(amendments, "write", refuses)
    # Before the first of these is sent, the message before it is recorded.
    for name in "bc":
        batch.publish(prepared(producer, name, {KEY: "y"}), "", "mail", tag=name)
    if reports:
        batch.flush()
        assert {outcome.tag: outcome.state for outcome in outcomes} == {
            "a": "unknown",
            "b": "confirmed",
            "c": "confirmed",
        }
    else:
        with pytest.raises(
            UnconfirmedError, match=r"1 messages.*'a' unknown .it was published, but"
        ):
            batch.flush()
    batch.close()


def test_what_a_batch_has_sent_is_recorded_even_if_its_channel_is_closed(
    consumer, publisher, collect
):
    producer = Producer(publisher.default_channel)
    outcomes: list[Outcome] = []
    batch = PublishBatch(publisher.default_channel, 10, outcomes.append)
    for number in range(3):
        batch.publish(prepared(producer, f"{number}", {KEY: "x"}), "", "mail", tag=number)
    batch.flush()
    for number in (3, 4):
        batch.publish(prepared(producer, f"{number}", {KEY: "x"}), "", "mail", tag=number)
    batch._send_all()  # noqa: SLF001 - as a full buffer does
    drain_until(publisher, lambda: all(pending.state for pending in batch._to_record))  # noqa: SLF001
    batch.publish(amqp.Message("m"), "no such exchange", "mail", tag="nowhere")
    with pytest.raises(UnconfirmedError, match="no such exchange"):
        batch.flush()
    batch.close()
    publish(publisher, "end", delay=1500)

    assert [outcome.state for outcome in outcomes] == [*["confirmed"] * 5, "unknown"]
    assert set(bodies(collect(consumer, [QUEUE], 2))) == {"4", "end"}


def prepared(producer, name, headers, body=None):
    return producer.channel.prepare_message(
        body or name,
        content_type="text/plain",
        content_encoding="utf-8",
        headers={"x-delay": 1000, **headers},
        properties={"message_id": name},
    )


@pytest.mark.skipif(not hasattr(Producer, "batch"), reason="Kombu 5.7 and later have batches")
def test_the_batch_of_a_producer_knows_keys(consumer, publisher, collect):
    producer = Producer(publisher.default_channel)
    with producer.batch():
        for number in range(5):
            producer.publish(
                f"{number}", routing_key="mail", headers={"x-delay": 500, KEY: "document"}
            )
    assert bodies(collect(consumer, [QUEUE], 1, more=0.5)) == ["4"]


def test_a_consumer_without_acks_gets_only_what_was_not_amended(consumer, publisher, dropped):
    for name in ("cancelled", "postponed", "kept"):
        publish(publisher, name)
    start = time.time()
    cancel("cancelled", connection=publisher)
    reschedule("postponed", countdown=1.5, connection=publisher)
    arrived: list[str] = []
    with consumer.Consumer(
        QUEUE, callbacks=[lambda body, _: arrived.append(body)], no_ack=True
    ) as bare_consumer:
        drain_until(consumer, lambda: len(arrived) == 2 and dropped)
        assert time.time() >= start + 1.5
        bare_consumer.cancel()
    assert set(arrived) == {"kept", "postponed"}
    assert [message.id for message in dropped] == ["cancelled"]
    assert QUEUE(consumer.default_channel).queue_declare(passive=True).message_count == 0


def test_a_consumer_that_waits_for_a_limited_time_is_not_kept_waiting(consumer, publisher, dropped):
    """A mixin calls ``drain_events`` with a timeout, and looks after itself in between."""

    class Worker(ConsumerMixin):
        def __init__(self) -> None:
            self.connection = consumer
            self.arrived: list[str] = []
            self.passes = 0

        def get_consumers(self, Consumer, channel):  # noqa: N803 - Kombu's own
            return [Consumer(QUEUE, callbacks=[self.take])]

        def on_iteration(self) -> None:
            self.passes += 1
            self.should_stop = "end" in self.arrived and len(dropped) == 10

        def take(self, body, message) -> None:
            self.arrived.append(body)
            message.ack()

    for number in range(10):
        publish(publisher, f"{number}", delay=500 + 50 * number)
    publish(publisher, "end", delay=1500)
    cancel([f"{number}" for number in range(10)], connection=publisher)
    worker = Worker()
    for _ in worker.consume(limit=None, timeout=None, safety_interval=0.1):
        pass
    assert worker.arrived == ["end"]
    assert len(dropped) == 10


def test_what_was_delivered_before_and_not_acknowledged_is_amended_too(
    connect, consumer, publisher, collect
):
    for name in ("cancelled", "kept"):
        publish(publisher, name, delay=1)
    first = connect()
    seen: list[Any] = []
    with first.Consumer(QUEUE, callbacks=[lambda _, message: seen.append(message)]):
        drain_until(first, lambda: len(seen) == 2)
        cancel("cancelled", connection=publisher)
        first.close()
    assert bodies(collect(consumer, [QUEUE], 1)) == ["kept"]


@pytest.fixture
def again(monkeypatch):
    """What is delayed again."""
    seen: list[Any] = []
    delay_again = way_in.WayIn._delay_again  # noqa: SLF001 - to see its calls

    def seen_too(self, message, due):
        delay_again(self, message, due)
        seen.append(message)

    monkeypatch.setattr(way_in.WayIn, "_delay_again", seen_too)
    return seen


def test_priorities_and_expirations_are_kept_by_what_is_postponed(vhost, publisher, connect, again):
    queue = Queue("ranked", max_priority=9)
    consumer = connect()
    queue(consumer.default_channel).declare()
    producer = Producer(publisher.default_channel)
    for name, options in (
        ("low", {"priority": 1}),
        ("high", {"priority": 9}),
        ("between", {"priority": 5, "expiration": 600}),
    ):
        producer.publish(
            name, routing_key="ranked", message_id=name, headers={"x-delay": 500}, **options
        )
    reschedule(["low", "high", "between"], countdown=2, connection=publisher)
    early: list[Any] = []
    channel = consumer.channel()
    consumer.Consumer(queue, callbacks=[lambda *_: early.append(1)], channel=channel).consume()
    # Where this takes long, they are due by now, or back.
    drain_until(consumer, lambda: 3 in (len(again), len(early)))
    channel.close()
    wait_until(lambda: vhost.waiting("ranked") == {"ranked": 3})
    got = []
    while (message := queue(consumer.default_channel).get()) is not None:
        properties = message.properties
        got.append((message.body, properties["priority"], properties.get("expiration")))
        message.ack()
    assert got == [("high", 9, None), ("between", 5, "600000"), ("low", 1, None)]


def learn_of_an_alarm(consumer, monkeypatch, pause):
    """Another connection of this process has been blocked: RabbitMQ tells nobody else.

    It would not read the close of one that it blocks, and keep what that has not acknowledged.
    """
    host = consumer.connection.host
    monkeypatch.setattr(alarms, "_blocked", {host: (time.monotonic(), pause)})


@pytest.mark.own_broker
@pytest.mark.slow
def test_what_is_postponed_is_not_early_while_the_broker_blocks_publishers(
    consumer, publisher, own_broker, monkeypatch
):
    """To delay it again needs a publish, which the broker does not take then."""
    monkeypatch.setattr(alarms, "PAUSE", 5.0)
    arrived: list[tuple[str, float]] = []
    publish(publisher, "postponed", delay=2000)
    publish(publisher, "other", delay=2500)
    due = time.time() + 14
    reschedule("postponed", countdown=14, connection=publisher)

    def take(body, message):
        arrived.append((body, time.time()))
        message.ack()

    with own_broker.alarm():
        learn_of_an_alarm(consumer, monkeypatch, alarms.PAUSE)
        consume_until(consumer, QUEUE, take, lambda: arrived and time.time() > due - 10)
    # By another consumer: what the first has held is given back.
    consume_until(consumer, QUEUE, take, lambda: "postponed" in dict(arrived))

    assert min(at for body, at in arrived if body == "postponed") >= due


@pytest.mark.parametrize("options", [{"prefetch_count": 1}, {"no_ack": True}], ids=str)
def test_where_nothing_can_be_held_while_the_broker_blocks_publishers_all_is_delivered(  # noqa: PLR0913, PLR0917 - fixtures
    consumer, publisher, own_broker, options, monkeypatch, caplog
):
    """The alarm may need the consumer to go on; and what is without acks would be lost."""
    arrived: list[str] = []
    for name in ("postponed", "too", "other"):
        publish(publisher, name, delay=2000)
    reschedule(["postponed", "too"], countdown=3600, connection=publisher)

    def take(body, message):
        arrived.append(body)
        if "no_ack" not in options:
            message.ack()

    with own_broker.alarm():
        learn_of_an_alarm(consumer, monkeypatch, alarms.PAUSE)
        consume_until(consumer, QUEUE, take, lambda: len(arrived) == 3, **options)

    assert set(arrived) == {"postponed", "too", "other"}
    assert "is not postponed, but delivered now" in caplog.text


@pytest.mark.slow
def test_what_comes_without_acks_is_not_lost_where_an_alarm_ends_its_connection(
    consumer, publisher, own_broker, caplog
):
    """The program learns of the end: Kombu would connect again, and not consume."""
    arrived: list[str] = []
    publish(publisher, "postponed", delay=15_000)
    reschedule("postponed", countdown=3600, connection=publisher)
    channel = consumer.channel()
    callbacks = [lambda body, _: arrived.append(body)]
    consumer.Consumer(QUEUE, callbacks=callbacks, channel=channel, no_ack=True).consume()

    with own_broker.alarm(), pytest.raises(RecoverableConnectionError, match="alarm"):
        drain_until(consumer, lambda: False)

    assert arrived == ["postponed"]
    assert "is not postponed, but delivered now" in caplog.text


@pytest.fixture
def blocked(consumer, monkeypatch):
    """The broker has blocked a connection of this process a moment ago."""
    learn_of_an_alarm(consumer, monkeypatch, 600.0)


def test_a_new_time_is_a_whole_millisecond_and_no_earlier(publisher):
    eta = (datetime.now(UTC) + timedelta(hours=1)).replace(microsecond=1)
    reschedule("task", eta=eta, connection=publisher)
    due = json.loads(first_record(publisher, such=names_something).body)["due"]
    assert due == int(eta.timestamp()) * 1000 + 1


@pytest.mark.usefixtures("blocked")
def test_what_is_held_in_an_alarm_comes_when_it_is_due(consumer, publisher, collect):
    cancel("another", connection=publisher)  # makes the streams, which takes long
    publish(publisher, "postponed")
    due = time.time() + 10
    reschedule("postponed", countdown=10, connection=publisher)

    (arrival,) = collect(consumer, [QUEUE], 1)

    assert arrival.body == "postponed"
    assert arrival.at >= due


@pytest.fixture
def held(consumer, publisher, blocked):
    """What arrives, where a message is held that is due soon."""
    arrived: list[str] = []
    cancel("another", connection=publisher)  # makes the streams, which takes long
    channel = consumer.channel()
    callbacks = [lambda body, _: arrived.append(body)]
    consumer.Consumer(QUEUE, callbacks=callbacks, channel=channel).consume()
    amendments = consumer.connection.delay_mechanism.amendments
    for countdown in (10, 60):
        arrived.clear()
        now = time.time_ns() // 1_000_000
        reschedule("postponed", countdown=countdown, connection=publisher)
        is_known = partial(amendments.memory.judge, {"message_id": "postponed"}, now)
        drain_until(consumer, is_known)
        publish(publisher, "postponed")
        drain_until(consumer, lambda: arrived or amendments.held.is_holding)
        if amendments.held.is_holding:
            break
        # It came so late that it was due.
    return arrived


def test_what_is_held_comes_where_a_consumer_waits_for_longer(consumer, held):
    while not held:
        # Nothing else comes from the broker.
        consumer.drain_events(timeout=PATIENCE)

    assert held == ["postponed"]


def test_what_is_held_comes_where_an_event_loop_reads_what_the_broker_sends(consumer, held):
    with closing(Hub()) as hub:
        consumer.register_with_event_loop(hub)
        wait_until(lambda: hub.run_once() or held)

    assert held == ["postponed"]


@pytest.mark.usefixtures("blocked")
def test_what_would_be_dropped_at_its_delivery_limit_is_not_held(
    connect, publisher, monkeypatch, caplog
):
    monkeypatch.setattr(way_in, "MOST_RETURNS", 1)
    queue = Queue("limited", queue_arguments={"x-queue-type": "quorum"})
    first, second = connect(), connect()
    queue(first.default_channel).declare()
    Producer(publisher.default_channel).publish(
        "postponed", routing_key="limited", message_id="postponed", headers={"x-delay": 500}
    )
    reschedule("postponed", countdown=3600, connection=publisher)
    arrived: list[str] = []
    options: dict[str, Any] = {
        "callbacks": [lambda body, _: arrived.append(body)],
        "prefetch_count": 10,
    }

    with first.Consumer(queue, **options):
        amendments = first.connection.delay_mechanism.amendments
        drain_until(first, lambda: amendments.held.is_holding)
        first.collect()
    assert not arrived
    with second.Consumer(queue, **options):
        drain_until(second, lambda: arrived)

    assert "at its queue's delivery limit, it would be dropped" in caplog.text


def test_consumers_go_on_where_a_broker_has_lost_the_streams(monkeypatch, connect, own_broker):
    monkeypatch.setattr(reading, "LOOK_AGAIN", 2.0)
    with connect() as connection:
        QUEUE(connection.default_channel).declare()
        # So old, it and the virtual host outlive the kill.
        time.sleep(3)
        cancel("another", connection=connection)
    # The streams are younger than what a node that dies can lose of them.
    own_broker.kill()
    own_broker.start()

    def consumed():
        got: list[Any] = []
        # RabbitMQ 4.3 ends the first connections.
        with suppress(RecoverableConnectionError), connect() as connection:
            publish(connection, "one")
            channel = connection.default_channel
            callbacks = [lambda body, _: got.append(body)]
            with connection.Consumer(QUEUE, callbacks=callbacks, channel=channel):
                drain_until(connection, lambda: got)
        return got

    assert wait_until(consumed)
