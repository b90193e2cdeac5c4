"""What programs and connections may do meanwhile; tests/conformance shows what arrives where."""

import socket
import threading
import time
from functools import partial
from statistics import median
from urllib.parse import urlsplit

import amqp
import pytest
from amqp.exceptions import RecoverableConnectionError
from kombu import Exchange, Producer, Queue

from dev.faults.proxy import Proxy
from kombu_binary_delay.amendments.record import KEY
from kombu_binary_delay.ladder.envelope import HEADER
from kombu_binary_delay.wire import connection as waiting
from kombu_binary_delay.wire import executor
from tests.waits import PATIENCE, wait_until


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
    bodies_of: dict[str, list[object]] = {}
    for arrival in arrivals:
        bodies_of.setdefault(arrival.queue, []).append(arrival.body)
    return {queue: sorted(bodies, key=str) for queue, bodies in bodies_of.items()}


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


def test_a_hundred_messages_for_a_deleted_queue_are_parked_and_hold_nobody_up(
    connect, collect, vhost, topology
):
    connection = connect()
    _, good = declare(connection, Queue("bad"), Queue("good"))
    # One makes the way to it, and waits there until the test has ended.
    publish(connection, "first", key="bad", delay=3_600_000)
    connect("amqp").default_channel.queue_delete("bad")
    due = time.time() + 1
    for number in range(100):
        publish(connection, number, key="bad", delay=1000)
    publish(connection, "on time", key="good", delay=1000)

    # Behind one bad destination it would be three minutes.
    (arrival,) = collect(connection, [good], 1)

    assert arrival.at >= due
    wait_until(lambda: vhost.waiting(topology.parking)[topology.parking] == 100)


def test_a_delay_to_a_queue_that_does_not_exist_is_warned_of_once(connect, caplog):
    connection = connect()
    for _ in range(3):
        publish(connection, "waits", key="later")

    assert caplog.text.count("the queue 'later' does not exist") == 1


@pytest.mark.parametrize("kind", ["direct", "topic", "fanout"])
def test_a_program_written_for_the_delayed_message_plugin_runs_unchanged(connect, collect, kind):
    connection = connect()
    exchange = Exchange("x", "x-delayed-message", arguments={"x-delayed-type": kind})
    (queue,) = declare(connection, Queue("q", exchange, "k"))
    earliest = {}
    for number, delay in enumerate((4.3, 0.3, 2.3, 0.3)):  # in seconds
        earliest[number] = time.time() + delay
        publish(connection, number, exchange, "k", delay=1000 * delay)

    arrivals = collect(connection, [queue], len(earliest))

    assert sorted(arrival.body for arrival in arrivals) == sorted(earliest)
    assert all(arrival.at >= earliest[arrival.body] for arrival in arrivals)


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
    end = time.monotonic() + PATIENCE
    while len(taken) < count and time.monotonic() < end:
        message = bound.get(no_ack=True, accept=["json", "text/plain"])
        if message is None:
            time.sleep(0.02)
        else:
            taken.append(message.payload)
    return taken


def test_a_queue_made_anew_while_the_publisher_lives_takes_delayed_messages_again(
    connect, collect, vhost
):
    publisher = connect()
    passing = Queue("passing", auto_delete=True)
    for number in (1, 2):
        worker = connect()
        (queue,) = declare(worker, passing)
        publish(publisher, number, key="passing")
        assert reached(collect(worker, [queue], 1)) == {"passing": [number]}
        # The queue goes with its last consumer.
        wait_until(lambda: not vhost.waiting("passing"))


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


@pytest.mark.parametrize("notices", ["queue", "binding"])
def test_who_notices_at_a_declaration_that_the_ladder_has_gone_makes_all_of_it_again(
    connect, collect, vhost, topology, notices
):
    connection = connect()
    exchange = Exchange("x", "direct")
    (queue,) = declare(connection, Queue("q", exchange, "k"))
    publish(connection, 1, exchange, "k")
    assert reached(collect(connection, [queue], 1)) == {"q": [1]}
    with vhost.connect() as other:
        for row in filter(lambda row: topology.owns(row["name"]), vhost.exchanges()):
            other.channel(1).exchange_delete(row["name"])
        for row in filter(lambda row: topology.owns(row["name"]), vhost.queues()):
            other.channel(1).queue_delete(row["name"])

    declare(connection, Queue("another", exchange if notices == "binding" else None, "other"))
    publish(connection, 2, exchange, "k")

    # Not by our transport, which would make it all again.
    assert reached(collect(connect("amqp"), [queue], 1)) == {"q": [2]}


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


def test_the_waits_are_read_by_plain_channels_of_a_connection_and_not_by_ours(connect):
    connection = connect()
    queues = declare(connection, Queue("for-ours"), Queue("for-plain"))
    plain = amqp.Channel(connection.connection)
    plain.open()
    for queue in queues:
        # After two waits, and with a header that looks like a part of a death.
        publish(connection, "", key=queue.name, delay=1125, headers={"mine": "\x05queueS"})

    ours = wait_until(partial(connection.default_channel.basic_get, "for-ours", no_ack=True))
    raw = wait_until(partial(plain.basic_get, "for-plain", no_ack=True))

    assert sorted(ours.headers) == ["mine", HEADER]
    assert {HEADER, "mine", "x-death", "x-first-death-queue"} <= raw.headers.keys()
    assert len(raw.headers["x-death"]) == 2


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
    wait_until(lambda: vhost.waiting(topology.parking) == {topology.parking: 2})


def test_urgent_messages_hold_up_no_others(connect, collect, topology):
    """RabbitMQ 4.0 to 4.2 would let one of the others go for two urgent ones, and no sooner."""
    publisher, consumer = connect(), connect()
    arguments = {"x-queue-type": "quorum"} if topology.queue_type == "quorum" else None
    (queue,) = declare(publisher, Queue("q", queue_arguments=arguments))

    def go():
        for _ in range(15):
            for priority in (0, 0, 9):
                publish(publisher, [priority, time.time()], key="q", delay=1500, priority=priority)
            time.sleep(0.3)

    sender = threading.Thread(target=go)
    sender.start()
    arrivals = collect(consumer, [queue], 45)
    sender.join()

    late: dict[int, list[float]] = {priority: [] for priority in (0, 9)}
    for arrival in arrivals:
        priority, sent = arrival.body
        late[priority].append(arrival.at - sent - 1.5)
    assert min(late[0] + late[9]) >= 0
    # Waiting for two urgent ones each, they would be late by seconds. Of those of one priority, a
    # few may be late by chance.
    assert median(late[0]) < median(late[9]) + 1


def needs_a_queue(publisher):
    """To another queue than before."""
    return "new", {}


def needs_a_look(publisher):
    publisher.connection.delay_mechanism.router.known.looked = 1  # long ago
    return "warm", {}


def needs_the_journal(publisher):
    publisher.connection.delay_mechanism.journal.stream.is_declared = False
    return "warm", {}


def needs_amendments(publisher):
    return "warm", {KEY: "k"}


@pytest.mark.parametrize(
    ("needs", "options", "limit"),
    [
        ((needs_a_queue, "the queue 'new'"), {}, {}),
        ((needs_a_look, "the ladder"), {}, {}),
        ((needs_the_journal, "the journal"), {}, {}),
        ((needs_amendments, "the amendments"), {}, {}),
        ((needs_a_queue, "the queue 'new'"), {"read_timeout": 1}, {}),
        ((needs_a_queue, "the queue 'new'"), {}, {"timeout": 1}),
        ((needs_a_queue, "the queue 'new'"), {"confirm_publish": True}, {"timeout": 1}),
        ((needs_a_queue, "the queue 'new'"), {"confirm_publish": True}, {"confirm_timeout": 1}),
    ],
)
def test_a_publish_waits_for_what_the_delay_needs_no_longer_than_it_may(
    through_proxy, needs, options, limit, monkeypatch
):
    """The broker's side takes all bytes, and answers nothing."""
    (need, what), is_default = needs, not options and not limit
    connection, proxy = through_proxy(binary_delay={"journal": "stream"}, **options)
    declare(connection, Queue("warm"))
    publish(connection, "m", key="warm", delay=1000)
    key, headers = need(connection)
    message = amqp.Message("m", application_headers={"x-delay": 9000, **headers})
    channel = connection.default_channel
    if is_default:
        monkeypatch.setattr(waiting, "ANSWER_LIMIT", 1.0)
    proxy.hold()

    told = f"the broker did not answer within 1 s when it was asked for {what}"
    try:
        with pytest.raises(RecoverableConnectionError, match=told):
            channel.basic_publish(message, "", key, **limit)
    finally:
        connection.collect()


@pytest.fixture
def through_proxy(vhost, connect):
    with Proxy(urlsplit(vhost.url).port or 5672) as proxy:
        yield lambda **options: (connect(url=proxy.through(vhost.url), **options), proxy)


def test_a_ladder_may_take_longer_than_the_limit_of_an_answer(through_proxy, monkeypatch):
    """Each exchange and each queue of it is answered."""
    limit = 1.5
    monkeypatch.setattr(waiting, "ANSWER_LIMIT", limit)
    connection, proxy = through_proxy()
    declare(connection, Queue("q"))
    proxy.slow(500, 0.08)

    began = time.monotonic()
    publish(connection, "m", key="q", delay=8 * 365 * 86_400_000)

    assert time.monotonic() - began > 2 * limit


def test_in_an_alarm_a_publish_waits_for_what_the_delay_needs(connect, own_broker, monkeypatch):
    """The broker takes nothing from those who publish, and says so."""
    limit = 0.5
    monkeypatch.setattr(waiting, "ANSWER_LIMIT", limit)
    connection = connect()
    inner = connection.connection
    declare(connection, Queue("q"))
    publish(connection, "m", key="q")
    failures = []

    def publish_again():
        try:
            publish(connection, "m", key="q")
        except Exception as exc:  # noqa: BLE001 - the test names it
            failures.append(exc)

    publisher = threading.Thread(target=publish_again)
    with own_broker.alarm():
        # The broker sees that this connection publishes.
        publish(connection, "m", key="q")
        inner.delay_mechanism.router.known.looked = 1  # long ago
        publisher.start()
        wait_until(lambda: inner.is_blocked)
        publisher.join(3 * limit)
        assert publisher.is_alive()
    publisher.join(PATIENCE)

    assert not publisher.is_alive()
    assert not failures


@pytest.mark.parametrize("confirm", [False, True])
def test_a_delayed_publish_with_a_limit_arrives(connect, collect, confirm):
    connection = connect(confirm_publish=confirm)
    (queue,) = declare(connection, Queue("q"))
    message = amqp.Message("m", application_headers={"x-delay": 300})

    connection.default_channel.basic_publish(message, "", "q", timeout=PATIENCE)

    assert [arrival.body for arrival in collect(connection, [queue], 1)] == ["m"]


def test_levels_whose_declaration_is_cut_off_are_made_whole_by_the_next_connection(
    connect, vhost, topology, monkeypatch
):
    first = connect()
    declare(first, Queue("q"))
    sock = first.default_channel.connection.transport.sock
    half, bind, bound = 13, executor._bind, []  # noqa: SLF001

    def cut(channel, binding):
        bind(channel, binding)
        if topology.prefix in binding.source:
            bound.append(binding)
        if len(bound) == half:
            # RabbitMQ forgets what it has not done yet when a connection ends.
            executor.wait(channel)
            sock.shutdown(socket.SHUT_WR)

    monkeypatch.setattr(executor, "_bind", cut)
    with pytest.raises(first.connection_errors):
        publish(first, "first", key="q", delay=60_000)
    monkeypatch.undo()
    publish(connect(), "second", key="q", delay=60_000)

    levels = topology.levels[: topology.needs(topology.ladder.digits(60_000)) + 1]
    wanted = {(binding.source, binding.key) for level in levels for binding in level.bindings}
    bindings = vhost.broker.api("GET", f"bindings/{vhost.name}")
    assert len(bound) < len(wanted)
    assert wanted <= {(binding["source"], binding["routing_key"]) for binding in bindings}


def test_what_is_declared_without_waiting_takes_delayed_messages_as_well(connect, collect, caplog):
    connection = connect()
    channel = connection.default_channel
    declare(connection, Queue("known"))
    channel.basic_get("known")
    queues = [
        Queue(f"q{number}", Exchange(f"x{number}", "direct"), "k", channel=channel)
        for number in range(10)
    ]
    for queue in queues:
        queue.declare(nowait=True)
        publish(connection, queue.name, queue.exchange, "k")
        publish(connection, queue.name, key=queue.name)

    arrivals = collect(connection, queues, 20)
    assert reached(arrivals) == {queue.name: [queue.name] * 2 for queue in queues}
    assert "delayed messages" not in caplog.text


def test_a_queue_that_goes_with_its_last_consumer_is_forgotten_with_it(connect):
    """A program may make one for each request."""
    connection = connect()
    channel, known = connection.default_channel, connection.connection.delay_mechanism.router.known
    declare(connection, Queue("mail"))
    channel.basic_consume("mail", callback=print)

    def sizes_now():
        return [
            len(part) for part in (known.existing, known.bindings, known.queues, known.declared)
        ]

    sizes = []
    for name in ("", "reply-1", "", "reply-2"):
        queue = channel.queue_declare(name, exclusive=not name, auto_delete=True).queue
        channel.queue_bind(queue, "amq.topic", "a")
        first, last = (channel.basic_consume(queue, callback=print) for _ in range(2))
        sizes.append(sizes_now())
        channel.basic_cancel(first)
        assert sizes_now() == sizes[-1]
        channel.basic_cancel(last)

    assert sizes[0] == sizes[2]
    assert sizes[1] == sizes[3]
    assert all(gone < there for gone, there in zip(sizes_now(), sizes[1], strict=True))
