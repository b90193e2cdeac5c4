"""Where a delayed message arrives: exchanges of each kind, patterns, strange names, copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kombu_binary_delay import AddressError
from tests.conformance.table import Table

if TYPE_CHECKING:
    from tests.conformance.world import World

table = Table()


@table.case("the default exchange leads to the queue that the key names", levels=True)
def _(world: World) -> None:
    world.queue("q")
    world.queue("bystander")
    world.publish(1, key="q")
    (arrival,) = world.expect({"q": [1]})
    assert (arrival.exchange, arrival.key) == ("", "q")


@table.cases(
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


@table.case("a headers exchange routes a delayed message as any other")
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


@table.case("an exchange bound to others routes on to queues behind them, until it is unbound")
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


@table.case("two exchanges that share a key keep apart")
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


@table.case("keys that end alike keep apart")
def _(world: World) -> None:
    world.exchange("x", "direct")
    for queue, key in {"k": "k", "a.k": "a.k", "x.k": "x.k"}.items():
        world.queue(queue)
        world.bind(queue, "x", key)
        world.publish(f"{key} by exchange", "x", key)
        world.publish(f"{queue} by name", "", queue)
    world.expect({key: [f"{key} by exchange", f"{key} by name"] for key in ("k", "a.k", "x.k")})


@table.case("topic patterns choose by whole words, the empty key included")
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


@table.case("wildcards in a routing key are plain characters")
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


@table.cases(
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


@table.case("a topic key that does not fit behind the digits is refused at the publish")
def _(world: World) -> None:
    world.exchange("x", "topic")
    world.queue("q")
    world.bind("q", "x", "#")
    fits = "k" * 173  # an exchange of one character and a key have 174 bytes together
    world.publish(1, "x", fits)
    with pytest.raises(AddressError, match=r"takes 174 bytes, .* has 173 left"):
        world.publish(2, "x", fits + "k")
    (arrival,) = world.expect({"q": [1]})
    assert arrival.key == fits


@table.case("CC and BCC are delayed copies for their own keys", levels=True)
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
