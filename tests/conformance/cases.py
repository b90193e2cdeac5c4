"""The table of the conformance suite: what holds, each as a sentence and a few steps.

A case runs on the walk of the topology, with every ladder, and on every broker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery
from kombu import Producer

from kombu_binary_delay import AddressError, DelayError
from lab.broker import Broker
from tests.conformance.world import LATER, SOON

if TYPE_CHECKING:
    from tests.conformance.broker_world import BrokerWorld
    from tests.conformance.world import World


@dataclass(frozen=True)
class Case:
    """One line of the table.

    broker:   whether only a broker can show it.
    levels:   whether it is about the levels, and so takes its time on a broker with every ladder;
              what stands behind the levels is the same for all.
    restarts: whether it restarts the broker, which one has to be allowed to.
    """

    name: str
    steps: Callable[[Any], None]
    broker: bool = False
    levels: bool = False
    restarts: bool = False


#: The ladders to try, the default first: the settings of each, by a name that a reader knows.
LADDERS: dict[str, dict[str, Any]] = {
    "binary": {},
    "radix 4": {"radix": 4},
    "skip": {"layout": "skip"},
    "queue per delay": {"queue_per_delay": True},
}
CASES: list[Case] = []


def case(name: str, **options: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(steps: Callable[..., None]) -> Callable[..., None]:
        assert name not in [each.name for each in CASES]
        CASES.append(Case(name, steps, **options))
        return steps

    return add


def cases(
    name: str, values: dict[str, Any], **options: bool
) -> Callable[[Callable[..., None]], None]:
    """Add one case for each value; the name has what it is called in place of {}."""

    def add(steps: Callable[..., None]) -> None:
        for called, value in values.items():
            case(name.format(called), **options)(partial(steps, value=value))

    return add


@contextmanager
def refused(error: type[Exception], words: str) -> Iterator[None]:
    with pytest.raises(error, match=words):
        yield


# -- destinations ----------------------------------------------------------------------------------


@case("the default exchange leads to the queue that the key names", levels=True)
def _(world: World) -> None:
    world.queue("q")
    world.queue("bystander")
    world.publish(1, key="q")
    (arrival,) = world.expect({"q": [1]})
    assert (arrival.exchange, arrival.key) == ("", "q")


@cases(
    "a {} exchange routes a delayed message as any other",
    {"direct": "direct", "topic": "topic", "fanout": "fanout"},
)
def _(world: World, value: str) -> None:
    world.exchange("x", value)
    for queue, key in {"a": "k.1", "b": "k.2", "c": "k.#", "d": "#", "e": ""}.items():
        world.queue(queue)
        world.bind(queue, "x", key)
    reached = {
        "direct": {"a": [1]},
        "topic": {"a": [1], "c": [1], "d": [1]},
        "fanout": {"a": [1], "b": [1], "c": [1], "d": [1], "e": [1]},
    }[value]
    world.publish(1, "x", "k.1")
    for arrival in world.expect(reached):
        assert (arrival.exchange, arrival.key) == ("x", "k.1")
    world.publish(2, "x", "k.1", delay=None)
    world.expect({queue: [2] for queue in reached})


@case("a headers exchange routes a delayed message as any other")
def _(world: World) -> None:
    world.exchange("x", "headers")
    for queue, arguments in {
        "any": {"x-match": "any", "for": "a", "to": "b"},
        "all": {"x-match": "all", "for": "a", "to": "b"},
    }.items():
        world.queue(queue)
        world.bind(queue, "x", "", **arguments)
    world.publish(1, "x", "k", headers={"for": "a"})
    world.publish(2, "x", "k", headers={"for": "a", "to": "b"})
    for arrival in world.expect({"any": [1, 2], "all": [2]}):
        assert (arrival.exchange, arrival.key) == ("x", "k")


@case("an exchange bound to others routes on to queues behind them, until it is unbound")
def _(world: World) -> None:
    world.exchange("first", "topic")
    world.exchange("second", "direct")
    world.exchange("third", "headers")
    world.queue("direct")
    world.bind("direct", "second", "a.b")
    world.queue("headers")
    world.bind("headers", "third", "", **{"x-match": "all", "for": "me"})
    world.bind_exchange("second", "first", "a.*")
    world.bind_exchange("third", "second", "a.b")
    world.publish("hit", "first", "a.b", headers={"for": "me"})
    world.publish("miss", "first", "b.b", headers={"for": "me"})
    world.expect({"direct": ["hit"], "headers": ["hit"]}, parked=1)
    world.unbind_exchange("second", "first", "a.*")
    world.publish("gone", "first", "a.b", headers={"for": "me"})
    world.publish("kept", "second", "a.b", headers={"for": "me"})
    world.expect({"direct": ["kept"], "headers": ["kept"]}, parked=2)


@case("two exchanges that share a key keep apart")
def _(world: World) -> None:
    for name in ("one", "two"):
        world.exchange(name, "direct")
        world.queue(name)
        world.bind(name, name, "k")
    world.queue("k")
    world.publish(1, "one", "k")
    world.publish(2, "two", "k")
    world.publish(3, "", "k")
    world.expect({"one": [1], "two": [2], "k": [3]})


@case("keys that end alike keep apart")
def _(world: World) -> None:
    world.exchange("x", "direct")
    for queue, key in {"k": "k", "a.k": "a.k", "x.k": "x.k"}.items():
        world.queue(queue)
        world.bind(queue, "x", key)
        world.publish(f"{key} by exchange", "x", key)
        world.publish(f"{queue} by name", "", queue)
    world.expect({key: [f"{key} by exchange", f"{key} by name"] for key in ("k", "a.k", "x.k")})


@case("topic patterns choose by whole words, the empty key included")
def _(world: World) -> None:
    world.exchange("x", "topic")
    for pattern in ("a.*.c", "a.#", "#.c", "*", "#", "", "#.b.#", "a.b.c"):
        world.queue(f"q {pattern}")
        world.bind(f"q {pattern}", "x", pattern)
    world.publish(1, "x", "a.b.c")
    world.publish(2, "x", "x.a.b.c")
    world.publish(3, "x", "a")
    world.publish(4, "x", "")
    world.expect(
        {
            "q a.*.c": [1],
            "q a.#": [1, 3],
            "q #.c": [1, 2],
            "q *": [3],
            "q #": [1, 2, 3, 4],
            "q ": [4],
            "q #.b.#": [1, 2],
            "q a.b.c": [1],
        }
    )


@case("wildcards in a routing key are plain characters")
def _(world: World) -> None:
    world.exchange("x", "direct")
    world.exchange("t", "topic")
    for key in ("*", "#", "a.b"):
        world.queue(key)
        world.bind(key, "x", key)
        world.publish(key, "x", key)
    world.queue("t")
    world.bind("t", "t", "a.*")
    world.publish("t *", "t", "a.*")
    world.publish("t #", "t", "#")
    world.expect({"*": ["*"], "#": ["#"], "a.b": ["a.b"], "t": ["t *"]}, parked=1)


NAMES = ["a.b", "#", "*", "q %", "ключ.*", "!x", "@", "0.1.@..q"]


@cases(
    "a queue, an exchange and a key may all be called {}",
    {
        **{name: name for name in NAMES},
        "255 times x": "x" * 255,
        "127 times é": "é" * 127,
    },
)
def _(world: World, value: str) -> None:
    name = value
    world.queue(name)
    world.queue("bystander")
    world.exchange(name, "direct")
    world.bind(name, name, name)
    world.publish("default", "", name)
    world.publish("direct", name, name)
    arrivals = world.expect({name: ["default", "direct"]})
    assert {(each.exchange, each.key) for each in arrivals} == {("", name), (name, name)}
    assert all(each.headers == {} for each in arrivals)


@case("a topic key that does not fit behind the digits is refused at the publish")
def _(world: World) -> None:
    world.exchange("x", "topic")
    world.queue("q")
    world.bind("q", "x", "#")
    fits = "k" * 173  # an exchange of one character and a key have 174 bytes together
    world.publish(1, "x", fits)
    with refused(AddressError, "takes 174 bytes, .* has 173 left"):
        world.publish(2, "x", fits + "k")
    (arrival,) = world.expect({"q": [1]})
    assert arrival.key == fits


@case("CC and BCC are delayed copies for their own keys", levels=True)
def _(world: World) -> None:
    world.exchange("x", "direct")
    for queue in ("to", "cc", "bcc"):
        world.queue(queue)
        world.bind(queue, "x", queue)
    world.publish(1, "x", "to", headers={"CC": ["cc"], "BCC": ["bcc"]})
    arrivals = world.expect({"to": [1], "cc": [1], "bcc": [1]})
    assert all(each.headers == {"CC": ["cc"]} for each in arrivals)
    world.publish(2, "", "to", headers={"CC": ["cc", "bcc"]})
    world.expect({"to": [2], "cc": [2], "bcc": [2]})


# -- delays ----------------------------------------------------------------------------------------


@case("delays published as 30, 20, 10 arrive as 10, 20, 30", levels=True)
def _(world: World) -> None:
    world.queue("q")
    # The first message has the levels to declare, which takes its time.
    world.publish("first", key="q", delay=1)
    for delay in (30, 20, 10):
        world.publish(delay, key="q", delay=delay * 60)
    arrivals = world.expect({"q": ["first", 10, 20, 30]})
    assert [each.body for each in arrivals] == ["first", 10, 20, 30]


@case("every number of ticks is waited for once, and none left early", levels=True)
def _(world: World) -> None:
    world.queue("q")
    tick = world.topology.ladder.tick
    # Twice, since some ladders serve a delay that is asked for again in another way.
    for ticks in range(1, 18):
        for body in (ticks, f"{ticks} again"):
            world.publish(body, key="q", delay=ticks * tick)
    world.expect({"q": [*range(1, 18), *(f"{ticks} again" for ticks in range(1, 18))]})


@case("a fraction of a tick is rounded up", levels=True)
def _(world: World) -> None:
    world.queue("q")
    tick = world.topology.ladder.tick
    for number, delay in enumerate((0.001, 1, tick - 0.5, tick + 0.001, tick * 2.5)):
        world.publish(number, key="q", delay=delay)
    world.expect({"q": [0, 1, 2, 3, 4]})


@case("a delay of zero is a plain publish")
def _(world: World) -> None:
    world.queue("q")
    world.publish(1, key="q", delay=0)
    (arrival,) = world.expect({"q": [1]})
    assert arrival.headers == {}


@case("the longest delay waits, and a longer one is refused at the publish", levels=True)
def _(world: World) -> None:
    world.queue("q")
    longest = world.topology.ladder.maximum
    # Time passes on the way to the ladder, but not as much as this.
    for beyond in (longest + 60_000, longest * 2, 1e18):
        with refused(DelayError, rf"0 to {longest} ms"):
            world.publish(beyond, key="q", delay=beyond)
    world.publish("waits", key="q", delay=longest)
    assert world.waiting(1) == 1
    if world.is_pure:
        world.expect({"q": ["waits"]})


@cases(
    "a delay of {} is refused at the publish",
    {str(delay): delay for delay in (-1, "soon", float("nan"), True, None)},
)
def _(world: World, value: object) -> None:
    world.queue("q")
    with refused(DelayError, "x-delay must be a number of milliseconds"):
        world.publish(1, key="q", delay=None, headers={"x-delay": value})
    world.expect({})


@case("a numeric string and a float are delays, too")
def _(world: World) -> None:
    world.queue("q")
    for delay in ("250", 250.5):
        world.publish(delay, key="q", delay=delay)
    world.expect({"q": ["250", 250.5]})


@case("a task of Celery waits for its eta")
def _(world: World) -> None:
    world.queue("q")
    world.publish_task("due", "q", countdown=-1000)
    world.publish_task("later", "q", countdown=SOON)
    arrivals = world.expect({"q": ["due", "later"]})
    # Celery itself looks at it again.
    assert all(each.headers.keys() == {"task", "eta"} for each in arrivals)


# -- the message -----------------------------------------------------------------------------------


@case("exchange, key, body, headers and properties arrive as they were published", levels=True)
def _(world: World) -> None:
    world.exchange("x", "topic")
    world.queue("q")
    world.bind("q", "x", "a.*")
    headers = {"mine": {"deep": [1, "two", None]}, "größe": 1.5, "yes": True}
    properties: dict[str, Any] = {
        "correlation_id": "c",
        "reply_to": "r",
        "message_id": "m",
        "app_id": "a",
        "type": "t",
        "priority": 3,
        "timestamp": 1_700_000_000,
    }
    world.publish({"b": 1}, "x", "a.b", headers=headers, **properties)
    (arrival,) = world.expect({"q": [{"b": 1}]})
    assert (arrival.exchange, arrival.key) == ("x", "a.b")
    assert arrival.headers == headers
    assert {name: arrival.properties[name] for name in properties} == properties


@case("the user's own x-death headers arrive, and none of the ladder's", levels=True)
def _(world: World) -> None:
    world.queue("q")
    deaths = [{"queue": "theirs", "count": 3}, {"queue": "older"}]
    headers = {"x-death": deaths, "x-first-death-queue": "older", "x-last-death-queue": "theirs"}
    world.publish(1, key="q", headers=headers)
    (arrival,) = world.expect({"q": [1]})
    assert arrival.headers == headers


@case("an expiration shorter than the delay does not shorten it, and arrives")
def _(world: World) -> None:
    world.queue("q")
    world.publish(1, key="q", delay=LATER, expiration=0.5)
    (arrival,) = world.expect({"q": [1]})
    assert arrival.properties["expiration"] == "500"


@case("a key of the user's own that looks like an address stays what it is")
def _(world: World) -> None:
    world.exchange("x", "direct")
    for queue, key in {"looks": "0.1.@..q", "q": "q", "escaped": "%2E.!x.@"}.items():
        world.queue(queue)
        world.bind(queue, "x", key)
        world.publish(key, "x", key)
    arrivals = world.expect({"looks": ["0.1.@..q"], "q": ["q"], "escaped": ["%2E.!x.@"]})
    assert all(each.key == each.body for each in arrivals)


# -- while messages wait ---------------------------------------------------------------------------


@case("a publisher that starts before any worker still delivers")
def _(world: World) -> None:
    world.exchange("x", "topic")
    world.publish(1, "x", "a.b", delay=LATER)
    world.new_process()
    world.exchange("x", "topic")
    world.queue("q")
    world.bind("q", "x", "a.#")
    world.expect({"q": [1]})


@case("a queue that is declared after the publish is delivered to")
def _(world: World) -> None:
    world.publish(1, key="later", delay=LATER)
    world.new_process()
    world.queue("later")
    world.expect({"later": [1]})


@case("a message whose queue is missing is parked, and holds up no other")
def _(world: World) -> None:
    world.queue("q")
    world.publish("lost", key="nowhere")
    world.publish("found", key="q")
    world.expect({"q": ["found"]}, parked=1)


@case("a message whose queue was deleted meanwhile is parked")
def _(world: World) -> None:
    world.queue("gone")
    world.queue("q")
    world.publish("lost", key="gone", delay=LATER)
    world.publish("found", key="q", delay=LATER)
    world.delete_queue("gone")
    world.expect({"q": ["found"]}, parked=1)


@case("a message whose exchange was deleted meanwhile is parked")
def _(world: World) -> None:
    for name, kind in {"x": "direct", "h": "headers"}.items():
        world.exchange(name, kind)
        world.queue(f"q of {name}")
        world.bind(f"q of {name}", name, "k")
    world.publish("direct", "x", "k", delay=LATER)
    world.publish("headers", "h", "k", delay=LATER)
    world.delete_exchange("x")
    world.delete_exchange("h")
    world.expect({}, parked=2)


@case("a queue that was unbound meanwhile gets nothing, its other bindings stay")
def _(world: World) -> None:
    world.exchange("x", "direct")
    world.exchange("f", "fanout")
    for queue, exchange, keys in (("q", "x", ("a", "b")), ("f", "f", ("1", "2"))):
        world.queue(queue)
        for key in keys:
            world.bind(queue, exchange, key)
    world.publish("a", "x", "a", delay=LATER)
    world.publish("b", "x", "b", delay=LATER)
    world.publish("f", "f", "", delay=LATER)
    # By a process that has never bound it.
    world.new_process()
    world.unbind("q", "x", "a")
    world.unbind("f", "f", "1")
    world.expect({"q": ["b"], "f": ["f"]}, parked=1)


@case("a queue that was bound meanwhile gets the message, too")
def _(world: World) -> None:
    world.exchange("x", "fanout")
    for queue in ("early", "late"):
        world.queue(queue)
    world.bind("early", "x")
    world.publish(1, "x", "", delay=LATER)
    world.bind("late", "x")
    world.expect({"early": [1], "late": [1]})


# -- what only a broker can show -------------------------------------------------------------------


CONFIRMS = {"off": False, "on": True}


@cases("a quorum queue is a destination, publisher confirms {}", CONFIRMS, broker=True)
def _(world: BrokerWorld, *, value: bool) -> None:
    into_queues_of(world, "quorum", confirms=value)


@cases("a classic queue is a destination, publisher confirms {}", CONFIRMS, broker=True)
def _(world: BrokerWorld, *, value: bool) -> None:
    into_queues_of(world, "classic", confirms=value)


def into_queues_of(world: BrokerWorld, kind: str, *, confirms: bool) -> None:
    world.new_process(confirm_publish=confirms)
    world.queue("q", **{"x-queue-type": kind})
    world.exchange("x", "topic")
    world.bind("q", "x", "#")
    for number in range(20):
        world.publish(f"by name {number}", "", "q", delay=SOON + number)
        world.publish(f"by exchange {number}", "x", "k", delay=SOON + number)
    world.expect({"q": [f"by {way} {n}" for way in ("name", "exchange") for n in range(20)]})


@case("with publisher confirms, a publish returns when the ladder has the message", broker=True)
def _(world: BrokerWorld) -> None:
    world.new_process(confirm_publish=True)
    world.queue("q")
    world.publish(1, key="q", delay=3_600_000)
    assert world.waiting(1) == 1


@case("the ladder's queues are of the type that was asked for", broker=True)
def _(world: BrokerWorld) -> None:
    world.queue("q")
    world.publish(1, key="q", delay=LATER)
    levels = [row for row in world.vhost.queues() if world.topology.owns(row["name"])]
    assert {row["type"] for row in levels} == {world.topology.queue_type}
    world.expect({"q": [1]})


@case("a consumer without the transport gets the message when it is due", broker=True)
def _(world: BrokerWorld) -> None:
    world.queue("q")
    world.publish(1, key="q")
    # Nothing of ours looks at the queue meanwhile.
    world.ready("q", 1)
    stock = world.connect("amqp").default_channel
    message = stock.message_to_python(stock.basic_get("q", no_ack=True))
    assert message.decode() == 1


@case("what Celery sends with a countdown arrives as what it sends without", broker=True)
def _(world: BrokerWorld) -> None:
    app = Celery("conformance", broker=world.vhost.url, set_as_current=False)
    app.conf.broker_transport = "kombu_binary_delay:Transport"
    app.conf.broker_transport_options = {"binary_delay": world.settings}
    for countdown in (None, SOON / 1000):
        with app.connection_for_write() as connection, Producer(connection) as producer:
            app.send_task("tasks.add", (2, 2), countdown=countdown, producer=producer)
    app.close()
    world.ready("celery", 2)
    prompt, delayed = (world.take("celery") for _ in range(2))
    assert delayed.headers.keys() == prompt.headers.keys()
    assert delayed.delivery_info["routing_key"] == prompt.delivery_info["routing_key"] == "celery"
    assert delayed.delivery_info["exchange"] == prompt.delivery_info["exchange"]
    assert delayed.payload == prompt.payload


@case(
    "a restart of the broker loses nothing, whether due before or after", broker=True, restarts=True
)
def _(world: BrokerWorld) -> None:
    world.new_process(confirm_publish=True)
    world.queue("q")
    for number, delay in enumerate((SOON, LATER, 15_000)):
        world.publish(number, key="q", delay=delay)
    broker = world.vhost.broker
    assert isinstance(broker, Broker), "a broker that may be restarted"
    broker.restart()
    world.new_process()
    world.queue("q")
    world.expect({"q": [0, 1, 2]})
