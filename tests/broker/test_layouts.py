"""Every layout of the ladder keeps its delays on a real broker."""

import time

import pytest
from kombu import Producer, Queue

from kombu_binary_delay import Settings

LAYOUTS = [
    {},
    {"radix": [2, 3, 10, 10], "layout": "skip", "tick": 100},
    {"queue_per_delay": True, "radix": 4, "layout": "skip"},
    {"lanes": 2},
]
DELAYS = [1700, 400, 1250, 400, 300, 1250, 800, 1700, 400]


@pytest.fixture(scope="module")
def radix():
    """They are about the layout of the ladder."""


def publish(connection, delay, body=None):
    producer = Producer(connection.default_channel)
    producer.publish(body or time.time(), routing_key="q", headers={"x-delay": delay})


def declare(connection):
    queue = Queue("q")(connection.default_channel)
    queue.declare()
    return queue


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_each_message_arrives_once_and_never_early(connect, collect, topology, vhost, settings):
    connection = connect(binary_delay=settings)
    queue = declare(connection)
    publish(connection, 1, "warm-up")
    sent = {}
    for number, delay in enumerate(DELAYS):
        sent[number] = time.time()
        publish(connection, delay, str(number))

    arrivals = collect(connection, [queue], 1 + len(DELAYS))

    came = {arrival.body: arrival.at for arrival in arrivals}
    assert len(arrivals) == len(came) == 1 + len(DELAYS)
    for number, delay in enumerate(DELAYS):
        assert came[str(number)] - sent[number] >= delay / 1000
    wanted = Settings.from_transport_options({"binary_delay": settings})
    made = wanted.topology()
    names = {row["name"] for row in vhost.queues()} - {"q", made.parking}
    assert names, "the delays were not on the ladder"
    direct = {name for name in names if name.startswith(made.direct)}
    lanes = [{queue.name for queue in lane.whole.queues} for lane in made.lanes(wanted.lanes)]
    assert names - direct <= set.union(*lanes)
    assert all(names & lane for lane in lanes), "a ladder was not used"
    # In ticks of 125 ms; the delays of one use have none.
    served = {f"{made.direct}.{delay}ms" for delay in (500, 1250, 1750)}
    assert direct == (served if wanted.queue_per_delay else set())


def test_a_delay_whose_queue_is_pruned_walks_the_levels(connect, collect, topology):
    connection = connect(binary_delay={"queue_per_delay": True})
    queue = declare(connection)
    for _ in range(2):
        publish(connection, 400)
    collect(connection, [queue], 2)

    operator = connect("amqp").default_channel
    operator.queue_delete(f"{topology.direct}.500ms")
    sent = time.time()
    publish(connection, 400, "after")

    (arrival,) = collect(connection, [queue], 1)
    assert arrival.body == "after"
    assert arrival.at - sent >= 0.4


def test_a_delay_with_a_queue_of_its_own_leads_to_a_queue_with_a_relay(connect, collect, topology):
    if topology.queue_type == "classic":
        pytest.skip("there are relays beside quorum queues only")
    connection = connect(binary_delay={"queue_per_delay": True})
    arguments = {"x-max-length": 100, "x-overflow": "reject-publish"}
    queue = Queue("q", queue_arguments=arguments, channel=connection.default_channel)
    queue.declare()
    sent = time.time()
    # The first walks down the levels, the others wait in a queue of their own.
    for _ in range(3):
        publish(connection, 400)

    arrivals = collect(connection, [queue], 3)
    assert all(arrival.at - sent >= 0.4 for arrival in arrivals)


def test_while_queues_are_pruned_none_is_made(connect, collect, topology, vhost):
    connection = connect(binary_delay={"queue_per_delay": True})
    queue = declare(connection)
    lock = f"{topology.direct}.lock"
    tool = connect("amqp").default_channel
    tool.queue_declare(lock, exclusive=True)

    for _ in range(3):
        publish(connection, 400)

    assert len(collect(connection, [queue], 3)) == 3
    assert f"{topology.direct}.500ms" not in {row["name"] for row in vhost.queues()}
    tool.queue_delete(lock)
    publish(connection, 400)
    assert len(collect(connection, [queue], 1)) == 1
    assert f"{topology.direct}.500ms" in {row["name"] for row in vhost.queues()}


def test_a_queue_that_cannot_be_made_leaves_no_lock_behind(connect, topology):
    connection = connect(binary_delay={"queue_per_delay": True}, confirm_publish=True)
    declare(connection)
    publish(connection, 400)
    other = connect("amqp").default_channel
    other.exchange_delete(topology.direct)

    publish(connection, 400)

    other.queue_declare(f"{topology.direct}.lock", exclusive=True)


def test_two_ladders_live_side_by_side_and_the_old_one_drains(connect, collect, vhost):
    old, new = connect(), connect(binary_delay={"radix": 4, "layout": "skip"})
    queue = declare(old)

    publish(old, 1500, "old")
    publish(new, 700, "new")

    # In which order, depends on how long the new ladder took to declare.
    assert {arrival.body for arrival in collect(new, [queue], 2)} == {"new", "old"}
