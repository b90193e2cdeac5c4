"""A destination queue that refuses messages holds up nobody but itself."""

import time
from typing import Any

import pytest
from kombu import Exchange, Producer, Queue

from kombu_binary_delay import TopologyError
from kombu_binary_delay.routing.commands import AskTemporary
from tests.waits import PATIENCE, drain_until, wait_until

#: More than a level's dead-letter worker has in hand: 32, or 128 as we recommend.
REFUSED = 300


def publish(connection, exchange, key, delay=500):
    Producer(connection.default_channel).publish(
        time.time(), exchange=exchange, routing_key=key, headers={"x-delay": delay}
    )


def full(queue_type, exchange, **arguments):
    limit = {"x-queue-type": queue_type, "x-max-length": 1, **arguments}
    return Queue("full", exchange, "full", queue_arguments=limit)


@pytest.mark.parametrize(
    ("publisher_is", "exchange", "queue_type"),
    [
        ("informed", "x", "classic"),
        ("not informed", "", "quorum"),
        ("too early", "x", "quorum"),
    ],
)
def test_a_full_queue_that_rejects_delays_no_other(
    connect, collect, publisher_is, exchange, queue_type
):
    exchange = Exchange(exchange, "direct")
    bad = full(queue_type, exchange, **{"x-overflow": "reject-publish"})
    good = Queue("good", exchange, "good")
    worker, publisher = connect(), connect(confirm_publish=True)
    if publisher_is == "too early":
        # Nobody can know yet what kind of a queue this is.
        publish(publisher, exchange, "full", delay=3_600_000)
    for queue in (bad, good):
        queue(worker.default_channel).declare()
    worker.default_channel.basic_get("good")
    if publisher_is == "informed":
        for queue in (bad, good):
            queue(publisher.default_channel).declare()

    for _ in range(REFUSED):
        publish(publisher, exchange, "full")
    for _ in range(5):
        publish(publisher, exchange, "good")

    arrivals = collect(worker, [good], 5)
    assert max(arrival.at - arrival.body for arrival in arrivals) < PATIENCE
    # Those that found room come as any others do; the rest wait for their turn in the relay.
    (first, *_) = collect(worker, [bad], 1)
    assert (first.exchange, first.key, first.headers) == (exchange.name, "full", {})


def test_a_queue_that_rejects_by_a_policy_has_a_relay_where_the_settings_say_so(
    broker, vhost, connect, collect, topology
):
    broker.api(
        "PUT",
        f"policies/{vhost.name}/full",
        {"pattern": "^full$", "apply-to": "queues", "definition": {"overflow": "reject-publish"}},
    )
    connection = connect(binary_delay={"relays": ["f?ll"]})
    queues = full("quorum", Exchange("")), Queue("good")
    for queue in queues:
        queue(connection.default_channel).declare()

    for _ in range(REFUSED):
        publish(connection, "", "full")
    publish(connection, "", "good")

    (arrival,) = collect(connection, [queues[1]], 1)
    assert arrival.at - arrival.body < PATIENCE
    assert topology.queue_relay_name("full") in {row["name"] for row in vhost.queues()}
    assert topology.queue_relay_name("good") not in {row["name"] for row in vhost.queues()}


@pytest.mark.parametrize("exchange", ["", "x"])
def test_a_queue_with_a_relay_gets_each_message_once_and_in_full(connect, collect, exchange):
    """Also from those who led to the queue itself before its relay was made."""
    exchange = Exchange(exchange, "direct")
    queue = full("quorum", exchange, **{"x-overflow": "reject-publish", "x-max-length": 1000})
    early, late, declaring = connect(), connect(), connect()
    plain = connect("amqp").default_channel
    queue(plain).declare()
    if exchange.name:
        early.default_channel.queue_bind("full", exchange.name, "full")
    publish(early, exchange, "full")
    queue(declaring.default_channel).declare()
    publish(declaring, exchange, "full")
    publish(late, exchange, "full")
    publish(early, exchange, "full")

    arrivals = collect(declaring, [queue], 4)

    assert len({arrival.body for arrival in arrivals}) == len(arrivals) == 4
    assert {(arrival.exchange, arrival.key) for arrival in arrivals} == {(exchange.name, "full")}


def test_what_waits_for_a_queue_that_is_deleted_is_parked(connect, topology, vhost):
    queue = full("quorum", Exchange(""), **{"x-overflow": "reject-publish"})
    connection = connect()
    publish(connection, "", "another", delay=3_600_000)  # makes the ladder, which takes long
    for delay in (12_000, 90_000):
        queue(connection.default_channel).declare()
        publish(connection, "", "full", delay=delay)
        if not connection.default_channel.queue_delete("full"):
            break
        # It has come before.

    wait_until(lambda: vhost.waiting(topology.parking) == {topology.parking: 1})


@pytest.mark.parametrize(
    ("owner", "queue_type"),
    [
        ("without the transport", "classic"),
        ("later than the publisher", "quorum"),
    ],
)
def test_a_full_queue_delays_no_other_though_nobody_has_told_its_arguments(
    connect, collect, owner, queue_type
):
    # That it ends by itself, and so could do without a relay, is no reason.
    limits = {"x-overflow": "reject-publish", "x-expires": 3_600_000}
    bad = full(queue_type, Exchange(""), **limits)
    good = Queue("good")
    publisher, worker = connect(confirm_publish=True), connect()
    declared_by = connect("amqp") if owner == "without the transport" else connect()
    good(worker.default_channel).declare()
    if owner == "later than the publisher":
        publish(publisher, "", "full", delay=3_600_000)
    # It neither consumes nor delays.
    bad(declared_by.default_channel).declare()

    for _ in range(REFUSED):
        publish(publisher, "", "full")
    for _ in range(5):
        publish(publisher, "", "good")

    arrivals = collect(worker, [good], 5)
    assert max(arrival.at - arrival.body for arrival in arrivals) < PATIENCE


def test_a_passive_declaration_makes_no_relay(connect, collect, topology, vhost):
    owner, asking = connect(), connect()
    reports = Queue("reports")
    reports(owner.default_channel).declare()
    asking.default_channel.basic_get("reports")
    asking.default_channel.queue_declare("reports", passive=True)
    publish(owner, "", "reports")

    collect(asking, [reports], 1)

    assert topology.queue_relay_name("reports") not in {row["name"] for row in vhost.queues()}


def test_a_consumer_that_only_declares_passively_gets_what_a_stranger_to_the_queue_delays(
    connect, collect
):
    Queue("reports")(connect("amqp").default_channel).declare()
    worker = connect()
    worker.default_channel.queue_declare("reports", passive=True)
    publish(connect(), "", "reports")

    collect(worker, [Queue("reports", no_declare=True)], 1)


def test_what_a_queue_dead_letters_says_where_it_was_published(connect, collect):
    connection = connect()
    channel = connection.default_channel
    dead = Queue("dead", Exchange("dlx", "fanout"))
    orders = Queue(
        "orders", Exchange("x", "topic"), "#", queue_arguments={"x-dead-letter-exchange": "dlx"}
    )
    for queue in (dead, orders):
        queue(channel).declare()
    Producer(channel).publish(1, exchange="x", routing_key="new", headers={"x-delay": 250})
    wait_until(lambda: (message := orders(channel).get()) and message.reject() is None)

    (arrival,) = collect(connection, [dead], 1)

    [death] = arrival.headers["x-death"]
    assert (death["exchange"], death["routing-keys"]) == ("x", ["new"])
    assert arrival.headers["x-first-death-exchange"] == "x"


#: Queues, and whether they end by themselves and take every message until then.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "classic": ({}, {}, False),
    "quorum": ({}, {"x-queue-type": "quorum"}, False),
    "stream": ({}, {"x-queue-type": "stream", "x-max-length-bytes": 10**6}, False),
    "rejecting": ({}, {"x-max-length": 1, "x-overflow": "reject-publish"}, False),
    "transient": ({"durable": False}, {}, False),
    "exclusive": ({"durable": False, "exclusive": True}, {}, False),
    "auto-delete": ({"auto_delete": True}, {}, True),
    "transient auto-delete": ({"durable": False, "auto_delete": True}, {}, True),
    "both": ({"auto_delete": True}, {"x-expires": 3_600_000}, True),
    "expiring": ({}, {"x-expires": 2**31, "x-overflow": "drop-head", "x-max-length": 9}, True),
    "expiring quorum": ({}, {"x-expires": 3_600_000, "x-queue-type": "quorum"}, True),
    "quorum with more": (
        {},
        {
            "x-queue-type": "quorum",
            "x-dead-letter-exchange": "it's; but current is none",
            "x-dead-letter-routing-key": "'of type 'longstr'",
            "x-dead-letter-strategy": "at-most-once",
            "x-expires": 3_600_000,
            "x-message-ttl": 3_600_000,
        },
        True,
    ),
    "with more": (
        {"auto_delete": True},
        {
            "x-dead-letter-exchange": "d\xe9j\xe0",
            "x-max-length-bytes": 2**40,
            "x-max-priority": 5,
            "x-single-active-consumer": True,
        },
        True,
    ),
    "expiring and rejecting": ({}, {"x-expires": 9**9, "x-overflow": "reject-publish"}, False),
    "auto-delete and rejecting": (
        {"auto_delete": True},
        {"x-queue-type": "classic", "x-message-ttl": 9, "x-overflow": "reject-publish-dlx"},
        False,
    ),
}


def make(channel, name):
    properties, arguments, _ = KINDS[name]
    lasting = {"durable": True, "auto_delete": False}
    channel.queue_declare(name, **{**lasting, **properties}, arguments=arguments)


def state(vhost):
    """What every queue is, and how much is in it."""
    rows = vhost.broker.api("GET", f"queues/{vhost.name}?disable_stats=true")
    told = ("name", "durable", "auto_delete", "exclusive", "arguments", "type")
    return sorted(str({column: row.get(column) for column in told}) for row in rows)


def test_to_ask_whether_a_queue_ends_by_itself_changes_nothing(connect, vhost):
    owner, executor = connect("amqp"), connect().connection.delay_mechanism.executor
    for name in KINDS:
        make(owner.default_channel, name)
    before = state(vhost)

    answers = {name: executor.do(AskTemporary(name)) for name in (*KINDS, "missing")}

    assert answers == {**{name: ends for name, (*_, ends) in KINDS.items()}, "missing": False}
    assert state(vhost) == before


@pytest.mark.parametrize("name", ["quorum with more", "with more", "transient auto-delete"])
def test_a_queue_that_is_deleted_while_it_is_asked_about_is_not_made_again(
    connect, vhost, monkeypatch, name
):
    owner, executor = connect("amqp").default_channel, connect().connection.delay_mechanism.executor
    make(owner, name)
    before, asked, end = state(vhost), 0, None
    difference = executor._difference  # noqa: SLF001

    def ask(*question):
        nonlocal asked
        asked += 1
        if asked == end:
            owner.queue_delete(name)
        return difference(*question)

    monkeypatch.setattr(executor, "_difference", ask)
    assert executor.do(AskTemporary(name))
    for end in range(1, asked + 1):  # noqa: B007 - it is read there
        asked = 0
        assert not executor.do(AskTemporary(name))
        assert state(vhost) == []
        make(owner, name)
    assert state(vhost) == before


def test_a_queue_that_the_broker_cannot_tell_about_is_named_with_the_remedy(connect, broker):
    """Its error is cut off after 255 bytes, within a character or not."""
    connection = connect()
    executor = connection.connection.delay_mechanism.executor
    connection.default_channel.queue_declare(
        "q", arguments={"x-dead-letter-exchange": "\u20ac" * 80, "x-expires": 3_600_000}
    )
    if broker.release < (4, 0):
        assert not executor.do(AskTemporary("q"))
        connection.default_channel.queue_delete("q")
        return
    with pytest.raises(TopologyError, match="declare the queue on this connection before"):
        executor.do(AskTemporary("q"))


def test_a_reply_queue_of_each_request_leaves_nothing_behind(connect, vhost):
    server, arrived = connect(confirm_publish=True), []
    server.default_channel.queue_declare("requests")
    publish(server, "", "requests")  # makes the ladder
    before = state(vhost)
    for name in ("auto-delete", "expiring", "expiring quorum"):
        client = connect("amqp")
        make(client.default_channel, name)
        replies = Queue(name, no_declare=True)
        with client.Consumer(replies, callbacks=[lambda body, _: arrived.append(body)]):
            publish(server, "", name)
            drain_until(client, lambda: arrived)
        client.default_channel.queue_delete(name)
        arrived.clear()

    assert state(vhost) == before
