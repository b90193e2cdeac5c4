"""A Kombu program written for the delayed-message plugin runs unchanged, and there is no plugin."""

from __future__ import annotations

import time

import pytest
from kombu import Connection, Exchange, Queue

from kombu_binary_delay import DelayError
from kombu_binary_delay.operate import Management, verify
from tests.waits import wait_until

#: 100 ms are little on a machine that is busy: what is late then may change places. So often
#: enough, it is to be found in a moment when it is not; a round takes half a second.
ROUNDS = 60


def delayed(name: str, kind: str) -> Exchange:
    return Exchange(name, type="x-delayed-message", arguments={"x-delayed-type": kind})


def send(connection: Connection, body: object, exchange: str, key: str, delay: object) -> None:
    connection.Producer().publish(
        body, exchange=exchange, routing_key=key, headers={"x-delay": delay}
    )


def test_the_broker_has_no_plugin_for_it(broker):
    def types():
        # A node that has just started does not say yet.
        nodes = broker.api("GET", "nodes")
        return [type_["name"] for node in nodes for type_ in node.get("exchange_types", ())]

    assert "x-delayed-message" not in wait_until(types)


@pytest.mark.parametrize(("kind", "tick"), [("direct", 125), ("topic", 100), ("fanout", 125)])
def test_delays_arrive_in_due_order_where_the_exchange_routes_them(connect, collect, kind, tick):
    """To the tick: by default, 400 and 500 ms are both four ticks, and come as they were sent."""
    connection = connect(binary_delay={"tick": tick})
    exchange = delayed("x", kind)
    mine = Queue("mine", exchange, "order.*" if kind == "topic" else "order.paid")
    other = Queue("other", exchange, "other")
    for queue in (mine, other):
        queue(connection.default_channel).declare()
    delays = [500, 100, 300, 200, 100, 400]
    # Else the first of them makes the levels, and the second has to wait for that.
    send(connection, "warm-up", "x", "order.paid", 7 * tick)
    collect(connection, [mine], 1, more=0)
    due = sorted(delays, key=lambda delay: -(-delay // tick))

    orders = []
    for _ in range(ROUNDS):
        start = time.time()
        for delay in delays:
            send(connection, delay, "x", "order.paid", delay)
        arrivals = collect(connection, [mine], len(delays), more=0)
        assert sorted(arrival.body for arrival in arrivals) == sorted(delays)
        assert all(arrival.at >= start + arrival.body / 1000 for arrival in arrivals)
        assert {(arrival.exchange, arrival.key) for arrival in arrivals} == {("x", "order.paid")}
        orders.append([arrival.body for arrival in arrivals])
        if orders[-1] == due:
            break
    assert orders[-1] == due, orders
    expected = 1 + len(orders) * len(delays) if kind == "fanout" else 0
    assert len(collect(connection, [other], expected)) == expected


def test_a_type_that_is_missing_or_its_own_is_refused(connect, vhost):
    connection = connect()
    for arguments in (None, {}, {"x-delayed-type": "x-delayed-message"}, {"x-delayed-type": 5}):
        exchange = Exchange("x", type="x-delayed-message", arguments=arguments)
        with pytest.raises(DelayError, match="needs an argument 'x-delayed-type' with the type"):
            exchange(connection.default_channel).declare()
    assert vhost.exchanges() == []


def test_a_delay_may_be_an_int_a_float_or_a_string_of_one(connect, collect):
    connection = connect()
    queue = Queue("q", delayed("x", "direct"), "k")
    queue(connection.default_channel).declare()
    delays = [300, 300.0, 299.5, "300", "300.0", "3e2"]
    start = time.time()

    for delay in delays:
        send(connection, repr(delay), "x", "k", delay)

    arrivals = collect(connection, [queue], len(delays))
    assert sorted(arrival.body for arrival in arrivals) == sorted(map(repr, delays))
    assert all(arrival.at - start >= 0.2995 for arrival in arrivals)


def test_an_exchange_bound_behind_the_delayed_one_is_reached(connect, collect):
    connection = connect()
    channel = connection.default_channel
    first, behind = delayed("x", "topic"), Exchange("behind", "fanout")
    queue = Queue("q", behind)
    first(channel).declare()
    queue(channel).declare()
    behind(channel).bind_to(first, "order.#")
    start = time.time()

    send(connection, "hit", "x", "order.paid", 300)
    send(connection, "miss", "x", "other", 300)

    (arrival,) = collect(connection, [queue], 1)
    assert arrival.body == "hit"
    assert arrival.at - start >= 0.3


def test_above_the_limit_of_the_plugin_a_message_waits(connect, vhost, topology):
    """The plugin delivers at once what is delayed by more than 2^32 - 1 ms."""
    connection = connect()
    queue = Queue("q", delayed("x", "direct"), "k")
    queue(connection.default_channel).declare()

    for delay in (2**32 - 1, 2**32, 2**32 + 1, 2**33):
        send(connection, delay, "x", "k", delay)

    time.sleep(1)
    assert vhost.waiting("q") == {"q": 0}
    levels = [queue.name for level in topology.levels for queue in level.queues]
    wait_until(lambda: sum(vhost.waiting(*levels).values()) == 4)


@pytest.mark.slow
def test_a_delay_survives_a_restart_before_it_is_due_and_one_after(own_broker, vhost, collect):
    path = "kombu_binary_delay:Transport"
    queue = Queue("q", delayed("x", "direct"), "k")
    delays = [1000, 30_000]
    with Connection(vhost.url, transport=path) as connection:
        queue(connection.default_channel).declare()
        send(connection, "makes the ladder", "x", "k", 30_000)
        time.sleep(3)  # a quorum queue that is younger than about a second may come back empty
        sent = time.time()
        for delay in delays:
            send(connection, delay, "x", "k", delay)
        connection.default_channel.queue_declare("q", passive=True)
    own_broker.stop()
    time.sleep(max(0, sent + 2 - time.time()))  # the first is due while the broker is down
    own_broker.start()

    with Connection(vhost.url, transport=path) as connection:
        arrivals = collect(connection, [queue], 3)

    judged = [arrival for arrival in arrivals if arrival.body != "makes the ladder"]
    assert sorted(arrival.body for arrival in judged) == delays
    assert all(arrival.at >= sent + arrival.body / 1000 for arrival in judged)


def test_what_the_plugin_delivered_can_be_published_again(connect, collect):
    connection, plain = connect(), connect("amqp")
    queue = Queue("q")(connection.default_channel)
    queue.declare()
    send(plain, "again", "", "q", -5000)  # the plugin negates it

    (arrival,) = collect(connection, [queue], 1)
    assert arrival.headers == {}


def test_a_dead_letter_is_not_delayed_and_verify_says_so(broker, vhost, connect, topology):
    """With the plugin, a message that is rejected into its exchange waits for its x-delay again."""
    connection = connect()
    loops = {"x-dead-letter-exchange": "x", "x-dead-letter-routing-key": "k"}
    queue = Queue("q", delayed("x", "direct"), "k", queue_arguments=loops)
    queue(connection.default_channel).declare()
    send(connection, "x", "x", "k", 200)
    bound = queue(connection.default_channel)
    wait_until(lambda: vhost.waiting("q")["q"])

    bound.get().reject()
    again = wait_until(bound.get)
    again.ack()

    [death] = again.headers["x-death"]
    assert (death["reason"], death["queue"]) == ("rejected", "q")
    verification = verify(Management.of(connection, broker.management_url), topology)
    assert verification.sound
    [note] = [
        difference for difference in verification.differences if difference.what == "exchange x"
    ]
    assert note.found == "what q dead-letters goes there, as delayed messages do"
