"""Other systems' ladders on a real broker, beside the programs whose ladders they are."""

import time

import pytest
from kombu import Exchange, Producer, Queue

from kombu_binary_delay import AddressError, TopologyError
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.foreign import (
    CELERY,
    FOREIGN_LADDERS,
    NSERVICEBUS,
    NSERVICEBUS_V1,
)


@pytest.fixture
def native():
    """Kombu's side of Celery's own ladder."""
    return pytest.importorskip(
        "kombu.transport.native_delayed_delivery", reason="Kombu has Celery's ladder since 5.5"
    )


@pytest.fixture(autouse=True)
def _wanted(broker, request):
    """What a broker refuses, a foreign ladder cannot have on it either."""
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    if broker.release >= (4, 3) and name == "nservicebus-v1":
        pytest.skip("RabbitMQ 4.3 refuses the x-queue-mode of NServiceBus before 8")


def publish(connection, body, key, delay, exchange=""):
    Producer(connection.default_channel).publish(
        body, exchange=exchange, routing_key=key, headers={"x-delay": delay}
    )


def test_celerys_ladder_is_what_the_installed_kombu_declares(broker, connect, vhost, native):
    connection = connect("amqp")
    native.declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
    theirs = _standing(vhost)

    other = broker.vhost()
    try:
        ours = connect(url=other.url, binary_delay={"foreign_ladder": "celery"})
        Queue("q")(ours.default_channel).declare()
        publish(ours, 1, "q", 1000)
        made = _standing(other)
    finally:
        other.delete()

    assert made["bindings"] - theirs["bindings"] == {
        ("celery_delayed_delivery", "q", "queue", "#.q")
    }
    assert made["queues"] == theirs["queues"]
    assert made["exchanges"] == theirs["exchanges"]
    assert made["bindings"] >= theirs["bindings"]


@pytest.mark.parametrize("name", FOREIGN_LADDERS)
def test_a_delayed_message_goes_out_and_comes_in_by_a_foreign_ladder(connect, collect, name):
    ladder = FOREIGN_LADDERS[name]
    connection = connect(binary_delay={"foreign_ladder": name})
    queue = Queue("orders.new")(connection.default_channel)
    queue.declare()
    sent = time.time()

    publish(connection, "ours", "orders.new", 1000)
    # As its own programs send: by name, to the level that their arithmetic gives.
    theirs = Producer(connect("amqp").default_channel)
    theirs.publish(
        "theirs",
        exchange=ladder.entry_exchange(("1", "0")),
        routing_key=ladder.address(("1", "0"), Destination("", "orders.new")),
        headers={ladder.delay_header: 2} if ladder.delay_header else {},
    )

    arrivals = collect(connection, [queue], 2)
    assert {(arrival.body, arrival.exchange, arrival.key) for arrival in arrivals} == {
        ("ours", "", "orders.new"),
        ("theirs", "", "orders.new"),
    }
    assert [arrival.headers for arrival in arrivals] == [{}, {}]
    at = {arrival.body: arrival.at for arrival in arrivals}
    assert at["ours"] - sent >= 1
    assert at["theirs"] - sent >= 2


@pytest.mark.parametrize("name", ["nservicebus", "nservicebus-v1"])
def test_an_endpoint_gets_the_delay_in_the_header_that_its_own_tools_read(connect, collect, name):
    ladder = FOREIGN_LADDERS[name]
    endpoint = connect("amqp")
    # As NServiceBus declares an endpoint: a fanout exchange before its queue, bound to delivery.
    connection = connect(binary_delay={"foreign_ladder": name})
    exchange = Exchange("endpoint", "fanout")
    queue = Queue("endpoint", exchange)(endpoint.default_channel)
    queue.declare()
    # The first makes the ladder, in a part of its delay.
    publish(connection, 0, "endpoint", 1000)
    endpoint.default_channel.exchange_bind("endpoint", ladder.delivery, "#.endpoint")
    publish(connection, 1, "endpoint", 5000)

    arrivals = {arrival.body: arrival for arrival in collect(endpoint, [queue], 2)}

    assert arrivals[1].headers["NServiceBus.Transport.RabbitMQ.DelayInSeconds"] == 5
    assert arrivals[1].exchange == ladder.delivery


def test_what_comes_by_a_foreign_ladder_is_unwrapped_whatever_its_delay_and_retried_by_ours(
    connect, collect, native
):
    """A dead letter names the exchange that its last wait led to: at even seconds, a level's."""
    stock = connect("amqp")
    native.declare_native_delayed_delivery_exchanges_and_queues(stock, "quorum")
    connection = connect()
    queues = Queue("q"), Queue("topical", Exchange("tasks", "topic"), "image.png")
    for queue in queues:
        queue(connection.default_channel).declare()
    stock.default_channel.queue_bind("q", "celery_delayed_delivery", "#.q")
    native.bind_queue_to_native_delayed_delivery_exchange(stock, queues[1])

    for seconds in (1, 2, 3, 4):
        for key in ("q", "image.png"):
            stock.Producer().publish(
                seconds,
                exchange="celery_delayed_27",
                routing_key=native.calculate_routing_key(seconds, key),
            )

    arrivals = collect(connection, queues, 8)
    assert [arrival.headers for arrival in arrivals] == [{}] * 8
    # Its ladder knows no exchange, so a retry goes to the queue that the message came from.
    assert {(arrival.queue, arrival.exchange, arrival.key) for arrival in arrivals} == {
        ("q", "", "q"),
        ("topical", "", "topical"),
    }
    # The native ladder has been removed when a task retries.
    plain = connect("amqp").default_channel
    for name in ("celery_delayed_delivery", *(f"celery_delayed_{n}" for n in range(28))):
        plain.exchange_delete(name)
    for came in {arrival.queue: arrival for arrival in arrivals}.values():
        publish(connection, "again", came.key, 250, exchange=came.exchange)
    assert {arrival.queue for arrival in collect(connection, queues, 2)} == {"q", "topical"}


@pytest.mark.parametrize("name", ["nservicebus", "celery"])
def test_what_a_foreign_ladder_cannot_lead_to_is_refused_and_nothing_is_published(
    connect, vhost, name
):
    connection = connect(binary_delay={"foreign_ladder": name})

    with pytest.raises(AddressError, match="publish to the default exchange"):
        publish(connection, 1, "k", 1000, exchange="x")
    assert not vhost.exchanges()
    with pytest.raises(TopologyError, match=r"'nowhere' does not exist.*declare the queue first"):
        publish(connection, 1, "nowhere", 1000)

    ladder = {"nservicebus": NSERVICEBUS, "celery": CELERY}[name]
    assert not any(vhost.waiting(*(queue.name for queue in ladder.whole.queues)).values())
    assert NSERVICEBUS_V1.level_name(0) not in {row["name"] for row in vhost.exchanges()}


def _standing(vhost):
    return {
        "exchanges": {
            (row["name"], row["type"], row["durable"], str(row["arguments"]))
            for row in vhost.exchanges()
        },
        "queues": {
            (row["name"], row["durable"], str(sorted(row["arguments"].items())))
            for row in vhost.queues()
            if row["name"] != "q"
        },
        "bindings": {
            (row["source"], row["destination"], row["destination_type"], row["routing_key"])
            for row in vhost.bindings()
        },
    }
