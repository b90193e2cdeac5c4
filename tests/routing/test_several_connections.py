"""What one connection makes, and another one that knows more, or less, relies on."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from itertools import chain, repeat
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kombu_binary_delay import Settings
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.parts import Binding, Part, Queue
from kombu_binary_delay.publishing.way_out import WayOut
from kombu_binary_delay.routing.checks import MAX_RENEWED
from kombu_binary_delay.routing.commands import Ensure, Look, Unbind
from kombu_binary_delay.routing.knowledge import Shared, UserBinding
from kombu_binary_delay.routing.router import LOOK_AGAIN, Router
from kombu_binary_delay.routing.routes import MAX_AT_ONCE
from tests.routing.test_router import NOW, SECOND, SERVER, Connection, relays
from tests.simulated_broker import SimulatedBroker

if TYPE_CHECKING:
    from collections.abc import Callable

    from kombu_binary_delay.routing.commands import Command


@pytest.fixture
def broker():
    return SimulatedBroker()


@pytest.mark.parametrize("maker", ["owner", "another"])
def test_a_way_to_an_exchange_is_back_though_another_made_the_delivery_exchange_again(
    broker, maker
):
    owner, other = Connection(broker), Connection(broker)
    if maker == "another":
        # So the owner looks at its first message's own way only.
        Connection(broker).publish()
    owner.exchange("x", "topic")
    owner.queue("q")
    owner.bind("q", "x", "k")
    other.queue("r")
    assert (owner.reached("k", "x"), other.reached("r")) == (["q"], ["r"])
    broker.delete_exchange(owner.topology.delivery)
    other.now += LOOK_AGAIN
    assert other.reached("r") == ["r"]
    owner.now += LOOK_AGAIN
    assert owner.reached("k", "x") == ["q"]


def test_a_binding_of_an_exchange_named_as_a_kind_of_ours_is_not_taken_for_that(broker):
    connection = Connection(broker)
    connection.exchange("mirror", "topic")
    connection.queue("q")
    connection.bind("q", "mirror", "k")
    assert connection.reached("k", "mirror") == ["q"]
    connection.now += LOOK_AGAIN
    done, _ = connection.publish("k", "mirror")
    led = {
        way.destination
        for command in done
        if isinstance(command, Ensure)
        for way in command.part.bindings
    }
    topology = connection.topology
    assert led == {topology.mirror_name("mirror"), "q"}
    (look,) = (command for command in done if isinstance(command, Look) and command.bindings)
    assert topology.delivery in {way.destination for way in look.bindings}


def test_a_mirror_that_was_deleted_is_never_made_again_without_its_bindings(broker):
    """Given: a connection that has not delayed anything yet, so it has not looked."""
    owner, late = Connection(broker), Connection(broker)
    for connection, queue in ((owner, "q"), (late, "r")):
        connection.exchange("x", "topic")
        connection.queue(queue)
        connection.bind(queue, "x", "k")
        connection.consume()
    owner.publish("k", "x")
    broker.delete_exchange(owner.topology.mirror_name("x"))
    late.publish("r")
    for connection in (owner, late):
        connection.now += LOOK_AGAIN
        connection.publish("k", "x")
    assert owner.reached("k", "x") == ["q", "r"]


@pytest.mark.parametrize("refusing", ["a", "b", "c", "abc", ""])
def test_every_queue_of_a_message_with_further_keys_gets_it_once(broker, refusing):
    """Also those that are led to straight, beside one that has a relay."""
    owner, publisher = Connection(broker), Connection(broker)
    for name in "abc":
        arguments = {"x_overflow": "reject-publish"} if name in refusing else {}
        owner.queue(name, **arguments)
        publisher.queue(name, **arguments)
    owner.consume()
    headers = {"CC": ["b"], "BCC": ["c"]}

    for _ in range(2):
        _, plan = publisher.publish("a", application_headers=headers)
        packed = plan.properties["application_headers"]
        keys = [plan.routing_key, *packed["CC"]]
        rests = broker.follow(plan.exchange, keys, packed)
        assert sorted(rest.queue for rest in rests) == ["a", "b", "c"]


def test_two_programs_that_bind_a_queue_at_once_leave_a_way_to_it(broker):
    knows, does_not = Connection(broker), Connection(broker)
    knows.queue("q")
    for connection in (knows, does_not):
        connection.exchange("x", "topic")
        connection.consume()
    broker.declare(Part(bindings=(Binding("x", "q", "k"),)))

    halfway = []
    for connection in (knows, does_not):
        steps = connection.router.bound(UserBinding("x", "q", "k", to_queue=True))
        command = next(steps)
        while not (isinstance(command, Unbind) and "the binding" in command.what):
            command = steps.send(broker.do(command))
        halfway.append((steps, command))
    for steps, command in halfway:
        with suppress(StopIteration):
            while True:
                command = steps.send(broker.do(command))  # noqa: PLW2901 - the next one

    assert knows.reached("k", "x") == ["q"]


def test_a_mailbox_that_is_bound_has_no_relay_left_behind(broker):
    """Its connection knows its arguments; each program may make a new one at each start."""
    connection = Connection(broker)
    connection.consume()
    broker.declare(Part(queues=(Queue("amq.gen-1", ()),)))
    connection.run(connection.router.declared_queue("amq.gen-1", {}, mailbox=True))
    connection.bind("amq.gen-1", "amq.fanout", "")

    assert connection.reached("", "amq.fanout") == ["amq.gen-1"]
    assert relays(broker) == []
    # Nobody else addresses it.
    assert not [
        binding
        for binding in broker.all_bindings()
        if binding.source == connection.topology.to_queues
    ]


def test_a_connection_that_binds_nothing_notices_what_is_deleted_of_the_levels(broker):
    """It delays to an exchange, on levels that others have made."""
    owner, publisher = Connection(broker), Connection(broker)
    for connection in (owner, publisher):
        connection.exchange("x", "direct")
    owner.queue("q")
    owner.bind("q", "x", "k")
    owner.consume()
    owner.publish("k", "x", delay=60 * SECOND)
    publisher.publish("k", "x", delay=60 * SECOND)
    topology = publisher.topology
    levels = topology.levels[: len(topology.ladder.digits(60_000))]
    parts = topology.base + sum(levels[1:], levels[0])
    for name in (queue.name for queue in parts.queues):
        broker.delete_queue(name)
        publisher.now += LOOK_AGAIN

        assert publisher.reached("k", "x", delay=60 * SECOND) == ["q"], name
        assert name in broker.queues


def test_the_ways_to_many_queues_are_declared_again_a_few_after_each_look(broker):
    connection = Connection(broker)
    names = [f"q{number}" for number in range(3 * MAX_RENEWED)]
    for name in names:
        connection.queue(name)
        connection.publish(name)
    again: list[str] = []

    for _ in range(3):
        connection.now += LOOK_AGAIN
        done = [command for name in names for command in connection.publish(name)[0]]
        made = [command.part if isinstance(command, Ensure) else command for command in done]
        ways = [way.destination for part in made for way in part.bindings]
        renewed = [way for way in ways if way in names]
        assert len(renewed) <= MAX_RENEWED
        again += renewed

    assert {*again} == {*names}


def test_what_only_the_first_message_passed_is_looked_at_again(broker):
    Connection(broker).publish(delay=3600 * SECOND)
    connection = Connection(broker)
    connection.queue("q")
    connection.publish(delay=3600 * SECOND)
    _, queues, _ = connection.topology.passed(connection.topology.ladder.digits(3_600_000))
    entry = queues[-1]
    broker.delete_queue(entry)

    connection.now += LOOK_AGAIN
    # It is this one before which all is looked at that is known.
    assert connection.reached(delay=SECOND) == ["q"]
    assert connection.reached(delay=3600 * SECOND) == ["q"]


def test_the_ways_past_direct_queues_are_whole_though_one_with_fewer_levels_made_them_again(broker):
    high, low = (Connection(broker, queue_per_delay=True) for _ in range(2))
    for connection, seconds in ((high, 3600), (low, 1)):
        connection.queue("q")
        for _ in range(2):
            connection.publish(delay=seconds * SECOND)
            connection.now += LOOK_AGAIN
    broker.delete_exchange(high.topology.direct_fallback)
    assert low.reached(delay=SECOND) == ["q"]

    high.now += LOOK_AGAIN
    assert high.reached(delay=3601 * SECOND) == ["q"]


def test_a_queue_that_does_not_exist_leaves_no_relay_behind(broker):
    connection = Connection(broker)
    assert connection.reached("nowhere") == [connection.topology.parking]
    assert relays(broker) == []


@pytest.mark.parametrize("overflow", ["reject-publish", "drop-head"])
def test_a_queue_that_is_made_anew_gets_only_what_it_is_bound_for(broker, overflow):
    """Its relay outlives it, and what waits there."""
    owner = Connection(broker)
    owner.exchange("x", "direct")
    owner.consume()
    owner.queue("q", x_overflow="reject-publish")
    owner.bind("q", "x", "k")
    broker.delete_queue("q")
    owner.run(owner.router.deleted_queue("q"))
    owner.queue("q", x_overflow=overflow)

    assert owner.reached("k", "x") == [owner.topology.parking]
    assert owner.reached("q") == ["q"]
    owner.bind("q", "x", "k")
    assert owner.reached("k", "x") == ["q"]


def test_a_binding_of_an_exchange_that_is_gone_is_not_repeated(broker):
    connection = Connection(broker)
    connection.exchange("x", "direct", through_transport=False)
    connection.queue("q")
    connection.bind("q", "x", "k")
    broker.delete_exchange("x")

    connection.consume()

    assert connection.topology.mirror_name("x") not in broker.exchanges


@pytest.mark.parametrize("gone", ["x", "y"])
def test_an_exchange_that_another_connection_has_deleted_is_not_led_to_again(broker, gone):
    """The other one has removed its mirror as well, which a look of the first then misses."""
    owner, other = Connection(broker), Connection(broker)
    for name in "xy":
        owner.exchange(name, "direct")
    owner.queue("q")
    owner.bind("q", "y", "k")
    owner.bind_exchange("y", "x", "k")
    assert owner.reached("k", "x") == ["q"]
    _, waiting = owner.publish("k", gone)
    broker.delete_exchange(gone)
    other.run(other.router.deleted_exchange(gone))

    owner.now += LOOK_AGAIN
    owner.publish("q")

    topology = owner.topology
    assert topology.mirror_name(gone) not in broker.exchanges
    rests = broker.follow(waiting.exchange, [waiting.routing_key], {})
    assert [rest.queue for rest in rests] == [topology.parking]
    assert owner.reached("q") == ["q"]


@pytest.mark.parametrize("through_transport", [True, False])
@pytest.mark.parametrize("kind", ["fanout", "topic"])
def test_a_headers_exchange_that_is_of_another_type_by_now_gets_a_message_once(
    broker, kind, through_transport
):
    publisher, other = Connection(broker), Connection(broker)
    other.exchange("e", "headers")
    publisher.publish("k", "e")
    broker.delete_exchange("e")
    if through_transport:
        other.run(other.router.deleted_exchange("e"))

    consumer = Connection(broker)
    consumer.exchange("e", kind)
    consumer.queue("q")
    consumer.bind("q", "e", "#")
    consumer.consume()
    publisher.now += LOOK_AGAIN

    assert publisher.reached("k", "e") == ["q"]
    assert Connection(broker).reached("k", "e") == ["q"]


class Interfered(SimulatedBroker):
    """A broker on which somebody deletes exchanges before a command, once."""

    before: Callable[[Command], bool] | None = None
    gone: tuple[str, ...] = ()

    def do(self, command):
        if self.before is not None and self.before(command):
            self.before = None
            for name in self.gone:
                self.delete_exchange(name)
        return super().do(command)


def test_levels_that_lose_what_is_below_while_they_are_made_are_made_again():
    broker = Interfered()
    connection = Connection(broker)
    connection.queue("q")
    ladder = connection.topology
    broker.gone = (ladder.delivery,)
    broker.before = lambda command: isinstance(command, Ensure) and "the levels" in command.what

    assert connection.reached(delay=60 * SECOND) == ["q"]


def test_levels_that_lose_what_is_below_after_the_first_look_at_them_are_made_again():
    broker = Interfered()
    Connection(broker).publish()
    connection = Connection(broker)
    connection.queue("q", x_overflow="reject-publish")
    broker.gone = (connection.topology.delivery,)
    broker.before = lambda command: isinstance(command, Ensure) and "the way" in command.what

    assert connection.reached() == ["q"]


def test_what_only_the_rest_of_a_delay_passes_is_looked_at_too(broker, monkeypatch):
    """The first look takes longer than a tick."""
    Connection(broker).publish(delay=60 * SECOND)
    connection = Connection(broker)
    connection.queue("q")
    topology, tick = connection.topology, connection.topology.ladder.tick * 1000
    _, left, _ = topology.passed(topology.ladder.digits((60 * SECOND - tick) / 1000))
    _, at_first, _ = topology.passed(topology.ladder.digits(60_000))
    for name in {*left} - {*at_first}:
        broker.delete_queue(name)
    times = chain([connection.now], repeat(connection.now + tick))
    monkeypatch.setattr("time.time_ns", lambda: next(times) * 1000)
    wire: Any = SimpleNamespace(answered_within=nullcontext)
    no_generations: Any = None
    way_out = WayOut(wire, connection.router, broker, None, no_generations)

    out = way_out.ready_at({}, Destination("", "q"), connection.now + 60 * SECOND)

    headers = out.properties["application_headers"]
    (rest,) = broker.follow(out.exchange, [out.routing_key], headers)
    assert (rest.queue, rest.waited) == ("q", (60 * SECOND - tick) // 1000)


def test_bindings_repeated_before_a_loss_is_found_are_repeated_again():
    broker = Interfered()
    connection = Connection(broker)
    ladder = connection.topology
    for name in "xy":
        connection.exchange(name, "direct")
        connection.queue(f"q{name}")
        connection.bind(f"q{name}", name, "k")
    broker.gone = (ladder.delivery, ladder.mirror_name("x"))
    broker.before = lambda command: isinstance(command, Ensure) and "'y'" in command.what

    connection.consume()

    other = Connection(broker)
    assert [other.reached("k", name) for name in "xy"] == [["qx"], ["qy"]]


@pytest.mark.parametrize("commands", range(1, 12))
def test_what_is_interrupted_is_done_by_the_next_publish(broker, commands):
    connection = Connection(broker)
    connection.exchange("x", "direct")
    connection.consume()
    broker.declare(Part(queues=(Queue("q", ()),), bindings=(Binding("x", "q", "k"),)))

    for steps in (
        connection.router.declared_queue("q", {}),
        connection.router.bound(UserBinding("x", "q", "k", to_queue=True)),
    ):
        interrupted(broker, steps, commands)

    assert connection.reached("k", "x") == ["q"]
    assert connection.reached("q") == ["q"]


@pytest.mark.parametrize("commands", range(12))
@pytest.mark.parametrize("lost", [False, True])
def test_an_interrupted_preparation_leaves_only_what_is_true(broker, commands, lost):
    connection = Connection(broker)
    connection.exchange("x", "direct")
    connection.queue("q", x_overflow="reject-publish")
    connection.bind("q", "x", "k")
    if lost:
        connection.publish()
        broker.delete_exchange(connection.topology.delivery)
        connection.now += LOOK_AGAIN
    plan = connection.router.plans.publish(
        {}, connection.now + SECOND, Destination("", "q"), connection.now
    )

    interrupted(broker, connection.router.prepare(plan.needs, connection.now), commands)

    # Another one that looks meanwhile changes nothing.
    assert connection.reached() == ["q"]
    assert connection.reached("k", "x") == ["q"]


class CutOff(SimulatedBroker):
    """A broker that loses the connection after a number of single declarations."""

    left = -1

    def declare_one(self, part):
        if self.left == 0:
            raise ConnectionError
        self.left -= 1
        return super().declare_one(part)


@pytest.mark.parametrize(
    "settings", [{}, {"layout": "skip"}, {"queue_type": "classic"}, {"queue_per_delay": True}]
)
@pytest.mark.parametrize(
    ("made", "cut", "then"), [(0, 15, 15), (0, 15, 7), (0, 7, 15), (3, 15, 15), (3, 15, 7)]
)
def test_levels_whose_declaration_is_cut_off_anywhere_are_whole_for_the_next_connection(
    settings, made, cut, then
):
    """It can ask the broker for exchanges and queues, and not for bindings."""
    settings = {"radix": 2, "tick": 1000, **settings}
    places, is_cut = 0, True
    while is_cut:
        broker = CutOff()
        connection = Connection(broker, **settings)
        connection.queue("q")
        if made:
            connection.publish(delay=made * SECOND)
        broker.left = places
        try:
            connection.publish(delay=cut * SECOND)
            is_cut = False
        except ConnectionError:
            places += 1
        broker.left = -1
        following = Connection(broker, **settings)
        following.queue("q")
        following.publish(delay=then * SECOND)

        for seconds in range(1, then + 1):
            _, plan = following.publish(delay=seconds * SECOND)
            key, headers = plan.routing_key, plan.properties["application_headers"]
            (rest,) = broker.follow(plan.exchange, [key], headers)
            assert (rest.queue, rest.waited) == ("q", seconds * 1000), (places, seconds)
    assert places > 20


def interrupted(broker, steps, commands):
    """Do a few commands, and have the last of them interrupted: nobody learns what came of it."""
    answer = None
    with suppress(StopIteration):
        for _ in range(commands):
            command = steps.send(answer)
            answer = broker.do(command)
    steps.close()


#: By a name: settings, the properties of a message, and what the broker says of itself.
LADDERS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "default": ({}, {}, SERVER),
    "skip": ({"layout": "skip"}, {}, SERVER),
    "classic": ({"queue_type": "classic"}, {}, SERVER),
    "lanes": ({"lanes": 3}, {"message_id": "one"}, SERVER),
    "urgent": ({}, {"priority": 9}, {**SERVER, "version": "4.1.0"}),
    "queue_per_delay": ({"queue_per_delay": True}, {}, SERVER),
}


@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("seconds", [60, 61.5, 4097.125])
def test_a_new_connection_notices_whatever_its_message_needs_and_looks_at_little_else(
    broker, ladder, seconds
):
    settings, properties, server = LADDERS[ladder]
    delay = round(seconds * SECOND)

    def connected():
        connection = Connection(broker, server, **settings)
        connection.queue("q")
        return connection

    def arrives(connection):
        _, plan = connection.publish(delay=delay, **properties)
        headers = plan.properties["application_headers"]
        (rest,) = broker.follow(plan.exchange, [plan.routing_key], headers)
        return rest.queue, round(rest.waited / 1000, 3)

    assert arrives(connected()) == ("q", seconds)
    done, _ = connected().publish(delay=delay, **properties)
    (look,) = [command for command in done if isinstance(command, Look)]
    assert len([*look.exchanges, *look.queues, *look.bindings]) <= 25
    assert [type(command) for command in done if not isinstance(command, Look)] in ([], [Ensure])
    # An exchange and its queue have one name.
    for kind, names in (("exchange", look.exchanges), ("queue", look.queues)):
        for name in names:
            (broker.delete_queue if kind == "queue" else broker.delete_exchange)(name)
            assert arrives(connected()) == ("q", seconds), (kind, name)


@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("who", ["new", "running"])
def test_levels_are_bound_to_a_delivery_exchange_that_a_consumer_has_made_anew(broker, ladder, who):
    settings, properties, server = LADDERS[ladder]
    publisher, consumer = (Connection(broker, server, **settings) for _ in range(2))
    for connection in (publisher, consumer):
        connection.queue("q")
    for seconds in (60, 61):
        publisher.publish(delay=seconds * SECOND, **properties)
    broker.delete_exchange(publisher.topology.delivery)
    consumer.consume()

    if who == "new":
        publisher = Connection(broker, server, **settings)
        publisher.queue("q")
    publisher.now += LOOK_AGAIN

    _, plan = publisher.publish(delay=60 * SECOND, **properties)
    headers = plan.properties["application_headers"]
    (rest,) = broker.follow(plan.exchange, [plan.routing_key], headers)
    assert (rest.queue, rest.waited) == ("q", 60_000)


def declares(connection, kind, **arguments):
    """Declare a queue and, if a kind of exchange is given, one of that kind before it."""
    connection.queue("q", **arguments)
    if kind:
        connection.exchange(kind, kind)
        connection.bind("q", kind, "k")


def state(broker):
    return {*broker.exchanges}, {*broker.queues}, broker.all_bindings()


@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("overflow", ["drop-head", "reject-publish"])
@pytest.mark.parametrize("kind", ["", "direct", "topic", "fanout", "headers"])
@pytest.mark.parametrize("knows", ["all", "the exchange", "nothing"])
def test_the_first_message_of_a_program_waits_three_times_at_most_where_all_exists(
    broker, ladder, overflow, kind, knows
):
    settings, properties, server = LADDERS[ladder]
    place = ("k" if kind else "q", kind)

    def program(knows):
        connection = Connection(broker, server, **settings)
        if knows == "all":
            declares(connection, kind, x_overflow=overflow)
        elif knows == "the exchange" and kind:
            connection.exchange(kind, kind)
        return connection

    for who in ("all", knows):
        program(who).publish(*place, delay=3600 * SECOND, **properties)
    before = state(broker)

    done, plan = program(knows).publish(*place, delay=61 * SECOND, **properties)

    # The executor waits once for each.
    assert len(done) <= 3
    headers = plan.properties["application_headers"]
    rests = broker.follow(plan.exchange, [plan.routing_key], headers)
    assert [rest.queue for rest in rests] == ["q"]
    assert state(broker) == before


def test_many_bindings_are_repeated_at_once_and_each_alone_if_one_of_them_cannot_be(broker):
    def consumes():
        connection = Connection(broker)
        connection.exchange("x", "topic")
        connection.exchange("y", "fanout")
        connection.bind_exchange("y", "x", "#")
        for number in range(3 * MAX_AT_ONCE):
            connection.queue(f"q{number}")
            connection.bind(f"q{number}", "xy"[number % 2], f"k{number}")
        return connection.consume()

    consumes()
    whole = state(broker)
    assert len(consumes()) < 10

    broker.delete_exchange(Connection(broker).topology.mirror_name("y"))
    consumes()
    assert state(broker) == whole


@pytest.mark.parametrize("overflow", ["drop-head", "reject-publish"])
@pytest.mark.parametrize("gone", ["queue", "exchange", "mirror", "relay", "binding"])
def test_a_new_connection_notices_what_is_missing_of_the_way_by_an_exchange(broker, gone, overflow):
    def publisher():
        connection = Connection(broker)
        declares(connection, "topic", x_overflow=overflow)
        return connection

    assert publisher().reached("k", "topic") == ["q"]
    connection = publisher()
    topology = connection.topology
    if gone == "queue":
        broker.delete_queue("q")
    elif gone == "exchange":
        broker.delete_exchange("topic")
    elif gone == "mirror":
        broker.delete_exchange(topology.mirror_name("topic"))
    elif gone == "relay":
        broker.delete_queue(topology.queue_relay_name("q"))
    else:
        mirror = topology.mirror_name("topic")
        for binding in [
            binding
            for binding in broker.all_bindings()
            if mirror in (binding.source, binding.destination)
        ]:
            broker.unbind(binding)

    reached = connection.reached("k", "topic")

    assert reached == ([topology.parking] if gone == "queue" else ["q"])
    # The mirror of an exchange that another program has deleted stays.
    assert [warning for warning in broker.warnings if "'topic' does not exist" in warning] == (
        broker.warnings if gone == "exchange" else []
    )


@pytest.mark.parametrize("overflow", ["drop-head", "reject-publish"])
def test_a_new_connection_removes_the_other_ways_that_earlier_bindings_have_left(broker, overflow):
    """One of the queue, and one of a headers exchange that had the name."""
    first, second = Connection(broker), Connection(broker)
    for connection in (first, second):
        declares(connection, "topic", x_overflow=overflow)
    first.publish("k", "topic")
    topology = first.topology
    other = "q" if overflow == "reject-publish" else topology.queue_relay_name("q")
    left = topology.mirror_bindings("topic", "topic", other, "k", to_queue=True)
    broker.declare(topology.queue_relay("q") + topology.exchange_relay("topic"))
    broker.declare(Part(bindings=left))
    assert len(first.reached("k", "topic")) == 2

    assert second.reached("k", "topic") == ["q"]


@pytest.mark.parametrize("begins", ["half a minute later", "by the exchange", "as a consumer"])
def test_a_connection_repeats_its_bindings_when_it_does_more_than_send_one_message_to_a_queue(
    broker, begins
):
    owner, other = Connection(broker), Connection(broker)
    for connection in (owner, other):
        connection.exchange("x", "topic")
    owner.queue("q")
    owner.bind("q", "x", "a.*")
    owner.publish("q")
    assert other.reached("a.b", "x") == [other.topology.parking]

    if begins == "as a consumer":
        owner.consume()
    else:
        owner.now += LOOK_AGAIN if "later" in begins else 0
        owner.publish("a.b", "x" if "exchange" in begins else "")

    assert other.reached("a.b", "x") == ["q"]


def test_what_a_connection_binds_after_its_first_delayed_message_is_repeated_at_once(broker):
    owner, other = Connection(broker), Connection(broker)
    owner.queue("q")
    owner.publish("q")
    owner.exchange("x", "direct")
    owner.bind("q", "x", "k")
    assert other.reached("k", "x") == ["q"]


class OfOneProcess:
    """Connections that share what they find, on a ladder that exists."""

    def __init__(self, broker, **settings):
        self.broker, self.settings, self.now = broker, settings, NOW
        self.shared = Shared()
        maker = Connection(broker, **settings)
        maker.queue("q")
        maker.publish(delay=7200 * SECOND)

    def connect(self, *, is_in_use=True, **arguments):
        connection = Connection(self.broker, **self.settings)
        connection.router = Router(Settings(**self.settings), SERVER, shared=self.shared)
        connection.now = self.now
        declared = connection.router.declared_queue("q", arguments, is_in_use=is_in_use)
        connection.run(declared)
        return connection


def test_a_connection_asks_nothing_that_another_of_its_process_found_within_half_a_minute(broker):
    process = OfOneProcess(broker)
    done = [process.connect().publish(delay=seconds * SECOND)[0] for seconds in (60, 61, 62, 3601)]
    # What the first message passes; all levels below; and nothing, as long as these are enough.
    assert [len(commands) for commands in done] == [1, 1, 0, 1]
    assert process.connect().router.relies_on_others is False

    connection = process.connect()
    assert connection.publish(delay=63 * SECOND)[0] == []
    assert connection.router.relies_on_others

    connection.consume()
    assert not connection.router.relies_on_others
    assert any(isinstance(done, Look) for done in connection.publish(delay=63 * SECOND)[0])

    process.now += LOOK_AGAIN
    assert process.connect().publish(delay=64 * SECOND)[0] != []


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_what_one_connection_misses_no_other_of_its_process_relies_on(broker, when):
    process = OfOneProcess(broker)
    for seconds in (60, 61):
        one = process.connect()
        one.publish(delay=seconds * SECOND)
    two = process.connect()
    plan = two.router.plans.publish({}, NOW + 9000 * SECOND, Destination("", "q"), NOW)
    steps = two.router.prepare(plan.needs, NOW)
    answer = broker.do(next(steps))
    broker.delete_queue(one.topology.levels[1].queues[0].name)
    one.router.known.lost()
    if when == "meanwhile":
        with suppress(StopIteration):
            while True:
                answer = broker.do(steps.send(answer))

    assert process.connect().reached(delay=SECOND) == ["q"]


@pytest.mark.parametrize("overflow", ["drop-head", "reject-publish"])
@pytest.mark.parametrize("destination", [("q", ""), ("k", "x")])
def test_a_way_is_not_taken_from_another_connection_where_the_queue_may_be_new(
    broker, overflow, destination
):
    process = OfOneProcess(broker)

    def publisher(**options):
        connection = process.connect(**options)
        connection.exchange("x", "direct")
        connection.bind("q", "x", "k")
        return connection

    for _ in range(2):
        assert publisher().reached(*destination) == ["q"]
    assert publisher().publish(*destination)[0] == []
    broker.delete_queue("q")
    broker.declare(Part(queues=(Queue("q", ()),)))

    assert publisher(is_in_use=False, x_overflow=overflow).reached(*destination) == ["q"]


def test_a_connection_that_knows_that_a_queue_refuses_makes_its_relay_itself(broker):
    process = OfOneProcess(broker)
    process.connect().publish()
    assert process.connect(**{"x-overflow": "reject-publish"}).reached() == ["q"]
    assert relays(broker)


@pytest.mark.parametrize("gone", ["binding", "queue", "exchange"])
def test_what_one_connection_removes_another_of_its_process_makes_anew(broker, gone):
    process = OfOneProcess(broker)

    def publisher():
        connection = process.connect()
        connection.exchange("x", "direct")
        connection.bind("q", "x", "k")
        return connection

    for _ in range(2):
        assert publisher().reached("k", "x") == ["q"]
    router = publisher().router
    if gone == "binding":
        broker.run(router.unbound(UserBinding("x", "q", "k", to_queue=True)))
    elif gone == "queue":
        broker.delete_queue("q")
        broker.run(router.deleted_queue("q"))
        broker.declare(Part(queues=(Queue("q", ()),)))
    else:
        broker.delete_exchange("x")
        broker.run(router.deleted_exchange("x"))

    assert publisher().reached("k", "x") == ["q"]
