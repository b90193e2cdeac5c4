"""Many publishes with few waits: what became of each message is known, and nothing else changes."""

import re
import select
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from unittest.mock import patch
from urllib.parse import urlsplit

import amqp
import pytest
from amqp import spec
from amqp.exceptions import RecoverableConnectionError
from kombu import Connection, Exchange, Producer, Queue

from dev.faults.proxy import Proxy
from kombu_binary_delay import DelayError, Outcome, PublishBatch, UnconfirmedError
from kombu_binary_delay.ladder.address import parse_address
from kombu_binary_delay.publishing.template import Run, Template
from tests.waits import PATIENCE, drain_until, unread, wait_until

DELAYED = {"x-delay": 1000}
#: In milliseconds, of which no test sees the end.
HOUR = 3_600_000
#: The class and the method of Basic.Publish, and the reserved 0 behind them, as they are written.
PUBLISH = struct.pack(">HHH", *spec.Basic.Publish, 0)

needs_kombu_batch = pytest.mark.skipif(
    not hasattr(Producer, "batch"), reason="Kombu has Producer.batch() since 5.7"
)


@pytest.fixture
def channel(connect):
    """A channel of ours, and a queue ``q`` to publish to."""
    channel = connect().default_channel
    Queue("q", channel=channel).declare()
    return channel


@pytest.fixture
def outcomes():
    """What a batch reports to ``on_outcome=outcomes.append``."""
    return []


def send(batch, body, key="q", headers=None, **options):
    batch.publish(message(batch.channel, body, headers), routing_key=key, tag=body, **options)


def send_large(batch, name):
    """Send what is not sent together with anything else."""
    batch.publish(message(batch.channel, name * 100_000), routing_key="q", tag=name)


def message(channel, body, headers=None):
    return channel.prepare_message(
        body, content_type="text/plain", content_encoding="utf-8", headers=headers or {}
    )


def states(outcomes):
    return {outcome.tag: outcome.state for outcome in outcomes}


def test_delayed_and_undelayed_messages_are_confirmed_and_arrive(
    connect, collect, confirm, channel, outcomes
):
    connection = connect(confirm_publish=confirm)
    asked = {str(number): number % 2 for number in range(50)}

    with PublishBatch(connection.default_channel, max_size=7, on_outcome=outcomes.append) as batch:
        before = time.time()
        for body, delayed in asked.items():
            send(batch, body, headers=DELAYED if delayed else None)

    assert states(outcomes) == dict.fromkeys(asked, "confirmed")
    arrivals = collect(connection, [Queue("q")], len(asked))
    assert Counter(arrival.body for arrival in arrivals) == Counter(list(asked))
    assert all(arrival.at >= before + asked[arrival.body] for arrival in arrivals)
    assert not any("x-delay" in arrival.headers for arrival in arrivals)


@pytest.mark.parametrize("delay", [None, 500])
def test_one_dict_of_headers_may_be_changed_for_each_message_of_a_batch(
    connect, collect, channel, delay
):
    headers = {} if delay is None else {"x-delay": delay}
    with PublishBatch(channel) as batch:
        for number in range(10):
            headers["number"] = number
            send(batch, str(number), headers=headers)
        # What is sent later than a tick of the ladder is addressed anew.
        time.sleep(0.2)

    arrivals = collect(connect(), [Queue("q")], 10)
    assert {arrival.body: arrival.headers["number"] for arrival in arrivals} == {
        str(number): number for number in range(10)
    }


def test_no_more_than_max_size_messages_are_unconfirmed(channel, outcomes):
    sent = most = 0

    def count(data):
        nonlocal sent, most
        sent += data.count(PUBLISH)
        batch._report()  # noqa: SLF001 - what was answered and not yet reported
        most = max(most, sent - len(outcomes))
        write(data)

    transport = channel.connection.transport
    write = transport.write
    with (
        PublishBatch(channel, max_size=10, on_outcome=outcomes.append) as batch,
        patch.object(transport, "write", count),
    ):
        for number in range(95):
            send(batch, str(number))
            assert number + 1 - sent < 10
        batch.flush()
    assert (sent, len(outcomes), most) == (95, 95, 10)


def test_messages_are_sent_a_hundred_at_a_time_without_waiting_for_more(channel, vhost):
    batch = PublishBatch(channel)
    for number in range(250):
        send(batch, str(number))
    wait_until(lambda: vhost.waiting("q") == {"q": 200})
    batch.discard()
    batch.close()


def test_what_a_full_queue_refuses_is_nacked_one_by_one(channel, outcomes):
    full = {"x-max-length": 2, "x-overflow": "reject-publish"}
    Queue("full", channel=channel, queue_arguments=full).declare()

    with PublishBatch(channel, on_outcome=outcomes.append) as batch:
        for body in "abcd":
            send(batch, body, "full")
            send(batch, body.upper())

    state_of = states(outcomes)
    assert [state_of[body] for body in "abcd"] == ["confirmed"] * 2 + ["nacked"] * 2
    assert [state_of[body] for body in "ABCD"] == ["confirmed"] * 4


def test_a_flush_names_what_was_nacked_and_the_batch_goes_on(channel):
    Queue(
        "full", channel=channel, queue_arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
    ).declare()
    with PublishBatch(channel) as batch:
        for body in ("first", "second", "third"):
            send(batch, body, "full")

        with pytest.raises(UnconfirmedError, match=r"2 messages .* 'second' nacked") as caught:
            batch.flush()
        assert states(caught.value.outcomes) == {"second": "nacked", "third": "nacked"}

        send(batch, "fourth")
        batch.flush()


def test_what_finds_no_queue_is_returned_one_by_one_even_if_equal(channel, outcomes):
    with PublishBatch(channel, on_outcome=outcomes.append) as batch:
        for tag, key in enumerate(["nowhere", "q", "nowhere", "q", "elsewhere"]):
            alike = message(channel, "all alike")
            batch.publish(alike, routing_key=key, mandatory=True, tag=tag)
        batch.publish(message(channel, "lost by choice"), routing_key="nowhere", tag=5)
        # It cannot be decoded.
        odd = amqp.Message(b"odd", message_id=b"\xff")
        batch.publish(odd, routing_key="nowhere", mandatory=True, tag=6)

    returned = {0, 2, 4, 6}
    assert {outcome.tag: outcome for outcome in outcomes} == {
        tag: Outcome(tag, "returned", 312, "NO_ROUTE")
        if tag in returned
        else Outcome(tag, "confirmed")
        for tag in range(7)
    }


def test_of_twins_the_one_is_returned_whose_headers_found_no_queue(channel, outcomes):
    exchange = Exchange("kinds", "headers", channel=channel)
    arguments = {"x-queue-type": "quorum"}
    Queue("ones", exchange, binding_arguments={"kind": 1}, queue_arguments=arguments)(
        channel
    ).declare()
    with PublishBatch(channel, on_outcome=outcomes.append) as batch:
        for kind in (1, 2, 1, 2):
            twin = message(channel, "twin", {"kind": kind})
            batch.publish(twin, "kinds", "", mandatory=True, tag=(kind, len(outcomes)))

    assert sorted((outcome.tag[0], outcome.state) for outcome in outcomes) == [
        (1, "confirmed"),
        (1, "confirmed"),
        (2, "returned"),
        (2, "returned"),
    ]


def run_of(key, bodies, delay=None, **headers):
    """Return messages of a kind, with their bodies as their ids."""
    sample = {"application_headers": {"n": 0}, "content_type": "text/plain"}
    sample["content_encoding"] = "utf-8"
    template, due = Template(sample, ("", key), ["n"]), None
    if delay is not None:
        due = time.time_ns() // 1000 + delay * 1000
    count = len(bodies)
    return Run(
        template,
        [body.encode() for body in bodies],
        [due] * count,
        headers={"n": range(count)},
        properties={"correlation_id": bodies},
        further=[headers] * count if headers else None,
    )


def test_each_message_of_a_run_has_its_outcome(channel, collect, connect):
    full = {"x-max-length": 1, "x-overflow": "reject-publish"}
    Queue("full", channel=channel, queue_arguments=full).declare()
    names = [f"{number}" for number in range(250)]
    runs = {
        "delayed": run_of("q", names, 1000),
        "at once": run_of("q", names),
        "full": run_of("full", "abc"),
        "nowhere": run_of("nowhere", "ab"),
        "far": run_of("q", "a", 10**15),
        "large": run_of("q", "ab", 1000, large="x" * 200_000),
        "copied": run_of("q", "a", 1000, CC=["q"]),
    }
    with PublishBatch(channel, 120) as batch:
        for run in runs.values():
            batch.fill(run, mandatory=True)

    states = {name: Counter(run.states) for name, run in runs.items()}
    assert states == {
        "delayed": {"confirmed": 250},
        "at once": {"confirmed": 250},
        "full": {"confirmed": 1, "nacked": 2},
        "nowhere": {"returned": 2},
        "far": {"discarded": 1},
        "large": {"discarded": 2},
        "copied": {"confirmed": 1},
    }
    assert runs["nowhere"].replies == {0: (312, "NO_ROUTE"), 1: (312, "NO_ROUTE")}
    assert "is longer than" in runs["far"].replies[0][1]
    assert "raise frame_max" in runs["large"].replies[1][1]
    came = Counter(arrival.body for arrival in collect(connect(), [Queue("q")], 501))
    assert came == Counter(names * 2 + ["a"])


def test_a_run_that_is_cut_off_knows_what_may_have_arrived(channel):
    run = run_of("q", [f"{number}" for number in range(300)], 1000)
    batch = PublishBatch(channel, 100)
    batch.fill(run_of("q", "ab", 1000))
    batch.flush()
    write, writes = channel.connection.transport.write, []

    def cut(data):
        writes.append(data)
        if len(writes) == 2:
            raise ConnectionResetError("cut")
        write(data)

    channel.connection.transport.write = cut
    with pytest.raises(UnconfirmedError):
        batch.fill(run)
    counts = Counter(run.states)
    assert set(counts) <= {"confirmed", "unknown", None}
    assert (counts[None], counts["unknown"] >= 100) == (100, True)


def test_a_return_is_an_error_of_the_flush_unless_the_channel_has_a_handler(channel):
    with pytest.raises(UnconfirmedError, match=r"'gone' returned \(NO_ROUTE\)"):  # noqa: SIM117
        with PublishBatch(channel) as batch:
            send(batch, "gone", "nowhere", mandatory=True)

    seen = []
    channel.events["basic_return"].add(
        lambda exc, exchange, key, message: seen.append((exc.reply_code, key, bytes(message.body)))
    )
    with PublishBatch(channel) as batch:
        send(batch, "gone", "nowhere", mandatory=True)
    assert seen == [(312, "nowhere", b"gone")]


@contextmanager
def frozen(broker):
    """Nothing is answered meanwhile."""
    broker.freeze()
    try:
        yield
    finally:
        broker.thaw()


@pytest.mark.parametrize("patience", [None, 60])
def test_a_broker_that_reads_nothing_for_too_long_breaks_the_connection(vhost, outcomes, patience):
    # The kernel waits a second for it, which is py-amqp's TCP_USER_TIMEOUT.
    with Proxy(urlsplit(vhost.url).port or 5672) as proxy:
        url = proxy.through(vhost.url)
        with Connection(url, transport="kombu_binary_delay:Transport") as connection:
            batch = PublishBatch(connection.default_channel, on_outcome=outcomes.append)
            send(batch, "first", confirm_timeout=patience)
            batch.flush()
            proxy.hold()
            with pytest.raises(UnconfirmedError, match="TCP_USER_TIMEOUT"):  # noqa: PT012 - by either
                for number in range(100):
                    send(batch, f"{number}:" + "x" * 10_000, confirm_timeout=patience)
                batch.flush()

            counts = Counter(states(outcomes).values())
    # A few more passed the proxy before it noticed.
    assert set(counts) == {"confirmed", "unknown"}
    assert counts["unknown"] > 50
    assert counts.total() == 101


def test_a_batch_waits_for_its_channel_no_longer_than_for_a_confirm(vhost, connect, outcomes):
    with Proxy(urlsplit(vhost.url).port or 5672) as proxy:
        connection = connect(url=proxy.through(vhost.url))
        batch = PublishBatch(connection.default_channel, on_outcome=outcomes.append)
        proxy.hold()
        send(batch, "m", confirm_timeout=1)
        with pytest.raises(UnconfirmedError, match="was not opened within 1 s"):
            batch.flush()
        connection.collect()

    assert states(outcomes) == {"m": "discarded"}


def test_a_batch_is_closed_as_the_broker_closes_its_channel_and_all_else_goes_on(connect):
    connection = connect()
    batch = PublishBatch(connection.default_channel)
    for _ in range(100):
        batch.publish(message(batch.channel, "x"), exchange="missing")
    wait_until(lambda: unread(connection))

    batch.discard()
    batch.close()

    # The broker has answered both.
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.5)
    assert connection.channel().is_open


@pytest.mark.parametrize("reads", [True, False], ids=["reading", "writing"])
def test_a_batch_that_is_cut_off_in_a_callback_ends_the_connection_for_its_consumer(connect, reads):
    # Kombu would connect again, but not consume.
    def publish(_):
        published.append(True)
        transport = channel.connection.transport
        if reads:
            # As at the end of what the broker has sent.
            transport._quick_recv = lambda _: b""  # noqa: SLF001
        else:
            transport.sock.shutdown(socket.SHUT_WR)
        with suppress(UnconfirmedError):
            send(batch, "second")
            batch.flush()

    published: list[bool] = []
    connection = connect()
    channel = connection.default_channel
    Queue("q", channel=channel).declare()
    batch = PublishBatch(channel)
    send(batch, "first")
    batch.flush()
    channel.basic_consume("q", callback=publish)

    with pytest.raises(RecoverableConnectionError, match="a publish batch was cut off"):  # noqa: PT012
        while not published:
            connection.drain_events(timeout=PATIENCE)


@pytest.mark.parametrize("by_kombu", [False, pytest.param(True, marks=needs_kombu_batch)])
def test_a_connection_lost_before_a_delay_is_declared_leaves_all_of_the_batch_named(
    connect, channel, by_kombu
):
    """Kombu would connect again for an error of the connection, and forget the batch."""
    connection = channel.connection.client

    def send_one(body, key="q"):
        if by_kombu:
            options = {"headers": DELAYED, "message_id": body, "retry": True}
            producer.publish(body, routing_key=key, **options)
        else:
            batch.publish(message(channel, body, DELAYED), routing_key=key, tag=body)

    def publish():
        send_one("a")
        send_one("b")
        channel.connection.transport.sock.shutdown(socket.SHUT_RDWR)
        send_one("c", key="another queue")

    producer = Producer(connection)
    batch = PublishBatch(channel, max_size=2)
    with pytest.raises(UnconfirmedError) as caught:  # noqa: PT012 - by either
        if by_kombu:
            with producer.batch(max_size=2):
                publish()
        else:
            publish()

    assert [outcome.state for outcome in caught.value.outcomes] == [
        "unknown",
        "unknown",
        "discarded",
    ]
    assert all(f"'{body}'" in str(caught.value) for body in "abc")
    assert isinstance(caught.value.__cause__, OSError | RecoverableConnectionError)
    batch.close()


@pytest.mark.own_broker
@pytest.mark.parametrize(
    "case",
    [(0.2, send, 3), (0, send, 3), (0, send_large, 1)],
    ids=["before-answers", "while-sending-all", "while-sending-one"],
)
def test_a_lost_connection_tells_what_may_have_arrived_from_what_has_not(
    own_broker, channel, outcomes, case
):
    def cut():
        sock.shutdown(socket.SHUT_RDWR)

    def written(data):
        write(data)
        if PUBLISH in data:
            threading.Timer(after, cut).start()

    after, send_one, sent = case
    transport = channel.connection.transport
    sock, write = transport.sock, transport.write
    batch = PublishBatch(channel, max_size=3, on_outcome=outcomes.append)
    send(batch, "before")
    batch.flush()
    send_one(batch, "a")
    send_one(batch, "b")

    with frozen(own_broker), pytest.raises(UnconfirmedError) as caught:  # noqa: PT012
        if after:
            transport.write = written
        else:
            cut()
        send_one(batch, "c")
        batch.flush()

    expected = ["unknown"] * sent + ["discarded"] * (3 - sent)
    assert states(outcomes) == {"before": "confirmed", **dict(zip("abc", expected, strict=True))}
    assert states(caught.value.outcomes) == dict(zip("abc", expected, strict=True))
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(UnconfirmedError, match="make a new one"):
        send(batch, "d")
    batch.close()


@pytest.mark.own_broker
def test_a_broker_that_does_not_answer_in_time_leaves_the_outcome_unknown(channel, own_broker):
    batch = PublishBatch(channel)
    send(batch, "answered")
    batch.flush()
    late = pytest.raises(UnconfirmedError, match=r"'late' unknown \(not all confirms .* 0.2 s\)")
    # To leave the batch does not wait for this broker either.
    with frozen(own_broker), late, batch:
        send(batch, "late", confirm_timeout=0.2)
    with PublishBatch(channel) as batch:
        send(batch, "answered again")


@pytest.mark.parametrize("limit", [Exception("time limit"), KeyboardInterrupt()], ids=str)
def test_an_interrupt_amid_a_write_is_passed_on_and_ends_the_batch(channel, outcomes, limit):
    def interrupted(data):
        write(data)
        if PUBLISH in data:
            raise limit

    connection = channel.connection
    batch = PublishBatch(channel, on_outcome=outcomes.append)
    send(batch, "before")
    batch.flush()
    send_large(batch, "a")
    send(batch, "b")
    write, connection.transport.write = connection.transport.write, interrupted
    with pytest.raises(type(limit)):
        batch.flush()
    batch.close()

    assert states(outcomes) == {"before": "confirmed", "a": "unknown", "b": "discarded"}
    assert not connection.connected


def test_equal_messages_may_all_come_back_before_the_first_is_acknowledged(channel, outcomes):
    def take(method, *rest):
        if method == spec.Basic.Return:
            dispatch(method, *rest)
            returned.append(method)
        else:
            held.append((method, *rest))
        while len(returned) == 2 and held:
            dispatch(*held.pop(0))

    returned, held = [], []
    batch = PublishBatch(channel, on_outcome=outcomes.append)
    send(batch, "known")
    batch.flush()
    channels = channel.connection.channels
    confirm_channel = channels[max(channels)]
    dispatch = confirm_channel.dispatch_method
    with patch.object(confirm_channel, "dispatch_method", take):
        for number in range(2):
            equal = message(channel, "equal")
            batch.publish(equal, routing_key="nowhere", mandatory=True, tag=number)
        batch.flush()
    batch.close()

    assert states(outcomes) == {"known": "confirmed", 0: "returned", 1: "returned"}


def test_a_missing_exchange_ends_the_batch_and_nothing_else(connect, collect, channel, outcomes):
    received = []
    consumer = channel.connection.client.Consumer(
        [Queue("q")],
        channel=channel,
        callbacks=[lambda body, _: received.append(body)],
        no_ack=True,
    )
    consumer.consume()
    batch = PublishBatch(channel, on_outcome=outcomes.append)
    send(batch, "to nobody", exchange="missing")

    with pytest.raises(UnconfirmedError, match="NOT_FOUND - no exchange 'missing'"):
        batch.flush()
    batch.close()

    assert states(outcomes) == {"to nobody": "unknown"}
    with PublishBatch(channel) as batch:
        send(batch, "to somebody")
    drain_until(channel.connection.client, lambda: received)
    assert received == ["to somebody"]


@pytest.mark.usefixtures("unlooked")
def test_a_ladder_that_has_gone_is_declared_again_for_the_next_batch(connect, vhost, channel):
    with PublishBatch(channel) as batch:
        send(batch, "there", headers=DELAYED)
    with vhost.connect() as other:
        for row in vhost.exchanges():
            other.channel().exchange_delete(row["name"])

    batch = PublishBatch(channel)
    send(batch, "gone", headers=DELAYED)
    with pytest.raises(UnconfirmedError, match="NOT_FOUND"):
        batch.flush()
    batch.close()

    with PublishBatch(channel) as batch:
        send(batch, "again", headers=DELAYED)


@needs_kombu_batch
def test_kombu_batches_nest_and_the_outermost_flushes(connect, collect, channel):
    connection = connect()
    producer = connection.Producer()
    assert producer.supports_batch_publish
    with producer.batch(max_size=100):
        producer.publish("a", routing_key="q")
        with producer.batch():
            producer.publish("b", routing_key="q", headers=DELAYED)
            producer.publish("c", routing_key="q")
        assert waiting(connection) == 0
    wait_until(lambda: waiting(connection) == 3)
    assert sorted(arrival.body for arrival in collect(connection, [Queue("q")], 3)) == list("abc")


@needs_kombu_batch
def test_an_exception_inside_a_kombu_batch_discards_what_was_not_flushed(connect, collect, channel):
    connection = connect()
    producer = connection.Producer()
    with pytest.raises(ZeroDivisionError), producer.batch() as batch:  # noqa: PT012
        producer.publish("kept", routing_key="q")
        batch.flush()
        producer.publish("discarded", routing_key="q", headers=DELAYED)
        producer.publish("discarded", routing_key="q")
        raise ZeroDivisionError

    assert [arrival.body for arrival in collect(connection, [Queue("q")], 1, more=1.5)] == ["kept"]


@needs_kombu_batch
def test_a_kombu_batch_raises_kombus_own_error(connect, channel):
    from kombu.exceptions import BatchPublishError  # noqa: PLC0415 - older ones have none

    producer = connect().Producer()
    with pytest.raises(BatchPublishError), producer.batch():
        producer.publish("gone", routing_key="nowhere", mandatory=True, correlation_id="its name")


def waiting(connection):
    return connection.default_channel.queue_declare("q", passive=True).message_count


def test_an_exception_discards_what_was_not_sent_and_says_so(channel, outcomes):
    batch = PublishBatch(channel, on_outcome=outcomes.append)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012, SIM117
        with batch:
            send(batch, "kept")
            batch.flush()
            send(batch, "discarded")
            raise ZeroDivisionError
    assert states(outcomes) == {"kept": "confirmed", "discarded": "discarded"}
    with pytest.raises(RuntimeError, match="closed"):
        send(batch, "too late")


def test_to_close_without_a_flush_is_an_error(channel):
    batch = PublishBatch(channel)
    send(batch, "forgotten")
    with pytest.raises(UnconfirmedError, match="'forgotten' discarded"):
        batch.close()


def test_a_bad_delay_is_an_error_at_its_publish_and_the_others_go_on(channel, outcomes):
    with PublishBatch(channel, on_outcome=outcomes.append) as batch:
        send(batch, "good", headers=DELAYED)
        with pytest.raises(DelayError):
            send(batch, "bad", headers={"x-delay": -1})
        send(batch, "also good")
    assert states(outcomes) == {"good": "confirmed", "also good": "confirmed"}


def test_what_amqp_cannot_write_is_told_and_the_others_go_on(channel, outcomes):
    with PublishBatch(channel, on_outcome=outcomes.append) as batch:
        send(batch, "good")
        send(batch, "bad", headers={"unwritable": object()})
        send(batch, "large", headers={"large": "x" * 131_072})
        batch.publish(message(channel, ["bad"]), routing_key="q", tag="no bytes")
        send(batch, "also good", headers={"large": "x" * 130_900})
    bad = dict.fromkeys(("bad", "large", "no bytes"), "discarded")
    assert states(outcomes) == {"good": "confirmed", **bad, "also good": "confirmed"}
    [text] = [outcome.reply_text for outcome in outcomes if outcome.tag == "large"]
    assert re.search(r"take 131\d\d\d bytes, and at most 131064 fit .* raise frame_max", text)


def test_a_delay_counts_from_the_publish_not_from_the_flush(channel, vhost, topology):
    batch = PublishBatch(channel)
    send(batch, "waits in the buffer first", headers={"x-delay": HOUR})
    time.sleep(0.5)
    batch.flush()
    batch.close()

    levels = [queue.name for level in topology.levels for queue in level.queues]
    (queue,) = [name for name, count in vhost.waiting(*levels).items() if count]
    with vhost.connect() as other:
        message = other.channel().basic_get(queue, no_ack=True)
    digits, _ = parse_address(message.delivery_info["routing_key"])
    assert topology.ladder.delay(digits) <= HOUR - 500 + topology.ladder.tick


def test_what_is_due_before_it_is_sent_is_a_delayed_message_still_and_does_not_expire(
    channel, collect, connect
):
    """RabbitMQ applies the expiration of no delayed message, by however little it was delayed."""
    batch = PublishBatch(channel)
    delayed = message(channel, "m", {"x-delay": 1})
    delayed.properties["expiration"] = "1"
    batch.publish(delayed, routing_key="q")
    time.sleep(0.1)
    batch.flush()
    batch.close()

    (arrival,) = collect(connect(), [Queue("q")], 1, timeout=10)
    assert arrival.properties["expiration"] == "1"


@pytest.fixture
def interrupt(connect, channel):
    """Have something done by a callback, as soon as the connection reads: when it declares."""

    def interrupt(batch, do):
        connection = batch.channel.connection.client
        consumer = connection.Consumer([Queue("q")], callbacks=[lambda *_: do()], no_ack=True)
        consumer.consume()
        connect().Producer().publish("go on", routing_key="q")
        select.select([batch.channel.connection.sock], [], [], PATIENCE)

    return interrupt


def forget(batch):
    """Have the ladder declared again for the next delay that is written."""
    batch.channel.connection.delay_mechanism.router.known.lost()


def test_what_a_callback_takes_while_declaring_is_no_longer_to_be_waited(
    connect, interrupt, vhost, topology
):
    other = connect("amqp").default_channel
    Queue("other", channel=other).declare()
    batch = PublishBatch(connect().default_channel)
    send(batch, "declares", "other", headers={"x-delay": HOUR})
    batch.flush()
    interrupt(batch, lambda: time.sleep(2))
    # The second is a tick shorter at once, and has all declared again.
    for delay in (HOUR, HOUR + 1):
        send(batch, str(delay), "other", headers={"x-delay": delay})
    time.sleep(0.005)
    forget(batch)
    batch.flush()
    batch.close()

    levels = [queue.name for level in topology.levels for queue in level.queues]
    waiting = [name for name, count in vhost.waiting(*levels).items() for _ in range(count)]
    got = [other.basic_get(name, no_ack=True) for name in waiting]
    keys = [message.delivery_info["routing_key"] for message in got]
    delays = [topology.ladder.delay(parse_address(key)[0]) for key in keys]
    assert len(delays) == 3
    assert sorted(delays)[1] <= HOUR - 2000 + topology.ladder.tick


def test_messages_whose_delay_is_shorter_with_each_millisecond_are_sent_all_the_same(
    connect, outcomes
):
    channel = connect(binary_delay={"tick": 1}).default_channel
    with PublishBatch(channel, on_outcome=outcomes.append) as batch:
        for number in range(50):
            # Each time, the broker is asked for the queue again.
            send(batch, str(number), "missing", headers={"x-delay": HOUR})
    assert states(outcomes) == {str(number): "confirmed" for number in range(50)}


def test_a_callback_may_close_the_batch_that_declares(connect, interrupt):
    def close():
        with pytest.raises(UnconfirmedError, match=r"5 messages .* discarded"):
            batch.close()
        closed.append(True)

    closed: list[bool] = []
    batch = PublishBatch(connect().default_channel)
    for number in range(5):
        send(batch, str(number), "other", headers=DELAYED)
    interrupt(batch, close)
    forget(batch)
    batch.flush()
    assert closed
    batch.close()


@pytest.mark.own_broker
def test_of_messages_sent_at_once_the_shortest_time_to_write_counts(own_broker, channel, outcomes):
    batch = PublishBatch(channel, on_outcome=outcomes.append)
    send(batch, "before")
    batch.flush()
    send(batch, "long", timeout=600)
    send(batch, "short", timeout=0.3)
    huge = "x" * 30_000_000
    batch.publish(message(channel, huge), routing_key="q", tag="huge")
    with frozen(own_broker), pytest.raises(UnconfirmedError):
        batch.flush()
    batch.close()
    together = dict.fromkeys(("long", "short", "huge"), "unknown")
    assert states(outcomes) == {"before": "confirmed", **together}


def test_a_callback_may_publish_into_the_batch_that_waits(connect, channel):
    connection = connect()
    received = []
    batch = PublishBatch(connection.default_channel, max_size=5)

    def receive(body, message):
        received.append(body)
        if len(received) <= 20:
            send(batch, f"answer to {body}")

    consumer = connection.Consumer([Queue("q")], callbacks=[receive], no_ack=True)
    consumer.consume()
    with batch:
        for number in range(20):
            send(batch, str(number))
    drain_until(connection, lambda: len(received) == 40)
    assert len(set(received)) == 40


def test_a_callback_may_flush_the_batch_that_waits(connect, channel, outcomes):
    connection = connect()
    batch = PublishBatch(connection.default_channel, max_size=1, on_outcome=outcomes.append)

    def forward(body, message):
        if not body.startswith("again"):
            send(batch, f"again {body}")
            batch.flush()

    connection.Consumer([Queue("q")], callbacks=[forward], no_ack=True).consume()
    for number in range(20):
        send(batch, str(number))
    batch.flush()
    drain_until(connection, lambda: len(outcomes) == 40)
    batch.close()
    assert set(states(outcomes).values()) == {"confirmed"}


def test_an_error_of_a_callback_passes_and_the_batch_goes_on(connect, channel, outcomes):
    connection = connect()

    def fail(body, message):
        raised.append(body)
        raise KeyError(body)

    raised: list[str] = []
    consumer = connection.Consumer([Queue("q")], callbacks=[fail], no_ack=True)
    consumer.consume()
    batch = PublishBatch(connection.default_channel, on_outcome=outcomes.append)
    for number in range(5):
        send(batch, str(number))
    while len(raised) < 5:
        with suppress(KeyError):
            batch.flush()
            drain_until(connection, lambda: len(raised) == 5)
    batch.flush()
    batch.close()
    assert states(outcomes) == {str(number): "confirmed" for number in range(5)}


def test_each_thread_with_its_connection_knows_of_its_own_messages(vhost, channel):
    results = {}

    def work(name):
        outcomes: list[Outcome] = []
        with (
            Connection(vhost.url, transport="kombu_binary_delay:Transport") as connection,
            PublishBatch(connection.default_channel, 20, outcomes.append) as batch,
        ):
            for number in range(200):
                send(batch, f"{name}-{number}", headers=DELAYED if number % 2 else None)
        results[name] = states(outcomes)

    run_together(work)
    for name, state_of in results.items():
        assert state_of == {f"{name}-{number}": "confirmed" for number in range(200)}


def test_threads_may_share_a_batch(channel, outcomes):
    batch = PublishBatch(channel, max_size=20, on_outcome=outcomes.append)

    def work(name):
        for number in range(200):
            key = "nowhere" if number % 10 == 0 else "q"
            send(batch, f"{name}-{number}", key, mandatory=True)
        batch.flush()

    run_together(work)
    batch.close()
    assert states(outcomes) == {
        f"{name}-{number}": "returned" if number % 10 == 0 else "confirmed"
        for name in "abcd"
        for number in range(200)
    }


def run_together(work):
    threads = [threading.Thread(target=work, args=[name]) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)


def test_another_thread_may_send_heartbeats_meanwhile(channel, outcomes):
    def beat():
        while not over.is_set():
            channel.connection.send_heartbeat()

    over = threading.Event()
    thread = threading.Thread(target=beat)
    with PublishBatch(channel, on_outcome=outcomes.append) as batch:
        thread.start()
        try:
            for number in range(200):
                send_large(batch, str(number))
            batch.flush()
        finally:
            over.set()
            thread.join()
    assert states(outcomes) == {str(number): "confirmed" for number in range(200)}


@pytest.mark.parametrize("confirm", [False, True])
def test_the_users_channel_stays_as_it_is(connect, confirm, channel):
    connection = connect(confirm_publish=confirm)
    users = connection.default_channel
    producer = connection.Producer()
    with PublishBatch(users, max_size=2) as batch:
        for number in range(5):
            send(batch, f"batch {number}")
            producer.publish(f"alone {number}", routing_key="q", headers=DELAYED)
    assert users._confirm_selected is confirm  # noqa: SLF001 - it is not set otherwise
    # The connection, this channel, and the one of the declarations: that of the batch is gone.
    assert len(users.connection.channels) == 3


def test_a_channel_with_transactions_keeps_out_of_batches(connect):
    channel = connect().channel()
    assert channel.supports_batch_publish
    channel.tx_select()
    assert not channel.supports_batch_publish


def test_a_batch_works_on_kombus_own_transport_too(connect, collect, channel, outcomes):
    connection = connect(transport="pyamqp")
    with PublishBatch(connection.default_channel, on_outcome=outcomes.append) as batch:
        send(batch, "plain")
        send(batch, "gone", "nowhere", mandatory=True)
    assert states(outcomes) == {"plain": "confirmed", "gone": "returned"}


def test_what_is_no_amqp_channel_is_refused():
    with Connection("memory://") as connection, pytest.raises(TypeError, match="py-amqp"):
        PublishBatch(connection.default_channel)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "10"])
def test_a_window_of_no_size_is_refused(channel, size):
    with pytest.raises(ValueError, match="max_size"):
        PublishBatch(channel, max_size=size)


def test_a_closed_channel_is_refused(channel):
    channel.close()
    with pytest.raises(amqp.RecoverableConnectionError):
        PublishBatch(channel)
