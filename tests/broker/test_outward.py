"""A delayed publish enters the ladder, and waits there."""

import logging
import pkgutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from typing import Any
from unittest.mock import patch

import pytest
from amqp import Channel
from amqp.abstract_channel import AbstractChannel
from amqp.exceptions import ConsumerCancelled, NotFound
from kombu import Exchange, Producer, Queue

from benchmarks.connecting import counted
from kombu_binary_delay import (
    AddressError,
    DelayError,
    Ladder,
    SettingsError,
    Topology,
    TopologyError,
    Transport,
    TransportMixin,
    transport,
)
from kombu_binary_delay.ladder.parts import Part
from kombu_binary_delay.ladder.parts import Queue as Declared
from kombu_binary_delay.routing.commands import Answer, AskType, Ensure
from kombu_binary_delay.routing.knowledge import Shared
from kombu_binary_delay.wire import alarms, executor
from kombu_binary_delay.wire.executor import Executor
from kombu_binary_delay.wire.following import is_consuming
from tests.waits import PATIENCE, drain_until, unread, wait_until

BINARY = {"radix": 2}


@pytest.fixture
def binary(topology):
    """The topology of :data:`BINARY`, on which short delays have several levels."""
    return Topology(Ladder.binary(), queue_type=topology.queue_type)


def ladder_names(vhost):
    names = {row["name"] for row in vhost.exchanges()} | {row["name"] for row in vhost.queues()}
    return {name for name in names if name.startswith("kbd.")}


def test_nothing_is_declared_until_the_first_delayed_publish_and_then_no_higher_than_needed(
    connect, vhost, topology
):
    connection = connect()
    queue = Queue("q", Exchange("x", "direct"), "k", channel=connection.default_channel)
    queue.declare()
    producer = Producer(connection.default_channel)
    producer.publish("now", exchange="x", routing_key="k")
    producer.publish("now", routing_key="q", headers={"x-delay": 0})
    assert ladder_names(vhost) == set()

    producer.publish("later", routing_key="q", headers={"x-delay": 1000})

    levels = {name for name in ladder_names(vhost) if ".level-" in name}
    assert levels == {
        name
        for level in topology.levels[:4]
        for name in (part.name for part in (*level.exchanges, *level.queues))
    }


def test_a_publish_in_the_steady_state_costs_no_call_besides_itself(connect, monkeypatch):
    monkeypatch.setattr("kombu_binary_delay.routing.knowledge.LOOK_AGAIN", 10**15)
    connection = connect()
    Queue("q", channel=connection.default_channel).declare()
    producer = Producer(connection.default_channel)
    producer.publish("first", routing_key="q", headers={"x-delay": 2000})

    with patch.object(
        Channel, "send_method", autospec=True, side_effect=Channel.send_method
    ) as sent:
        for delay in (1000, 125, 1, 1999):
            producer.publish("more", routing_key="q", headers={"x-delay": delay})

    assert sent.call_count == 4


def test_a_queue_that_a_connection_has_declared_is_not_copied_to_find_that_out(connect, vhost):
    """Celery names the queue at each publish; to Kombu's own look, that is worth two copies."""
    queue = Queue("q", Exchange("x", "topic"), "k")
    connection = connect(confirm_publish=True)
    with connection.Producer() as producer:
        producer.publish("first", exchange="x", routing_key="k", declare=[queue])
        with patch.object(Queue, "__init__", side_effect=AssertionError("a copy")):
            producer.publish("next", exchange="x", routing_key="k", declare=[queue], retry=True)
    wait_until(lambda: vhost.waiting("q") == {"q": 2})

    connect("amqp").default_channel.queue_delete("q")
    connection.release()
    with connection.Producer() as producer:
        producer.publish("of a new connection", exchange="x", routing_key="k", declare=[queue])
    wait_until(lambda: vhost.waiting("q") == {"q": 1})


def test_a_new_connection_asks_once_whether_the_levels_stand(connect):
    for _ in range(2):
        connection = connect()
        Queue("q", channel=connection.default_channel).declare()
        producer = Producer(connection.default_channel)
        with patch.object(
            Channel, "send_method", autospec=True, side_effect=Channel.send_method
        ) as sent:
            producer.publish("first", routing_key="q", headers={"x-delay": 60_000})
        calls = [call.args[1:3] for call in sent.call_args_list]
    # Open a channel; the base; the way to the queue; three levels, an exchange and a queue for each
    # digit; the bindings of two; the message.
    assert len(calls) <= 135


def test_a_delay_that_is_refused_declares_nothing_and_the_channel_still_works(connect, vhost):
    connection = connect()
    Queue("q", channel=connection.default_channel).declare()
    producer = Producer(connection.default_channel)

    with pytest.raises(DelayError, match="delay"):
        producer.publish("never", routing_key="q", headers={"x-delay": 10**15})

    assert vhost.waiting("q") == {"q": 0}
    assert ladder_names(vhost) == set()
    producer.publish("the channel still works", routing_key="q")


def test_the_callers_headers_stay_as_they_are(connect):
    connection = connect()
    Queue("q", channel=connection.default_channel).declare()
    headers = {"x-delay": 125, "x-death": [{"queue": "theirs"}], "CC": ["q"]}
    before = dict(headers)

    Producer(connection.default_channel).publish("later", routing_key="q", headers=headers)

    assert headers == before


@pytest.mark.parametrize("ended", ["cut off", "with its process"])
def test_a_reconnect_declares_what_is_gone(  # noqa: PLR0913, PLR0917 - fixtures
    connect, collect, confirm, topology, ended, monkeypatch
):
    if ended == "cut off":
        monkeypatch.setattr(transport, "_shared", lru_cache(lambda *_: Shared()))
    connection = connect(confirm_publish=confirm)
    queue = Queue("q")
    with connection.Producer() as producer:
        producer.publish("1", routing_key="q", headers={"x-delay": 125}, declare=[queue])
    plain = connect("amqp").default_channel
    for exchange in (topology.level_name(0), topology.delivery):
        plain.exchange_delete(exchange)

    if ended == "cut off":
        connection.collect()
    else:
        connection.release()
    again = connect(confirm_publish=confirm)
    with again.Producer() as producer:
        producer.publish("2", routing_key="q", headers={"x-delay": 125}, declare=[queue])

    arrived: set[str] = set()
    while "2" not in arrived:
        arrived |= {arrival.body for arrival in collect(again, [queue], 1)}


@pytest.mark.usefixtures("unlooked")
def test_with_confirms_a_deleted_ladder_is_made_again_within_the_publish(
    connect, collect, topology
):
    connection = connect(confirm_publish=True)
    queue = Queue("q", channel=connection.default_channel)
    queue.declare()
    producer = Producer(connection.default_channel)
    producer.publish("1", routing_key="q", headers={"x-delay": 1})
    assert [arrival.body for arrival in collect(connection, [queue], 1)] == ["1"]
    plain = connect("amqp").default_channel
    for exchange in (*topology.levels[0].exchanges, *topology.base.exchanges[1:]):
        plain.exchange_delete(exchange.name)

    producer.publish("2", routing_key="q", headers={"x-delay": 1})

    assert [arrival.body for arrival in collect(connection, [queue], 1)] == ["2"]


@pytest.mark.parametrize("gone", [-1, 2], ids=["delivery", "middle"])
def test_a_ladder_of_which_a_part_was_deleted_is_made_whole_by_a_later_publish(
    connect, collect, binary, gone
):
    queue = Queue("q")
    # given: a ladder of five levels, and a publisher that knows it
    old = connect(confirm_publish=True, binary_delay=BINARY)
    with old.Producer() as producer:
        producer.publish(0, routing_key="q", headers={"x-delay": 17 * 125}, declare=[queue])
    # when: a part of it goes
    connect("amqp").default_channel.exchange_delete(binary.level_name(gone))
    # and: one more publisher delays, and by as much as enters at other levels
    new = connect(confirm_publish=True, binary_delay=BINARY)
    for level in (4, 2, 0):
        for connection in (old, new):
            with connection.Producer() as producer:
                producer.publish("-", routing_key="q", headers={"x-delay": 125 << level})
    # then: whatever their digits are, messages find their way again
    ticks = [1, 2, 3, 4, 6, 8, 12, 16, 17, 20, 24]
    for tick in ticks:
        with new.Producer() as producer:
            producer.publish(tick, routing_key="q", headers={"x-delay": tick * 125})
    arrived: set[object] = set()
    while not arrived.issuperset(ticks):
        arrived |= {arrival.body for arrival in collect(new, [queue], 1)}


@pytest.mark.parametrize("publishes", [True, False], ids=["publisher", "consumer"])
def test_who_needs_a_part_of_the_ladder_notices_that_it_was_deleted(
    connect, vhost, monkeypatch, publishes
):
    """The publisher at the next publish after half a minute, the consumer after half a minute."""
    monkeypatch.setattr("kombu_binary_delay.routing.knowledge.LOOK_AGAIN", 0)
    monkeypatch.setattr("kombu_binary_delay.routing.knowledge.PAUSE_AFTER_DELETION", 0)
    connection = connect(binary_delay={"radix": 2})
    inner, channel = connection.connection, connection.default_channel
    for kind in ("topic", "headers"):
        full = {"x-overflow": "reject-publish"}
        queue = Queue("full", Exchange(kind, kind), "k", queue_arguments=full)
        queue(channel).declare()
    connection.Consumer(Queue("full", no_declare=True)).consume()

    def use():
        if publishes:
            for to in ("topic", "headers", ""):
                key = "k" if to else "full"
                connection.Producer().publish("m", key, exchange=to, headers={"x-delay": 60_000})
        else:
            inner.look_at = 0
            with suppress(TimeoutError):
                connection.drain_events(timeout=0.01)

    def made():
        kinds = ("exchanges", "queues", "bindings")
        rows = {kind: vhost.broker.api("GET", f"{kind}/{vhost.name}") for kind in kinds}
        return {
            (
                kind,
                *(row.get(column) for column in ("name", "source", "destination", "routing_key")),
            )
            for kind in kinds
            for row in rows[kind]
        }

    use()
    whole = made()
    names = [(kind, name) for kind, name, *_ in whole if name and str(name).startswith("kbd.v2")]
    levels = sum(".level-" in name for _, name in names)
    assert len(names) - levels >= 9
    assert bool(levels) == publishes
    for kind, name in names:
        vhost.broker.api("DELETE", f"{kind}/{vhost.name}/{name}")
        use()
        assert made() == whole, f"without {name} of {kind}"


def test_a_look_is_no_event(connect):
    """A program may count on one for each call."""
    connection = connect(binary_delay={"radix": 2})
    queue = Queue("q", Exchange("x"))
    queue(connection.default_channel).declare()
    connection.Consumer(queue).consume()
    inner = connection.connection
    inner.look_at = 0

    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.5)

    assert inner.look_at > time.monotonic()


def test_to_ask_for_the_type_of_an_exchange_changes_nothing(connect):
    plain = connect("amqp").default_channel
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "transient": ("fanout", {"durable": False, "auto_delete": True}),
        "direct": ("topic", {"durable": True, "auto_delete": False}),
        "with alternate": ("headers", {"arguments": {"alternate-exchange": "amq.direct"}}),
        "plain": ("direct", {}),
    }
    for name, (kind, options) in asked.items():
        plain.exchange_declare(name, kind, **options)
    plain.queue_declare("q")
    plain.queue_bind("q", "with alternate")

    executor = connect().connection.delay_mechanism.executor
    types: dict[str, Any] = {}
    answers: dict[str, Any] = {}

    def ask(into, name):
        into[name] = yield AskType(name)

    for name in (*asked, "missing"):
        executor.run(ask(types, name))
        executor.run(ask(answers, name))

    assert types == answers
    assert types.pop("missing") is Answer.MISSING
    assert types == {name: kind for name, (kind, _) in asked.items()}
    for name in asked:
        plain.exchange_declare(name, "", passive=True)
    with pytest.raises(NotFound):
        plain.exchange_declare("missing", "", passive=True)


@pytest.mark.parametrize(
    ("arguments", "answer"), [({"x-max-length": 1}, TopologyError), ({}, Answer.DONE)]
)
def test_a_lock_ends_with_the_declaration_that_it_is_for(connect, arguments, answer):
    """Else nobody could declare it as long as the connection lives whose declaration failed."""
    connect("amqp").default_channel.queue_declare(
        "q", durable=True, auto_delete=False, arguments=arguments
    )
    command = Ensure(Part(queues=(Declared("q", ()),)), "a queue", lock="lock")
    first, second = (connect().connection.delay_mechanism.executor for _ in range(2))
    if answer is TopologyError:
        with pytest.raises(TopologyError, match="other arguments"):
            first.do(command)
    else:
        assert first.do(command) is answer

    assert second.do(Ensure(Part(), "nothing", lock="lock")) is Answer.DONE


def interrupted(what):
    """Let a call do its work, and be interrupted before it returns."""
    whole = pkgutil.resolve_name(what)

    def interrupt(*arguments, **more):
        whole(*arguments, **more)
        raise KeyboardInterrupt

    return patch(what, interrupt)


@pytest.mark.parametrize(
    "during", ["kombu_binary_delay.wire.executor.declare", "amqp.Channel.queue_declare"]
)
def test_a_lock_ends_with_a_declaration_that_is_interrupted(connect, during):
    first, second = (connect().connection.delay_mechanism.executor for _ in range(2))
    command = Ensure(Part(queues=(Declared("q", ()),)), "a queue", lock="lock")

    with (
        pytest.raises(KeyboardInterrupt),
        interrupted(during),
    ):
        first.do(command)

    # It is not waited for.
    wait_until(lambda: second.do(command) is Answer.DONE)
    assert first.do(command) is Answer.DONE


@pytest.mark.parametrize("kind", ["exchange", "queue"])
def test_a_delayed_publish_to_nowhere_is_parked_and_said_once(connect, topology, caplog, kind):
    connection = connect(confirm_publish=True)
    place = {"exchange": "nowhere"} if kind == "exchange" else {"routing_key": "nowhere"}
    with caplog.at_level(logging.WARNING, "kombu_binary_delay"):
        for _ in range(3):
            connection.Producer().publish("lost", headers={"x-delay": 125}, **place)

    (record,) = caplog.records
    assert f"the {kind} 'nowhere' does not exist: delayed messages" in record.message
    wait_until(lambda: parked_in(connect, topology) == 3)


def parked_in(connect, topology):
    queue = connect("amqp").default_channel.queue_declare(topology.parking, passive=True)
    return queue.message_count


@pytest.mark.usefixtures("unlooked")
def test_a_channel_that_loses_its_consumers_with_the_ladder_says_so(connect, topology):
    connection = connect(confirm_publish=True)
    channel = connection.default_channel
    producer = Producer(channel)
    with connection.Consumer([Queue("q")], channel=channel):
        producer.publish("1", routing_key="q", headers={"x-delay": 60_000})
        connect("amqp").default_channel.exchange_delete(
            topology.entry_exchange(topology.ladder.digits(1))
        )

        with pytest.raises(connection.channel_errors, match="no exchange"):
            producer.publish("2", routing_key="q", headers={"x-delay": 1})


@pytest.mark.usefixtures("unlooked")
@pytest.mark.parametrize("pause", [0.0, 600.0], ids=["no alarm", "after an alarm"])
def test_without_confirms_the_next_publish_after_the_brokers_word_declares_again(
    connect, collect, topology, monkeypatch, pause
):
    """After an alarm, a consumer asks for streams that are missing: that is no such word."""
    connection = connect()
    lately = {connection.connection.host: (time.monotonic(), pause)}
    monkeypatch.setattr(alarms, "_blocked", lately)
    queue = Queue("q", channel=connection.default_channel)
    queue.declare()
    producer = Producer(connection.default_channel)
    producer.publish("1", routing_key="q", headers={"x-delay": 1})
    collect(connection, [queue], 1)
    connect("amqp").default_channel.exchange_delete(
        topology.entry_exchange(topology.ladder.digits(1))
    )

    producer.publish("into the void", routing_key="q", headers={"x-delay": 1})
    with pytest.raises(connection.channel_errors, match="no exchange"):
        drain_until(connection, lambda: False)
    producer.publish("2", routing_key="q", headers={"x-delay": 1})

    assert [arrival.body for arrival in collect(connection, [queue], 1)] == ["2"]


def test_a_level_that_stands_with_other_arguments_is_named_and_the_users_channel_lives(
    connect, vhost, topology
):
    plain = connect("amqp").default_channel
    plain.queue_declare(
        topology.entry_exchange(topology.ladder.digits(1)), durable=True, auto_delete=False
    )
    connection = connect()
    Queue("q", channel=connection.default_channel).declare()
    producer = Producer(connection.default_channel)

    with pytest.raises(TopologyError, match=r"other arguments.*namespace"):
        producer.publish("never", routing_key="q", headers={"x-delay": 1})

    producer.publish("now", routing_key="q")
    wait_until(lambda: vhost.waiting("q") == {"q": 1})


def test_a_user_who_may_not_declare_is_told_which_permission_is_missing(user, connect, vhost):
    connection = connect(url=user(configure="^q$"))
    Queue("q", channel=connection.default_channel).declare()
    producer = Producer(connection.default_channel)

    with pytest.raises(TopologyError, match=r"permissions configure, write and read.*'kbd\."):
        producer.publish("never", routing_key="q", headers={"x-delay": 1})

    producer.publish("now", routing_key="q")
    wait_until(lambda: vhost.waiting("q") == {"q": 1})


def test_a_queue_exclusive_to_another_connection_is_refused_by_name(connect, vhost):
    other = connect("amqp")
    other.default_channel.queue_declare("mine", exclusive=True)

    with pytest.raises(TopologyError, match=r"'mine' is exclusive to another connection"):
        Producer(connect().default_channel).publish(
            "never", routing_key="mine", headers={"x-delay": 1}
        )
    assert not [name for name in ladder_names(vhost) if ".relay-to-queue." in name]


def test_where_declare_is_never_a_ladder_made_beforehand_is_used(connect, collect, vhost):
    made = connect()
    queue = Queue("q", channel=made.default_channel)
    queue.declare()
    Producer(made.default_channel).publish("1", routing_key="q", headers={"x-delay": 1})
    before = ladder_names(vhost)
    connection = connect(binary_delay={"declare": "never"})
    with patch("kombu_binary_delay.wire.executor.Executor.channel") as declared:
        Producer(connection.default_channel).publish("2", routing_key="q", headers={"x-delay": 1})

    arrived = sorted(arrival.body for arrival in collect(connection, [queue], 2))
    assert arrived == ["1", "2"]
    assert not declared.called
    assert ladder_names(vhost) == before


def test_where_declare_is_never_and_the_ladder_is_missing_no_retry_is_lost(
    connect, collect, caplog
):
    connection = connect(confirm_publish=True, binary_delay={"declare": "never"})
    queue = Queue("q", channel=connection.default_channel)
    queue.declare()
    producer = connection.Producer()
    eta = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    task = {"id": "1", "task": "t", "eta": eta}
    producer.publish("retry", routing_key="q", headers={**task, "retries": 1})
    with pytest.raises(TopologyError, match=r"level-.* does not exist.*kombu-binary-delay create"):
        producer.publish("first", routing_key="q", headers={**task, "retries": 0})
    assert "a retry of t is left to a worker to keep until it is due" in caplog.text

    made = connect().Producer()
    for publisher in (made, producer):
        publisher.publish("delayed", routing_key="q", headers={"x-delay": 1})
    arrived = sorted(arrival.body for arrival in collect(connection, [queue], 3))
    assert arrived == ["delayed", "delayed", "retry"]


def test_settings_shape_the_ladder(connect, collect, vhost):
    connection = connect(
        binary_delay={
            "namespace": "mine",
            "tick": 50,
            "radix": 2,
            "levels": 4,
            "queue_type": "classic",
        }
    )
    queue = Queue("q", channel=connection.default_channel)
    queue.declare()
    producer = Producer(connection.default_channel)

    producer.publish("later", routing_key="q", headers={"x-delay": 750})

    assert "mine.v2-50ms-2x4-classic.level-03.1" in {row["name"] for row in vhost.queues()}
    with pytest.raises(DelayError, match="is longer than 750 ms"):
        producer.publish("never", routing_key="q", headers={"x-delay": 751})
    assert [arrival.body for arrival in collect(connection, [queue], 1)] == ["later"]


def test_classic_queues_are_used_with_one_clear_warning(connect, caplog):
    settings = {"queue_type": "classic", "namespace": "warned"}
    executor._warnings.clear()  # noqa: SLF001 - another test may have been warned
    with caplog.at_level(logging.WARNING, "kombu_binary_delay"):
        connect(binary_delay=settings).connect()
        connect(binary_delay=settings).connect()

    (record,) = caplog.records
    assert "wait in classic queues" in record.message
    assert "can lose" in record.message


def test_bad_settings_are_refused_at_connection_time(connect):
    with pytest.raises(SettingsError, match=r"unknown setting 'level'; did you mean 'levels'\?"):
        connect(binary_delay={"level": 4}).connect()


def test_two_ladders_live_side_by_side(connect, collect):
    queue = Queue("q")
    for tick in (100, 125):
        with connect(binary_delay={"tick": tick}).Producer() as producer:
            producer.publish(tick, routing_key="q", headers={"x-delay": 300}, declare=[queue])

    reader = connect()

    arrivals = collect(reader, [queue], 2)
    assert {arrival.body for arrival in arrivals} == {100, 125}
    # The reader's own ladder is one of them, and it reads the other's addresses as well.
    assert {(arrival.exchange, arrival.key) for arrival in arrivals} == {("", "q")}
    assert all(arrival.headers == {} for arrival in arrivals)


def test_the_mixins_make_another_pyamqp_like_transport_delay(vhost, connect, collect):
    class Counting(Transport):
        alias = "counting"
        made = 0

        def create_channel(self, connection):
            type(self).made += 1
            return super().create_channel(connection)

    assert issubclass(Counting, TransportMixin)
    connection = connect(Counting)
    queue = Queue("q", channel=connection.default_channel)
    queue.declare()
    started = time.time()

    Producer(connection.default_channel).publish("x", routing_key="q", headers={"x-delay": 500})

    (arrival,) = collect(connection, [queue], 1)
    assert arrival.at - started >= 0.5
    assert Counting.made >= 2


def test_a_failover_keeps_the_transport(vhost, connect, collect):
    connection = connect(url=["amqp://guest:guest@127.0.0.1:1//", vhost.url])
    connection.ensure_connection(max_retries=3, interval_start=0)
    queue = Queue("q", channel=connection.default_channel)
    queue.declare()

    Producer(connection.default_channel).publish("x", routing_key="q", headers={"x-delay": 125})

    assert isinstance(connection.transport, Transport)
    assert [arrival.body for arrival in collect(connection, [queue], 1)] == ["x"]


@pytest.mark.slow
def test_three_thousand_delays_are_neither_early_nor_lost_nor_doubled(
    connect, collect, confirm, topology
):
    connection, consuming = connect(confirm_publish=confirm), connect()
    queue = Queue("q")
    for channel_of in (connection, consuming):
        queue(channel_of.default_channel).declare()
    producer = Producer(connection.default_channel)
    due = {}
    with ThreadPoolExecutor() as threads:
        # From the beginning: what comes early is seen then, however long publishing takes.
        collected = threads.submit(collect, consuming, [queue], 3000, timeout=2 * PATIENCE)
        for number in range(3000):
            # Whole ticks, which no rounding makes longer, and one wait each: what a queue lets go
            # early is early here.
            delay = (4000, 6000)[number % 2]
            due[number] = time.time() + delay / 1000
            producer.publish(number, routing_key="q", headers={"x-delay": delay})

    arrivals = collected.result()

    assert sorted(arrival.body for arrival in arrivals) == list(range(3000))
    early = {
        arrival.body: due[arrival.body] - arrival.at
        for arrival in arrivals
        if arrival.at < due[arrival.body]
    }
    assert early == {}


@pytest.mark.parametrize("settings", [{}, {"levels": 1}], ids=["key too long", "delay too long"])
def test_a_retry_that_cannot_be_delayed_is_left_to_a_worker_and_a_first_try_is_refused(
    connect, collect, caplog, confirm, settings
):
    connection = connect(confirm_publish=confirm, binary_delay=settings)
    queue = Queue("q", Exchange("x", "topic"), "#")
    queue(connection.default_channel).declare()
    eta = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    task = {"id": "1", "task": "t", "eta": eta}
    options: dict[str, Any] = {"exchange": "x", "routing_key": "k" * (20 if settings else 200)}

    producer = connection.Producer()
    producer.publish("again", headers={**task, "retries": 1}, **options)
    with pytest.raises((AddressError, DelayError)):
        producer.publish("first", headers={**task, "retries": 0}, **options)

    (arrival,) = collect(connection, [queue], 1)
    assert (arrival.body, arrival.headers) == ("again", {**task, "retries": 1})
    assert "a retry of t is left to a worker to keep until it is due" in caplog.text


def test_the_answer_to_an_interrupted_declaration_is_taken_for_no_others(connect):
    executor = Executor(connect().connection, "kbd")
    with executor.channel("a queue") as channel:
        channel.queue_declare("there")
    with (
        pytest.raises(KeyboardInterrupt),
        executor.channel("the same") as channel,
        patch.object(channel, "wait", side_effect=KeyboardInterrupt),
    ):
        channel.queue_declare("there")
    with (
        pytest.raises(TopologyError, match="no queue 'missing'"),
        executor.channel("another") as channel,
    ):
        channel.queue_declare("missing", passive=True)


def test_a_consumer_that_begins_while_a_callback_declares_gets_what_comes_at_once(connect):
    """The answer to it and its first delivery are kept together, until the declaration ends."""
    connection, stock = connect(binary_delay={"amendments": False}), connect("amqp")
    received: list[str] = []

    def receive(body, message):
        received.append(body)
        if body == "first":
            connection.Producer().publish("x", routing_key="one", headers={"x-delay": 60_000})

    one, other = (
        connection.Consumer([Queue(name)], callbacks=[receive], no_ack=True)
        for name in ("one", "other")
    )
    stock.Producer().publish("second", routing_key="other")
    one.consume()
    stock.Producer().publish("first", routing_key="one")
    wait_until(lambda: unread(connection))

    other.consume()

    drain_until(connection, lambda: len(received) == 2)
    assert received == ["first", "second"]


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("consume", DelayError),
        ("consume", TimeoutError),
        ("get", OSError),
        ("publish", DelayError),
        ("publish", OSError),
    ],
)
def test_an_error_of_a_callback_is_not_taken_for_one_of_the_broker(connect, caplog, what, error):
    def receive(body, message):
        raise error("by the callback")

    connection = connect(binary_delay={"journal": "stream"})
    one, other = (connection.Consumer([Queue(name)], no_ack=True) for name in ("one", "other"))
    one.register_callback(receive)
    one.consume()
    connect("amqp").Producer().publish("x", routing_key="one")
    wait_until(lambda: unread(connection))
    producer, delayed = connection.Producer(), {"x-delay": 60_000}
    # The first two look for amendments before, the last declares the ladder and the journal.
    acts = {
        "consume": other.consume,
        "get": Queue("other")(connection.default_channel).get,
        "publish": partial(producer.publish, "y", routing_key="other", headers=delayed),
    }

    with pytest.raises(error, match="by the callback"):
        acts[what]()

    producer.publish("z", routing_key="other", headers=delayed)
    assert "the journal misses events" not in caplog.text
    assert "amendments are not read" not in caplog.text


def test_what_was_held_amid_a_declaration_comes_with_the_next_read_if_a_callback_failed(connect):
    def receive(body, message):
        received.append(body)
        if body == "bad":
            raise ValueError(body)

    received: list[str] = []
    connection = connect()
    consumer = connection.Consumer([Queue("q")], callbacks=[receive], no_ack=True)
    consumer.consume()
    came = 0
    for body in ("bad", "good"):
        connect("amqp").Producer().publish(body, routing_key="q")
        # All of it is there to be read, ahead of what the declaration will be answered.
        before = came
        wait_until(lambda: unread(connection) > before)  # noqa: B023 - it ends in this round
        came = unread(connection)
    executor = connection.connection.delay_mechanism.executor
    with executor.channel("a queue") as channel:
        channel.queue_declare("q", passive=True)
    assert received == ["bad"]
    assert "blocking_read" in vars(connection.connection)

    with pytest.raises(ValueError, match="bad"):
        connection.drain_events(timeout=PATIENCE)
    connection.drain_events(timeout=PATIENCE)

    assert received == ["bad", "good"]
    assert "blocking_read" not in vars(connection.connection)


def test_a_binding_without_a_queue_and_a_key_is_that_of_the_queue_declared_last(connect, collect):
    connection = connect()
    channel = connection.default_channel
    Exchange("x", "direct")(channel).declare()
    channel.queue_declare("mine", auto_delete=False)
    channel.queue_bind("", "x")
    Producer(channel).publish("now", exchange="x", routing_key="mine")
    Producer(channel).publish("later", exchange="x", routing_key="mine", headers={"x-delay": 250})

    arrivals = collect(connection, [Queue("mine", no_declare=True)], 2)

    assert [arrival.body for arrival in arrivals] == ["now", "later"]


def test_a_channel_that_the_broker_closed_is_in_no_transaction_any_more(connect):
    channel = connect().channel()
    channel.tx_select()
    with pytest.raises(NotFound):
        channel.queue_declare("nowhere", passive=True)
    assert channel.supports_batch_publish


def test_queues_that_end_with_their_channel_are_forgotten(connect):
    connection = connect()
    Queue("q")(connection.default_channel).declare()
    Producer(connection.default_channel).publish(
        "first", routing_key="q", headers={"x-delay": 60_000}
    )
    router = connection.connection.delay_mechanism.router
    connection.default_channel.basic_get("q")
    before = set(router.known.existing)
    for _ in range(3):
        channel = connection.channel()
        name = channel.queue_declare("", exclusive=True).queue
        channel.queue_bind(name, "amq.topic", "k")
        channel.basic_consume(name)
        channel.close()
    mirror = {known for known in router.known.existing if known[0] == "mirror"}
    assert set(router.known.existing) - mirror == before
    assert not router.known.bindings


@pytest.mark.parametrize("ends", ["closed by an error", "cancelled by the broker", "refused"])
def test_a_consumer_that_the_broker_ended_consumes_no_more(connect, ends):
    connection = connect()
    channel = connection.channel()
    channel.queue_declare("q", auto_delete=False)
    if ends == "refused":
        with pytest.raises(NotFound):
            channel.basic_consume("nowhere")
    else:
        channel.basic_consume("q")
        assert is_consuming(connection.connection)
    if ends == "closed by an error":
        with pytest.raises(NotFound):
            channel.queue_declare("nowhere", passive=True)
    if ends == "cancelled by the broker":
        connect().default_channel.queue_delete("q")
        with pytest.raises(ConsumerCancelled):
            drain_until(connection.connection, lambda: False)
    assert not is_consuming(connection.connection)


def test_a_connection_for_each_message_waits_a_few_times_and_loses_none_with_the_ladder(
    connect, topology, confirm, collect, monkeypatch
):
    """Given: a message in the queue, which shows that the queue is not new."""
    shared = lru_cache(lambda *_: Shared())
    monkeypatch.setattr(transport, "_shared", shared)
    with connect() as owner:
        Queue("q")(owner.default_channel).declare()
        Producer(owner.default_channel).publish("first", routing_key="q")

    def publish(body, **headers):
        with counted() as row, connect(confirm_publish=confirm) as connection:
            Queue("q")(connection.default_channel).declare()
            connection.Producer().publish(body, routing_key="q", headers=headers)
        return row

    undelayed = publish("second")
    for body in ("third", "fourth"):
        publish(body, **{"x-delay": 2000})
    # As in another process.
    shared.cache_clear()
    by_another = publish("fifth", **{"x-delay": 2000})
    again = [publish(body, **{"x-delay": 2000}) for body in ("sixth", "seventh")][-1]
    with connect() as operator:
        entry = topology.entry_exchange(topology.ladder.digits(2000))
        operator.default_channel.exchange_delete(entry)
    for body in ("eighth", "ninth"):
        publish(body, **{"x-delay": 2000})

    assert by_another["trips"] <= undelayed["trips"] + 2
    assert by_another["frames"] <= undelayed["frames"] + 20
    # Without a confirm, it waits until the broker has taken the message.
    assert again["trips"] == undelayed["trips"] + (not confirm)
    assert again["frames"] == undelayed["frames"] + (not confirm)
    with connect() as connection:
        bodies = [arrival.body for arrival in collect(connection, [Queue("q")], 9)]
    assert sorted(bodies) == sorted(
        ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth"]
    )


@pytest.mark.parametrize(("kind", "knows"), [("", "all"), ("topic", "nothing"), ("headers", "all")])
def test_the_first_delayed_message_of_a_program_waits_three_times_at_most(
    connect, confirm, kind, knows, monkeypatch
):
    """Where its ladder exists. With a connection for each program, as the tests have it."""
    waits = []
    wait = AbstractChannel.wait

    def counting_wait(*args, **kwargs):
        waits.append(args)
        return wait(*args, **kwargs)

    monkeypatch.setattr(AbstractChannel, "wait", counting_wait)
    place = {"exchange": kind, "routing_key": "k" if kind else "q"}

    def publish(knows, **headers):
        waits.clear()
        with connect(confirm_publish=confirm) as connection:
            if knows == "all":
                queue = Queue("q", Exchange(kind, kind), "k") if kind else Queue("q")
                queue(connection.default_channel).declare()
            connection.Producer(auto_declare=False).publish("x", headers=headers, **place)
        return len(waits)

    for queue in ("all", knows):
        publish(queue, **{"x-delay": 3_600_000})

    more = publish(knows, **{"x-delay": 2000}) - publish(knows)
    assert more <= (1 if knows == "all" and not kind else 3)
