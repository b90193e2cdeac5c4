"""Each delayed message reaches exactly the destination that it was meant for."""

import time

import pytest
from kombu import Exchange, Producer, Queue, binding


def declare(connection, *entities):
    for entity in entities:
        entity(connection.default_channel).declare()
    return entities


def publish(connection, body, exchange="", key="", delay=250, **options):
    headers = {"x-delay": delay, **options.pop("headers", {})}
    Producer(connection.default_channel).publish(
        body, exchange=exchange, routing_key=key, headers=headers, **options
    )


def reached(arrivals):
    found: dict[str, list[object]] = {}
    for arrival in arrivals:
        found.setdefault(arrival.queue, []).append(arrival.body)
    return {queue: sorted(bodies, key=str) for queue, bodies in found.items()}


def test_a_delayed_message_looks_as_if_just_published_to_its_destination(connect, collect, confirm):
    connection = connect(confirm_publish=confirm)
    exchange = Exchange("x", "topic")
    (queue,) = declare(connection, Queue("q", exchange, "a.*"))
    headers = {"mine": {"deep": [1, "two"]}, "x-death": [{"queue": "theirs", "count": 1}]}
    properties = {"correlation_id": "c", "reply_to": "r", "message_id": "m", "app_id": "a"}
    started = time.time()

    publish(
        connection,
        {"b": 1},
        exchange,
        "a.b",
        delay=1700,
        headers=headers,
        priority=3,
        expiration=60,
        **properties,
    )

    (arrival,) = collect(connection, [queue], 1)
    assert arrival.at - started >= 1.7
    assert (arrival.exchange, arrival.key) == ("x", "a.b")
    assert arrival.body == {"b": 1}
    assert arrival.headers == headers
    for name, value in {**properties, "priority": 3, "expiration": "60000"}.items():
        assert arrival.properties[name] == value


def test_delays_arrive_in_the_order_in_which_they_are_due(connect, collect):
    connection = connect()
    (queue,) = declare(connection, Queue("q"))
    publish(connection, "warm-up", key="q", delay=1)
    for delay in (3000, 2000, 1000):
        publish(connection, delay, key="q", delay=delay)

    arrivals = collect(connection, [queue], 4)

    assert [arrival.body for arrival in arrivals] == ["warm-up", 1000, 2000, 3000]


def test_exchanges_that_share_a_key_and_keys_that_are_suffixes_keep_apart(connect, collect):
    connection = connect()
    queues = declare(
        connection,
        Queue("one", Exchange("one", "direct"), "k"),
        Queue("two", Exchange("two", "direct"), "k"),
        Queue("k", Exchange("three", "direct"), "a.k"),
        Queue("k.k", Exchange("three", "direct"), "k"),
        Queue("topic", Exchange("four", "topic"), "a.*.c"),
        Queue("all", Exchange("four", "topic"), "#"),
        Queue("literal", Exchange("one", "direct"), "*"),
    )

    publish(connection, 1, "one", "k")
    publish(connection, 2, "two", "k")
    publish(connection, 3, "three", "a.k")
    publish(connection, 4, "three", "k")
    publish(connection, 5, "", "k")
    publish(connection, 6, "four", "a.b.c")
    publish(connection, 7, "four", "x.a.b.c")
    publish(connection, 8, "four", "")
    publish(connection, 9, "one", "*")

    assert reached(collect(connection, queues, 10)) == {
        "one": [1],
        "two": [2],
        "k": [3, 5],
        "k.k": [4],
        "topic": [6],
        "all": [6, 7, 8],
        "literal": [9],
    }


@pytest.mark.parametrize("kind", ["direct", "topic", "fanout", "headers"])
def test_every_exchange_type_routes_a_delayed_message_as_an_undelayed_one(connect, collect, kind):
    connection = connect()
    exchange = Exchange("x", kind)
    queues = declare(
        connection,
        Queue("a", exchange, "k.1", binding_arguments={"x-match": "any", "for": "a"}),
        Queue("b", exchange, "k.2", binding_arguments={"x-match": "any", "for": "b"}),
        Queue("c", exchange, "k.#", binding_arguments={"x-match": "any", "for": "c"}),
    )
    producer = Producer(connection.default_channel)

    producer.publish(1, exchange=exchange, routing_key="k.1", headers={"for": "a"})
    undelayed = reached(collect(connection, queues, 1))
    publish(connection, 1, exchange, "k.1", headers={"for": "a"})
    arrivals = collect(connection, queues, 1)

    assert reached(arrivals) == undelayed
    assert {(arrival.exchange, arrival.key) for arrival in arrivals} == {("x", "k.1")}


@pytest.mark.parametrize(
    "name", ["a.b", "#", "*", "q %", "ключ.*", "!x", "@", "x" * 255, "é" * 127]
)
def test_strange_names_are_destinations_like_others(connect, collect, name):
    connection = connect()
    queues = declare(connection, Queue(name, Exchange(name, "direct"), name), Queue("bystander"))

    publish(connection, "default", "", name)
    publish(connection, "direct", name, name)

    arrivals = collect(connection, queues, 2)
    assert reached(arrivals) == {name: ["default", "direct"]}
    assert {(arrival.exchange, arrival.key) for arrival in arrivals} == {("", name), (name, name)}
    assert all(arrival.headers == {} for arrival in arrivals)


def test_a_publisher_that_starts_before_any_worker_still_delivers(connect, collect):
    publisher, worker = connect(), connect()
    exchange = Exchange("x", "topic")
    exchange(publisher.default_channel).declare()
    publish(publisher, "early bird", exchange, "a.b", delay=1500)

    queue = Queue("q", exchange, "a.#")

    assert reached(collect(worker, [queue], 1)) == {"q": ["early bird"]}


def test_a_binding_to_an_exchange_that_somebody_else_declared_counts_too(connect, collect):
    kinds = {"d": "direct", "t": "topic", "f": "fanout", "h": "headers"}
    for name, kind in kinds.items():
        connect("amqp").default_channel.exchange_declare(
            name, kind, durable=kind != "topic", auto_delete=False
        )
    connection = connect()
    queues = [
        Queue(
            f"q-{name}", Exchange(name, no_declare=True), "k", binding_arguments={"x-match": "all"}
        )
        for name in kinds
    ]
    declare(connection, *queues)
    # A fanout takes every key, and a topic's or a direct's only its own.
    for name in kinds:
        publish(connection, 1, name, "k")
        publish(connection, 2, name, "other")

    assert reached(collect(connection, queues, 6)) == {
        "q-d": [1],
        "q-t": [1],
        "q-f": [1, 2],
        "q-h": [1, 2],
    }


def test_what_is_unbound_takes_no_delayed_messages_any_more(connect, collect, vhost, topology):
    connection, other = connect(), connect()
    exchange, fanout = Exchange("x", "direct"), Exchange("f", "fanout")
    queues = declare(
        connection,
        Queue("q", bindings=[binding(exchange, "a"), binding(exchange, "b")]),
        Queue("f", bindings=[binding(fanout, "1"), binding(fanout, "2")]),
    )
    publish(connection, "a", exchange, "a", delay=1500)
    publish(connection, "b", exchange, "b", delay=1500)
    publish(connection, "f", fanout, "", delay=1500)

    # By a process that has never bound it.
    queues[0](other.default_channel).unbind_from(exchange, "a")
    queues[1](other.default_channel).unbind_from(fanout, "1")

    # A consumer that declares its queues would bind them again.
    bare = [Queue("q", no_declare=True), Queue("f", no_declare=True)]
    assert reached(collect(connection, bare, 2, more=0)) == {"q": ["b"], "f": ["f"]}
    assert vhost.waiting(topology.parking) == {topology.parking: 1}


def test_what_was_meant_for_a_deleted_exchange_is_parked(connect, vhost, topology):
    connection = connect()
    exchange, headers = Exchange("x", "direct"), Exchange("h", "headers")
    declare(connection, Queue("q", exchange, "k"), Queue("h", headers))
    publish(connection, 1, exchange, "k", delay=1500)
    publish(connection, 2, headers, "k", delay=1500)

    connection.default_channel.exchange_delete("x")
    connection.default_channel.exchange_delete("h")

    wait_until(lambda: vhost.waiting(topology.parking)[topology.parking] == 2)
    assert vhost.waiting("q", "h") == {"q": 0, "h": 0}


def test_a_hundred_messages_for_a_deleted_queue_are_parked_and_hold_nobody_up(
    connect, collect, vhost, topology
):
    connection = connect()
    _, good = declare(connection, Queue("bad"), Queue("good"))
    for number in range(100):
        publish(connection, number, key="bad", delay=1000)
    publish(connection, "on time", key="good", delay=1000)
    due = time.time() + 1
    connection.default_channel.queue_delete("bad")

    (arrival,) = collect(connection, [good], 1)

    # Behind one bad destination it would be three minutes.
    assert 0 <= arrival.at - due < 5
    wait_until(lambda: vhost.waiting(topology.parking)[topology.parking] == 100)


def test_a_queue_that_does_not_exist_yet_is_delivered_to_once_it_is_consumed(
    connect, collect, caplog
):
    publish(connect(), "waits", key="later", delay=1500)
    assert "'later' does not exist" in caplog.text

    assert reached(collect(connect(), [Queue("later")], 1)) == {"later": ["waits"]}


def test_exchanges_bound_to_exchanges_route_delayed_messages(connect, collect):
    connection = connect()
    channel = connection.default_channel
    first, second, third = Exchange("1", "topic"), Exchange("2", "direct"), Exchange("3", "headers")
    queues = declare(
        connection,
        Queue("direct", second, "a.b"),
        Queue("headers", third, binding_arguments={"x-match": "all", "for": "me"}),
    )
    first(channel).declare()
    second(channel).bind_to(first, "a.*")
    third(channel).bind_to(second, "a.b")

    publish(connection, "hit", first, "a.b", headers={"for": "me"})
    publish(connection, "miss", first, "b.b", headers={"for": "me"})

    assert reached(collect(connection, queues, 2)) == {"direct": ["hit"], "headers": ["hit"]}

    second(channel).unbind_from(first, "a.*")
    publish(connection, "gone", first, "a.b", headers={"for": "me"})
    publish(connection, "kept", second, "a.b")
    assert reached(collect(connection, queues, 1)) == {"direct": ["kept"]}


def test_cc_and_bcc_are_delayed_copies_for_their_own_keys(connect, collect):
    connection = connect()
    exchange = Exchange("x", "direct")
    queues = declare(connection, *(Queue(each, exchange, each) for each in ("to", "cc", "bcc")))

    publish(connection, 1, exchange, "to", headers={"CC": ["cc"], "BCC": ["bcc"]})

    arrivals = collect(connection, queues, 3)
    assert reached(arrivals) == {"to": [1], "cc": [1], "bcc": [1]}
    assert all(arrival.headers == {"CC": ["cc"]} for arrival in arrivals)

    publish(connection, 2, "", "to", headers={"CC": ("cc",)})
    assert reached(collect(connection, queues, 2)) == {"to": [2], "cc": [2]}


@pytest.mark.parametrize("kind", ["direct", "topic", "fanout"])
def test_a_program_written_for_the_delayed_message_plugin_runs_unchanged(connect, collect, kind):
    connection = connect()
    exchange = Exchange("x", "x-delayed-message", arguments={"x-delayed-type": kind})
    (queue,) = declare(connection, Queue("q", exchange, "k"))
    publish(connection, "warm-up", exchange, "k", delay=1)
    for delay in (1500, 300, 900, 600, 300, 1200):
        publish(connection, delay, exchange, "k", delay=delay)

    bodies = [arrival.body for arrival in collect(connection, [queue], 7)]

    assert bodies == ["warm-up", 300, 300, 600, 900, 1200, 1500]


@pytest.mark.parametrize("backlog", [3, 40])
def test_a_consumer_may_publish_delayed_messages_on_its_own_connection(
    connect, collect, confirm, backlog
):
    connection = connect(confirm_publish=confirm)
    inbox, outbox = declare(connection, Queue("in"), Queue("out"))
    for number in range(backlog):
        Producer(connection.default_channel).publish(number, routing_key="in")

    def send_on(body, message):
        publish(connection, body, key="out", delay=500)
        message.ack()

    with connection.Consumer([inbox], callbacks=[send_on], accept=None):
        assert sorted(drained(connection, backlog, outbox)) == list(range(backlog))


def drained(connection, count, queue):
    """Take ``count`` messages from a queue by basic.get, while others come in by basic.deliver."""
    taken: list[object] = []
    bound = queue(connection.default_channel)
    end = time.monotonic() + 10
    while len(taken) < count and time.monotonic() < end:
        message = bound.get(no_ack=True, accept=["json", "text/plain"])
        if message is None:
            time.sleep(0.02)
        else:
            taken.append(message.payload)
    return taken


def test_a_queue_made_anew_while_the_publisher_lives_takes_delayed_messages_again(connect, collect):
    publisher = connect()
    passing = Queue("passing", auto_delete=True)
    for number in (1, 2):
        worker = connect()
        (queue,) = declare(worker, passing)
        publish(publisher, number, key="passing")
        # The queue goes with its last consumer.
        assert reached(collect(worker, [queue], 1)) == {"passing": [number]}


@pytest.mark.parametrize("gone", ["queue", "exchange", "binding", "all"])
def test_what_is_bound_again_takes_delayed_messages_again(connect, collect, gone):
    connection, other = connect(), connect()
    exchange = Exchange("x", "direct")
    (queue,) = declare(connection, Queue("q", exchange, "k"))
    publish(connection, 1, exchange, "k")
    assert reached(collect(connection, [queue], 1)) == {"q": [1]}
    if gone in ("queue", "all"):
        other.default_channel.queue_delete("q")
    if gone in ("exchange", "all"):
        other.default_channel.exchange_delete("x")
    if gone == "binding":
        queue(other.default_channel).unbind_from(exchange, "k")

    declare(connection, queue)
    publish(connection, 2, exchange, "k")

    assert reached(collect(connection, [queue], 1)) == {"q": [2]}


def test_names_that_only_begin_like_celerys_own_are_users_names(connect, collect):
    connection = connect()
    exchange = Exchange("celeryevents-of-mine", "topic")
    (queue,) = declare(connection, Queue("celeryevaluations", exchange, "#"))

    publish(connection, 1, exchange, "k")

    assert reached(collect(connection, [queue], 1)) == {"celeryevaluations": [1]}


def test_messages_of_other_programs_in_the_same_queue_are_left_alone(connect, collect):
    connection, stock = connect(), connect("amqp")
    (queue,) = declare(connection, Queue("q"))
    headers = {"x-death": [{"queue": "theirs"}], "x-other": 1, "eta": "soon"}

    Producer(stock.default_channel).publish("plain", routing_key="q", headers=headers)

    (arrival,) = collect(connection, [queue], 1)
    assert (arrival.exchange, arrival.key, arrival.headers) == ("", "q", headers)


def test_a_consumer_without_the_transport_gets_the_message_and_can_send_it_on_through_ours(
    connect, collect
):
    connection, stock = connect(), connect("amqp")
    (queue,) = declare(connection, Queue("q"))
    publish(connection, "there and back", key="q")

    for _ in range(30):
        (raw,) = collect(stock, [queue], 1, more=0)
        # As Celery's retry does: what was received, headers and all, is published again.
        publish(connection, raw.body, raw.exchange, raw.key, delay=1, headers=raw.headers)

    (arrival,) = collect(connection, [queue], 1)
    assert (arrival.exchange, arrival.key, arrival.headers) == ("", "q", {})
    assert len(raw.key) < 100
    assert len(raw.headers["x-death"]) < 5


def test_garbage_on_the_ladder_is_parked_and_garbage_in_a_queue_is_delivered(
    connect, collect, vhost, topology
):
    connection, stock = connect(), connect("amqp")
    (queue,) = declare(connection, Queue("q"))
    publish(connection, "good", key="q")
    rogue = Producer(stock.default_channel)
    rogue.publish("?", exchange=topology.level_name(0), routing_key="not an address")
    rogue.publish("?", exchange=topology.delivery, routing_key="0.@.q")
    rogue.publish("!", routing_key="q", headers={"x-binary-delay": {"to": 5, "death": 6}})

    assert reached(collect(connection, [queue], 2)) == {"q": ["!", "good"]}
    assert vhost.waiting(topology.parking) == {topology.parking: 2}


def wait_until(true, timeout=10):
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, f"not within {timeout} s"
        time.sleep(0.05)
