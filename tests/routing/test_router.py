"""Decisions of one connection, and of several beside each other, without a broker."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from kombu_binary_delay import AddressError, DelayError, Settings, Topology, TopologyError
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.envelope import HEADER
from kombu_binary_delay.ladder.parts import Binding, Exchange, Part, Queue
from kombu_binary_delay.routing.commands import (
    Answer,
    AskTemporary,
    AskType,
    Ensure,
    Look,
    OutOfReachError,
    Pause,
    Unbind,
    Warn,
)
from kombu_binary_delay.routing.knowledge import UserBinding
from kombu_binary_delay.routing.router import LOOK_AGAIN, Router
from tests.simulated_broker import SimulatedBroker

SERVER = {"product": "RabbitMQ", "version": "4.3.0"}
NOW = 1_700_000_000_000_000
SECOND = 1_000_000
#: More than an address has room for.
LONG_KEY = "k" * 200


class Connection:
    """A router on a broker that learns of what a program does, as from the channel."""

    def __init__(self, broker: SimulatedBroker, server=SERVER, **settings) -> None:
        self.broker = broker
        self.router = Router(Settings(**settings), server)
        self.topology = self.router.topology
        self.now = NOW

    def queue(self, name, **arguments):
        arguments = {key.replace("_", "-"): value for key, value in arguments.items()}
        self.broker.declare(Part(queues=(Queue(name, tuple(arguments.items())),)))
        return self.run(self.router.declared_queue(name, arguments))

    def exchange(self, name, kind, *, through_transport=True):
        self.broker.declare(Part((Exchange(name, kind),)))
        if through_transport:
            self.router.declared_exchange(name, kind)

    def bind(self, queue, exchange, key):
        self.broker.declare(Part(bindings=(Binding(exchange, queue, key),)))
        return self.run(self.router.bound(UserBinding(exchange, queue, key, to_queue=True)))

    def bind_exchange(self, destination, source, key):
        self.broker.declare(Part(bindings=(Binding(source, destination, key, to_queue=False),)))
        return self.run(self.router.bound(UserBinding(source, destination, key, to_queue=False)))

    def look(self):
        return self.run(self.router.look(self.now))

    def consume(self):
        return self.run(self.router.consuming())

    def publish(self, key="q", exchange="", delay=SECOND, **properties):
        """Publish with a delay in microseconds; return the commands, and how to follow it."""
        message = (properties, self.now + delay, Destination(exchange, key), self.now)
        plan, done = self.router.plans.publish(*message), []
        if plan.needs:
            done = self.run(self.router.prepare(plan.needs, self.now))
            plan = self.router.plans.publish(*message, plan.lane)
        return done, plan

    def reached(self, key="q", exchange="", delay=SECOND):
        """Publish, and return the queues in which the message comes to rest, in order."""
        _, plan = self.publish(key, exchange, delay)
        headers = plan.properties["application_headers"]
        return sorted(
            rest.queue for rest in self.broker.follow(plan.exchange, [plan.routing_key], headers)
        )

    def run(self, steps):
        return self.broker.run(steps)


@pytest.fixture
def broker():
    return SimulatedBroker()


def refuse(steps, part):
    """Answer commands, and refuse those that make the bindings of this part."""
    command = next(steps)
    while True:
        made = command.part.bindings if isinstance(command, Ensure) else command.bindings
        if {*part.bindings} <= {*made}:
            command = steps.throw(TopologyError("refused"))
        else:
            command = steps.send(Answer.DONE)


def relays(broker):
    return [name for name in broker.queues if ".relay-to-queue." in name]


def test_a_warm_publish_needs_nothing(broker):
    connection = Connection(broker)
    connection.queue("q")
    connection.publish()

    done, plan = connection.publish()

    assert (done, plan.needs) == ([], frozenset())


def test_to_plan_changes_nothing_that_is_known(broker):
    connection = Connection(broker)
    known = set(connection.router.known.existing)
    message: Any = ({}, NOW + SECOND, Destination("", "q"), NOW)
    assert connection.router.plans.publish(*message) == connection.router.plans.publish(*message)
    assert connection.router.known.existing == known


@pytest.mark.parametrize(
    ("declared", "by_relay"),
    [
        ({}, False),
        ({"x_overflow": "drop-head"}, False),
        ({"x_expires": 1000}, False),
        ({"x_overflow": "reject-publish"}, True),
        ({"x_overflow": "reject-publish-dlx"}, True),
    ],
)
def test_a_queue_is_led_to_straight_only_if_it_is_known_not_to_refuse(broker, declared, by_relay):
    connection = Connection(broker)
    connection.queue("q", **declared)

    assert connection.reached() == ["q"]
    assert relays(broker) == ([connection.topology.queue_relay_name("q")] if by_relay else [])


EXPIRES = ("x-expires", 1000)


@pytest.mark.parametrize(
    ("arguments", "but", "by_relay", "times"),
    [
        ([], "", True, 1),
        ([EXPIRES], "", False, 2),
        ([], "auto-delete", False, 2),
        ([EXPIRES, ("x-overflow", "reject-publish")], "", True, 1),
        ([("x-overflow", "reject-publish")], "auto-delete", True, 1),
        ([EXPIRES], "may not ask", True, 1),
        ([EXPIRES], "named in relays", True, 0),
        ([EXPIRES], "has a relay", True, 0),
        ([EXPIRES], "has a further key", True, 0),
    ],
)
def test_a_queue_that_is_not_known_leaves_a_relay_behind_only_if_it_has_to(
    broker, arguments, but, by_relay, times
):
    broker.declare(Part(queues=(Queue("q", tuple(arguments)),)))
    connection = Connection(broker, relays=["q"] if but == "named in relays" else [])
    if but == "auto-delete":
        broker.auto_delete.add("q")
    if but == "may not ask":
        broker.untold.add("q")
    if but == "has a relay":
        broker.declare(connection.topology.base + connection.topology.queue_relay("q"))
    if but == "has a further key":
        connection.publish(application_headers={"CC": ["q"]})

    for _ in range(2):
        assert connection.reached() == ["q"]
        connection.now += LOOK_AGAIN

    assert relays(broker) == ([connection.topology.queue_relay_name("q")] if by_relay else [])
    asked = [command for command in broker.commands if isinstance(command, AskTemporary)]
    # Again only where no relay shows that it is of no use.
    assert len(asked) == times


def test_a_queue_that_is_made_anew_and_may_refuse_now_is_asked_again(broker):
    publisher = Connection(broker)
    broker.declare(Part(queues=(Queue("q", (EXPIRES,)),)))
    publisher.publish()
    broker.delete_queue("q")
    broker.declare(Part(queues=(Queue("q", (EXPIRES, ("x-overflow", "reject-publish"))),)))
    assert publisher.reached() == [publisher.topology.parking]

    publisher.now += LOOK_AGAIN

    assert publisher.reached() == ["q"]
    assert relays(broker)


@pytest.mark.parametrize("server", [SERVER, {"product": "LavinMQ", "version": "4.3.0"}], ids=str)
@pytest.mark.parametrize("queue", ["reply", "r\xe9ponse"])
def test_what_may_not_answer_as_rabbitmq_does_is_not_asked(broker, server, queue):
    broker.declare(Part(queues=(Queue(queue, (EXPIRES,)),)))
    connection = Connection(broker, server, queue_type="quorum")
    assert connection.reached(queue) == [queue]
    asked = [command for command in broker.commands if isinstance(command, AskTemporary)]
    assert len(asked) == (server == SERVER and queue.isascii())


def test_a_queue_that_the_settings_name_has_a_relay_whatever_is_known(broker):
    connection = Connection(broker, relays=("q?",))
    connection.queue("q1")
    assert connection.reached("q1") == ["q1"]
    assert relays(broker) == [connection.topology.queue_relay_name("q1")]


def test_classic_levels_lead_straight_since_they_do_not_try_again(broker):
    connection = Connection(broker, queue_type="classic")
    broker.declare(Part(queues=(Queue("q", ()),)))
    assert connection.reached() == ["q"]
    assert relays(broker) == []


def test_those_who_know_a_queue_and_those_who_do_not_never_reach_it_twice(broker):
    knows, does_not = Connection(broker), Connection(broker)
    knows.queue("q")
    for connection in (knows, does_not, knows, does_not):
        assert connection.reached() == ["q"]
    # What the first had led straight is still there, and not taken.
    assert Binding(knows.topology.to_queues, "q", "#.@..q") in broker.all_bindings()


@pytest.mark.parametrize("order", ["known first", "unknown first"])
def test_a_binding_is_repeated_straight_or_by_a_relay_and_never_both_ways(broker, order):
    knows, does_not = Connection(broker), Connection(broker)
    knows.exchange("x", "topic")
    does_not.exchange("x", "topic", through_transport=False)
    knows.queue("q")
    steps = [lambda: knows.bind("q", "x", "a.*"), lambda: does_not.bind("q", "x", "a.*")]
    for connection in (knows, does_not):
        connection.consume()
    for step in steps if order == "known first" else reversed(steps):
        step()
        assert knows.reached("a.b", "x") == ["q"]


@pytest.mark.parametrize("overflow", ["drop-head", "reject-publish"])
def test_a_queue_that_is_declared_between_two_of_its_bindings_gets_what_matches_both_once(
    broker, overflow
):
    connection = Connection(broker)
    connection.exchange("x", "topic")
    connection.consume()
    broker.declare(Part(queues=(Queue("q", (("x-overflow", overflow),)),)))
    connection.bind("q", "x", "a.*")
    connection.queue("q", x_overflow=overflow)
    connection.bind("q", "x", "*.b")

    assert connection.reached("a.b", "x") == ["q"]


def test_a_queue_that_is_made_anew_and_may_refuse_now_gets_what_others_send(broker):
    owner, publisher = Connection(broker), Connection(broker)
    for connection in (owner, publisher):
        connection.queue("q")
        connection.publish()
    broker.delete_queue("q")
    owner.run(owner.router.deleted_queue("q"))

    owner.queue("q", x_overflow="reject-publish")

    assert publisher.reached() == owner.reached() == ["q"]
    assert relays(broker)


def test_a_queue_that_is_made_anew_by_its_name_is_led_to_again_within_half_a_minute(broker):
    publisher = Connection(broker)
    broker.declare(Part(queues=(Queue("q", ()),)))
    publisher.publish()
    broker.delete_queue("q")
    broker.declare(Part(queues=(Queue("q", ()),)))
    assert publisher.reached() == [publisher.topology.parking]

    publisher.now += LOOK_AGAIN

    assert publisher.reached() == ["q"]


def test_a_level_whose_node_is_down_is_not_taken_for_deleted(broker):
    connection = Connection(broker, queue_type="classic")
    connection.queue("q")
    connection.publish()
    # That of a second, through which the message passes.
    broker.out_of_reach.add(connection.topology.levels[1].queues[0].name)
    connection.now += LOOK_AGAIN
    for publisher in (connection, connection, Connection(broker, queue_type="classic")):
        with pytest.raises(OutOfReachError):
            publisher.publish()
    broker.out_of_reach.clear()

    assert connection.reached() == ["q"]
    assert not [command for command in broker.commands if isinstance(command, Pause)]


def test_a_parking_queue_whose_node_is_down_keeps_nobody_from_the_rest(broker):
    first = Connection(broker, queue_type="classic")
    first.queue("q")
    first.exchange("x", "topic")
    first.bind("q", "x", "a.*")
    first.publish()
    broker.out_of_reach.add(first.topology.parking)
    first.now += LOOK_AGAIN
    second = Connection(broker, queue_type="classic")
    second.exchange("x", "topic")
    second.queue("late")
    second.bind("late", "x", "b.*")

    assert first.reached("a.b", "x") == ["q"]
    assert second.reached("b.b", "x") == ["late"]
    assert {warning.split(":")[0] for warning in broker.warnings} == {
        "messages that should be parked can be lost"
    }


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_a_queue_whose_node_is_down_is_bound_as_soon_as_that_is_possible(broker, queue_type):
    connection = Connection(broker, queue_type=queue_type)
    broker.declare(Part(queues=(Queue("q", ()),)))
    broker.out_of_reach.add("q")

    for _ in range(2):
        connection.publish()

    (warning,) = broker.warnings
    assert "its node is down or starting: delayed messages for it are parked" in warning
    broker.out_of_reach.clear()
    assert connection.reached() == ["q"]


def test_a_binding_to_a_queue_whose_node_is_down_is_repeated_at_the_look_after_its_return(broker):
    connection = Connection(broker)
    connection.exchange("x", "topic")
    for queue, key in (("q", "a.*"), ("other", "#")):
        connection.queue(queue)
        connection.bind(queue, "x", key)
    broker.out_of_reach.add("q")

    assert connection.reached("a.b", "x") == ["other"]
    connection.now += LOOK_AGAIN
    assert connection.reached("a.b", "x") == ["other"]
    assert (
        len([warning for warning in broker.warnings if "'q' until it can be bound" in warning]) == 1
    )
    broker.out_of_reach.clear()
    connection.now += LOOK_AGAIN

    assert connection.reached("a.b", "x") == ["other", "q"]


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_a_parking_exchange_made_while_its_queue_is_down_is_whole_after_its_return(
    broker, queue_type
):
    connection = Connection(broker, queue_type=queue_type)
    connection.queue("q")
    connection.publish()
    parking = connection.topology.parking
    broker.delete_exchange(parking)
    broker.out_of_reach.add(parking)
    connection.now += LOOK_AGAIN
    assert connection.reached() == ["q"]
    # What does not exist is no sign that somebody deletes the ladder.
    connection.publish("nowhere")
    assert "'nowhere' does not exist" in broker.warnings[-1]
    broker.out_of_reach.clear()
    connection.now += LOOK_AGAIN

    for publisher in (connection, Connection(broker, queue_type=queue_type)):
        assert publisher.reached("nowhere") == [parking]


def test_a_look_that_finds_all_declares_nothing_of_the_ladder(broker):
    connection = Connection(broker)
    connection.queue("q")
    connection.publish()
    connection.now += LOOK_AGAIN

    done, _ = connection.publish()

    assert [type(command) for command in done] == [Look, Look]
    assert connection.topology.delivery in {way.destination for way in done[0].bindings}
    assert done[1] == Look(bindings=connection.topology.to_queue("q").bindings)


def test_a_new_connection_asks_whether_the_levels_exist_and_trusts_the_answer(broker):
    first, second = Connection(broker), Connection(broker)
    for connection in (first, second):
        connection.queue("q")
    first.publish(delay=60 * SECOND)

    done, _ = second.publish(delay=60 * SECOND)

    assert not [
        command
        for command in done
        if isinstance(command, Ensure)
        and command.part.queues
        and (command.part != second.topology.base)
    ]


def test_whoever_makes_a_level_binds_the_one_above_to_it(broker):
    connection = Connection(broker)
    connection.queue("q")
    connection.publish(delay=60 * SECOND)
    broker.delete_exchange(connection.topology.level_name(1))

    # Another one, that needs no more than the two lowest levels.
    other = Connection(broker)
    other.queue("q")
    other.publish(delay=SECOND)

    assert connection.reached(delay=60 * SECOND) == ["q"]


@pytest.mark.parametrize(("kind", "name"), [("queue", ("nowhere", "")), ("exchange", ("", "x"))])
def test_a_publish_to_nowhere_is_parked_and_warned_of_once(broker, kind, name):
    connection = Connection(broker)
    for _ in range(3):
        assert connection.reached(*name) == [connection.topology.parking]
    (warning,) = broker.warnings
    assert f"the {kind} {name[0] or name[1]!r} does not exist: delayed messages" in warning


def test_an_exchange_that_nobody_here_declared_is_asked_for_its_type_once(broker):
    owner, publisher = Connection(broker), Connection(broker)
    owner.exchange("h", "headers")
    for _ in range(2):
        done, _ = publisher.publish("k", "h")
    assert not done
    assert [command for command in broker.commands if isinstance(command, AskType)] == [
        AskType("h")
    ]
    assert publisher.topology.exchange_relay_name("h") in broker.queues


def test_a_long_key_reaches_a_direct_exchange_that_nobody_here_declared(broker):
    owner, publisher = Connection(broker), Connection(broker)
    owner.exchange("x", "direct")
    owner.queue("q")
    owner.bind("q", "x", LONG_KEY)
    owner.consume()
    for _ in range(2):
        assert publisher.reached(LONG_KEY, "x") == ["q"]


@pytest.mark.parametrize(
    ("kind", "settings"), [("topic", {}), (None, {}), ("direct", {"declare": "never"})]
)
def test_a_long_key_is_refused_for_an_exchange_that_may_be_a_topic_exchange(broker, kind, settings):
    if kind:
        Connection(broker).exchange("x", kind)
    connection = Connection(broker, **settings)
    for _ in range(2):
        with pytest.raises(AddressError, match="use a shorter key"):
            connection.publish(LONG_KEY, "x")


def test_a_long_key_is_refused_where_a_topic_exchange_behind_would_not_find_its_words(broker):
    connection = Connection(broker)
    for name, kind in (("f", "fanout"), ("d", "direct"), ("t", "topic")):
        connection.exchange(name, kind)
    connection.bind_exchange("d", "f", "")
    connection.bind_exchange("t", "d", LONG_KEY)
    connection.bind_exchange("t", "d", "k")
    connection.queue("q")
    connection.bind("q", "t", "#")

    assert connection.reached("k", "f") == ["q"]
    for key, headers in ((LONG_KEY, {}), ("k", {"CC": [LONG_KEY]}), ("k", {"BCC": [LONG_KEY]})):
        with pytest.raises(AddressError, match="use a shorter key"):
            connection.publish(key, "f", application_headers=headers)


def test_a_type_that_reads_keys_in_its_own_way_is_refused_before_anything_is_declared(broker):
    connection = Connection(broker)
    connection.router.declared_exchange("hash", "x-consistent-hash")
    with pytest.raises(TopologyError, match="of the type 'x-consistent-hash'"):
        connection.publish("k", "hash")
    assert not broker.commands


@pytest.mark.parametrize(
    ("key", "before", "after"), [("k", "x-hash", "direct"), (LONG_KEY, "topic", "fanout")]
)
def test_an_exchange_that_is_of_another_type_by_now_is_refused_no_longer(
    broker, key, before, after
):
    owner, publisher = Connection(broker), Connection(broker)
    owner.exchange("x", before)
    with pytest.raises((AddressError, TopologyError)):
        publisher.publish(key, "x")
    broker.delete_exchange("x")
    owner.exchange("x", after)
    owner.queue("q")
    owner.bind("q", "x", key)
    owner.consume()

    with pytest.raises((AddressError, TopologyError)):
        publisher.publish(key, "x")
    publisher.now += LOOK_AGAIN
    assert publisher.reached(key, "x") == ["q"]


def test_an_unbound_queue_loses_both_ways_of_its_binding(broker):
    connection = Connection(broker)
    connection.exchange("x", "direct")
    connection.queue("q")
    connection.consume()
    connection.bind("q", "x", "k")
    broker.unbind(Binding("x", "q", "k"))

    done = connection.run(connection.router.unbound(UserBinding("x", "q", "k", to_queue=True)))

    assert len([command for command in done if isinstance(command, Unbind)]) == 2
    assert connection.reached("k", "x") == [connection.topology.parking]


@pytest.mark.parametrize("forgets", ["unbind", "delete"])
def test_bindings_that_differ_in_arguments_are_one_until_the_last_is_gone(broker, forgets):
    connection = Connection(broker)
    connection.exchange("x", "direct")
    connection.queue("q")
    connection.consume()
    connection.bind("q", "x", "k")
    binding = UserBinding("x", "q", "k", to_queue=True)
    connection.run(connection.router.bound(binding, {"a": 1}))
    broker.unbind(Binding("x", "q", "k"))

    if forgets == "delete":
        connection.run(connection.router.deleted_queue("q"))
        assert not connection.router.known.bindings
        return
    assert connection.run(connection.router.unbound(binding, {})) == []
    assert connection.reached("k", "x") == ["q"]
    connection.run(connection.router.unbound(binding, {"a": 1}))
    assert connection.reached("k", "x") == [connection.topology.parking]


@pytest.mark.parametrize("exists", [True, False])
def test_a_message_without_an_id_stays_in_its_lane_while_the_lane_is_made(broker, exists):
    connection = Connection(broker, lanes=3)
    if exists:
        connection.queue("q")
    lanes = set()
    for _ in range(6):
        _, plan = connection.publish()
        lanes.add(plan.exchange)
        assert plan.exchange in broker.exchanges
    assert len(lanes) == 3


def test_to_check_a_message_takes_no_lane(broker):
    router = Connection(broker, lanes=2).router
    message: tuple[Any, ...] = ({}, NOW + SECOND, Destination("", "q"), NOW)
    lanes = []
    for _ in range(4):
        router.plans.check(*message)
        lanes.append(router.plans.publish(*message).lane)
    assert sorted(lanes) == [0, 0, 1, 1]


def test_where_declare_is_never_nothing_is_asked_for(broker):
    connection = Connection(broker, declare="never")
    connection.queue("q")
    connection.bind("q", "amq.topic", "#")
    done, plan = connection.publish()
    assert (done, plan.needs, broker.commands) == ([], frozenset(), [])
    assert plan.exchange == connection.topology.level_name(1)


def test_where_declare_is_never_what_is_missing_is_asked_for_until_it_is_there(broker):
    connection = Connection(broker, declare="never")
    connection.router.known.lost()
    with pytest.raises(TopologyError, match="make the ladder of these settings"):
        connection.publish()
    Connection(broker).publish()
    assert [connection.publish()[0] != [] for _ in range(2)] == [True, False]
    # Of that, nothing follows for another level.
    with pytest.raises(TopologyError, match="make the ladder of these settings"):
        connection.publish(delay=3600 * SECOND)


def test_a_refusal_amid_a_preparation_leaves_what_was_refused_unknown(broker):
    """As the executor does, the refusal is thrown in where the command was asked for."""
    connection = Connection(broker)
    connection.queue("q")
    plan = connection.router.plans.publish({}, NOW + SECOND, Destination("", "q"), NOW)
    steps = connection.router.prepare(plan.needs, NOW)

    with pytest.raises(TopologyError):
        refuse(steps, connection.topology.to_queue("q"))

    assert connection.router.plans.publish({}, NOW + SECOND, Destination("", "q"), NOW).needs


@pytest.mark.parametrize(
    ("exchange", "key"),
    [
        ("celery_delayed_delivery", "0." * 27 + "1.image.png"),
        ("celery_delayed_3", "0." * 27 + "1.image.png"),
        ("nsb.v2.delay-level-04", "0." * 27 + "1.image.png"),
        # The key is also the name of another queue that this connection declares.
        ("celery_delayed_delivery", "0." * 27 + "1.orders"),
    ],
)
def test_what_comes_by_a_foreign_ladder_is_published_again_to_the_queue_it_came_from(
    broker, exchange, key
):
    connection = Connection(broker)
    connection.queue("images")
    connection.queue("orders")

    delivery = connection.router.deliveries.received(
        exchange, key, {"application_headers": {}}, "images"
    )

    assert delivery is not None
    assert delivery.destination == ("", "images")
    assert connection.reached(*reversed(delivery.destination)) == ["images"]


@pytest.mark.parametrize("exchange", ["other.v2.delivery", "other.v2-125ms-2x31.level-00"])
def test_what_came_by_the_ladder_of_another_namespace_is_published_again_by_our_own(
    broker, exchange
):
    connection = Connection(broker)
    headers = {"x-binary-delay": {"due": 1}}

    delivery = connection.router.deliveries.received(
        exchange, "01.@..q", {"application_headers": headers}, "elsewhere"
    )

    assert delivery is not None
    assert (delivery.destination, delivery.properties["application_headers"]) == (("", "q"), {})


def test_what_came_by_no_ladder_is_left_as_it_is(broker):
    connection = Connection(broker)
    assert (
        connection.router.deliveries.received("x", "k", {"application_headers": {"a": 1}}, "q")
        is None
    )


@pytest.mark.parametrize("name", ["", "a", "b", "c"])
def test_jitter_that_the_ladder_cannot_hold_is_refused_whatever_share_of_it_a_message_has(
    broker, name
):
    router = Connection(broker, levels=3, radix=4).router
    longest = router.topology.ladder.maximum
    asked = {"x-delay": longest - 1000, "x-delay-jitter": 1000}
    assert (router.due(asked, NOW, name) or 0) <= NOW + longest * 1000
    with pytest.raises(DelayError, match=r"x-delay-jitter of 1001 ms on top of .* use less jitter"):
        router.due({**asked, "x-delay-jitter": 1001}, NOW, name)


def test_a_delay_that_no_queue_can_hold_takes_the_levels_each_time(broker):
    connection = Connection(broker, tick=1000, queue_per_delay=True)
    connection.queue("q")
    years = 12 * 365 * 86_400 * SECOND
    for _ in range(3):
        connection.publish(delay=years)
    assert not [name for name in broker.queues if ".direct." in name]


def test_a_mailbox_gets_no_relay_for_the_setting_relays(broker):
    """Given: a server-named queue, which ends with its connection and would leave it behind."""
    connection = Connection(broker, relays=["*"])
    broker.declare(Part(queues=(Queue("amq.gen-1", ()), Queue("q", ()))))
    connection.exchange("events", "fanout")
    connection.run(connection.router.declared_queue("amq.gen-1", {}, mailbox=True))
    connection.run(connection.router.declared_queue("q", {}))
    connection.bind("amq.gen-1", "events", "")

    assert connection.reached(exchange="events") == ["amq.gen-1"]
    assert connection.reached("q") == ["q"]
    assert relays(broker) == [connection.topology.queue_relay_name("q")]


@pytest.mark.parametrize("ladder", ["celery", "nservicebus"])
def test_a_dead_letter_of_what_came_by_a_foreign_ladder_is_as_it_was_published(broker, ladder):
    connection = Connection(broker, foreign_ladder=ladder)
    connection.queue("orders")
    _, plan = connection.publish("orders", application_headers={"mine": 1})
    mine = {"queue": "orders", "exchange": "", "reason": "rejected"}
    passed = {"queue": f"{connection.topology.level_name(3)}", "exchange": "", "reason": "expired"}
    headers = {**plan.properties["application_headers"], "x-death": [mine, passed]}
    properties = {**plan.properties, "application_headers": headers}

    delivery = connection.router.deliveries.received("dlx", plan.routing_key, properties, "dead")

    assert delivery is not None
    assert delivery.destination == Destination("dlx", "orders")
    assert delivery.properties["application_headers"] == {"mine": 1, "x-death": [mine]}


@pytest.mark.parametrize("ladder", ["celery", "nservicebus"])
def test_a_connection_with_a_foreign_ladder_reads_what_came_by_ours(broker, ladder):
    ours, theirs = Connection(broker), Connection(broker, foreign_ladder=ladder)
    for exchange, published in (
        (ours.topology.delivery, Destination("", "orders")),
        ("events", Destination("events", "orders")),
    ):
        _, plan = ours.publish("orders", published.exchange)
        got = theirs.router.deliveries.received(
            exchange, plan.routing_key, plan.properties, "orders"
        )
        assert got is not None
        assert (got.destination, got.properties["application_headers"]) == (published, {})


@pytest.mark.parametrize("name", ["q" * 254, "orders.*", "#"])
def test_a_queue_that_a_foreign_ladder_cannot_lead_to_is_named_and_does_not_end_the_program(
    broker, name
):
    connection = Connection(broker, foreign_ladder="celery")
    connection.queue("orders.eu")
    connection.queue(name)
    connection.consume()

    assert [warning for warning in broker.warnings if repr(name) in warning]
    assert connection.reached("orders.eu") == ["orders.eu"]
    with pytest.raises(AddressError):
        connection.publish(name)


@pytest.mark.parametrize("kind", ["headers", "x-consistent-hash"])
def test_no_relay_is_looked_for_where_none_is_made(broker, kind):
    connection = Connection(broker)
    connection.queue("q")
    connection.exchange("events", kind)
    broker.declare(Part(queues=(Queue("theirs", ()),)))
    connection.bind("theirs", "events", "1")
    connection.publish("q")

    connection.now += LOOK_AGAIN
    done, _ = connection.publish("q")

    assert not [command for command in done if isinstance(command, Pause)]


@pytest.mark.parametrize("is_down", [False, True])
def test_a_copy_for_a_queue_that_cannot_be_bound_is_not_promised(broker, is_down):
    connection = Connection(broker)
    connection.queue("q")
    if is_down:
        broker.declare(Part(queues=(Queue("late", ()),)))
        broker.out_of_reach.add("late")

    first, _ = connection.publish("late")
    second, _ = connection.publish("q", application_headers={"CC": ["late"]})

    parked, dropped = (command.text for command in first + second if isinstance(command, Warn))
    assert "are parked" in parked
    assert "may not reach this one" in dropped


@pytest.mark.parametrize("chain", [["f", "d"], ["f", "f2", "t"], ["h2", "f", "d"]], ids=" ".join)
def test_what_reads_keys_anywhere_behind_a_headers_exchange_is_named(broker, chain):
    kinds = {"h": "headers", "f": "fanout", "d": "direct", "t": "topic"}
    connection = Connection(broker)
    connection.queue("q")
    for name in ("h", *chain):
        connection.exchange(name, kinds[name[0]])
    for source, destination in pairwise(("h", *chain)):
        connection.bind_exchange(destination, source, "#")
    connection.bind("q", chain[-1], "k")

    with pytest.raises(TopologyError, match=f"exchange 'h' leads to '{chain[-1]}', which reads"):
        connection.publish("k", "h")
    connection.exchange("alone", "topic")
    connection.publish("k", "alone")


def test_a_headers_exchange_beside_the_way_of_a_message_is_warned_of_and_refuses_nothing(broker):
    connection = Connection(broker)
    connection.queue("q")
    for name, kind in (("x", "topic"), ("h", "headers"), ("f", "fanout"), ("d", "direct")):
        connection.exchange(name, kind)
    connection.bind("q", "x", "mine")
    connection.bind_exchange("h", "x", "audit.#")
    connection.bind_exchange("f", "h", "")
    connection.bind_exchange("d", "f", "")
    assert connection.reached("mine", "x") == ["q"]
    assert ["does not reach what is bound to 'd'" in warning for warning in broker.warnings] == [
        True
    ]


@pytest.mark.parametrize("settings", [{}, {"declare": "never"}], ids=str)
def test_a_direct_reply_to_address_is_refused_also_among_further_keys(broker, settings):
    connection = Connection(broker, **settings)
    address = "amq.rabbitmq.reply-to.g1h2"
    for key, headers in ((address, {}), ("q", {"CC": [address]})):
        with pytest.raises(TopologyError, match="is a direct reply-to address"):
            connection.publish(key, application_headers=headers)


def test_no_queue_that_ends_by_itself_has_a_relay_by_the_setting(broker):
    connection = Connection(broker, relays=["*"])
    connection.queue("mail")
    for number in range(3):
        connection.run(connection.router.declared_queue(f"reply-{number}", {}, auto_delete=True))
        broker.declare(Part(queues=(Queue(f"reply-{number}", ()),)))
        connection.publish(f"reply-{number}")
    connection.publish("mail")
    assert relays(broker) == [connection.topology.queue_relay_name("mail")]


@pytest.mark.parametrize(
    ("queue_type", "words"),
    [("quorum", "dead-letters what it rejects"), ("classic", "are then lost")],
)
def test_a_queue_that_dead_letters_what_it_rejects_is_warned_of(broker, queue_type, words):
    Connection(broker, queue_type=queue_type).queue("q", x_overflow="reject-publish-dlx")
    [warning] = broker.warnings
    assert words in warning


def test_the_deaths_of_what_was_put_off_have_the_key_of_the_publish(broker):
    """Given: it was delayed again, to its queue, and then passed two of the user's dead letters."""
    connection = Connection(broker)
    connection.queue("q")
    _, plan = connection.publish("q")
    headers = plan.properties["application_headers"]
    packed = {**headers[HEADER], "as": ["orders", "new"]}
    mine = {
        "queue": "q",
        "exchange": connection.topology.delivery,
        "routing-keys": [plan.routing_key],
    }
    waited = {**mine, "queue": "retry", "exchange": "dlx"}
    headers = {**headers, HEADER: packed, "x-death": [waited, mine]}
    properties = {**plan.properties, "application_headers": headers}

    delivery = connection.router.deliveries.received("dlx", plan.routing_key, properties, "dead")

    assert delivery is not None
    assert delivery.properties["application_headers"]["x-death"] == [
        {**waited, "routing-keys": ["new"]},
        {**mine, "exchange": "orders", "routing-keys": ["new"]},
    ]


def test_the_deaths_behind_the_ladder_have_the_names_of_the_publish(broker):
    connection = Connection(broker)
    connection.exchange("orders", "topic")
    connection.queue("q")
    connection.bind("q", "orders", "#")
    _, plan = connection.publish("new", "orders", application_headers={"CC": ["copy"]})
    level = connection.topology.level_name(0)
    headers = plan.properties["application_headers"]
    mine = {
        "queue": "q",
        "exchange": level,
        "routing-keys": [plan.routing_key, *headers["CC"]],
        "reason": "rejected",
    }
    waited = {**mine, "queue": "retry", "exchange": "dlx", "routing-keys": [plan.routing_key]}
    shops = {**mine, "exchange": Topology(namespace="shop").level_name(0)}
    earlier = {
        "queue": "before",
        "exchange": "theirs",
        "routing-keys": ["new"],
        "reason": "expired",
    }
    deaths = {
        "x-death": [mine, waited, shops, earlier],
        "x-last-death-exchange": level,
        "x-first-death-exchange": "theirs",
    }
    properties = {**plan.properties, "application_headers": {**headers, **deaths}}

    delivery = connection.router.deliveries.received("dlx", plan.routing_key, properties, "dead")

    named = {**mine, "exchange": "orders", "routing-keys": ["new", "copy"]}
    assert delivery is not None
    assert delivery.properties["application_headers"] == {
        "CC": ["copy"],
        "x-death": [named, {**waited, "routing-keys": ["new"]}, named, earlier],
        "x-last-death-exchange": "orders",
        "x-first-death-exchange": "theirs",
    }
