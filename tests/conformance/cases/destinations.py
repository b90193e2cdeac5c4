"""Where a delayed message arrives: exchanges of each kind, patterns, strange names, copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kombu_binary_delay import AddressError
from tests.conformance.table import Table

if TYPE_CHECKING:
    from tests.conformance.program import Program

table = Table()


@table.case("the default exchange leads to the queue that the key names", levels=True)
def _(program: Program) -> None:
    program.queue("q")
    program.queue("bystander")
    program.publish(1, key="q")
    (arrival,) = program.expect({"q": [1]})
    assert (arrival.exchange, arrival.key) == ("", "q")


@table.cases(
    "a {} exchange routes a delayed message as any other",
    {"direct": "direct", "topic": "topic", "fanout": "fanout"},
)
def _(program: Program, value: str) -> None:
    program.exchange("x", value)
    for queue, key in {"a": "k.1", "b": "k.2", "c": "k.#", "d": "#", "e": ""}.items():
        program.queue(queue)
        program.bind(queue, "x", key)
    reached = {
        "direct": {"a": [1]},
        "topic": {"a": [1], "c": [1], "d": [1]},
        "fanout": {"a": [1], "b": [1], "c": [1], "d": [1], "e": [1]},
    }[value]
    program.publish(1, "x", "k.1")
    for arrival in program.expect(reached):
        assert (arrival.exchange, arrival.key) == ("x", "k.1")
    program.publish(2, "x", "k.1", delay=None)
    program.expect({queue: [2] for queue in reached})


@table.case("a headers exchange routes a delayed message as any other")
def _(program: Program) -> None:
    program.exchange("x", "headers")
    for queue, arguments in {
        "any": {"x-match": "any", "for": "a", "to": "b"},
        "all": {"x-match": "all", "for": "a", "to": "b"},
    }.items():
        program.queue(queue)
        program.bind(queue, "x", "", **arguments)
    program.publish(1, "x", "k", headers={"for": "a"})
    program.publish(2, "x", "k", headers={"for": "a", "to": "b"})
    for arrival in program.expect({"any": [1, 2], "all": [2]}):
        assert (arrival.exchange, arrival.key) == ("x", "k")


@table.case("an exchange bound to others routes on to queues behind them, until it is unbound")
def _(program: Program) -> None:
    program.exchange("first", "topic")
    program.exchange("second", "direct")
    program.exchange("third", "headers")
    program.queue("direct")
    program.bind("direct", "second", "a.b")
    program.queue("headers")
    program.bind("headers", "third", "", **{"x-match": "all", "for": "me"})
    program.bind_exchange("second", "first", "a.*")
    program.bind_exchange("third", "second", "a.b")
    program.publish("hit", "first", "a.b", headers={"for": "me"})
    program.publish("miss", "first", "b.b", headers={"for": "me"})
    program.expect({"direct": ["hit"], "headers": ["hit"]}, parked=1)
    program.unbind_exchange("second", "first", "a.*")
    program.publish("gone", "first", "a.b", headers={"for": "me"})
    program.publish("kept", "second", "a.b", headers={"for": "me"})
    program.expect({"direct": ["kept"], "headers": ["kept"]}, parked=2)


@table.case("two exchanges that share a key keep apart")
def _(program: Program) -> None:
    for name in ("one", "two"):
        program.exchange(name, "direct")
        program.queue(name)
        program.bind(name, name, "k")
    program.queue("k")
    program.publish(1, "one", "k")
    program.publish(2, "two", "k")
    program.publish(3, "", "k")
    program.expect({"one": [1], "two": [2], "k": [3]})


@table.case("keys that end alike keep apart")
def _(program: Program) -> None:
    program.exchange("x", "direct")
    for queue, key in {"k": "k", "a.k": "a.k", "x.k": "x.k"}.items():
        program.queue(queue)
        program.bind(queue, "x", key)
        program.publish(f"{key} by exchange", "x", key)
        program.publish(f"{queue} by name", "", queue)
    program.expect({key: [f"{key} by exchange", f"{key} by name"] for key in ("k", "a.k", "x.k")})


@table.case("topic patterns choose by whole words, the empty key included")
def _(program: Program) -> None:
    program.exchange("x", "topic")
    for pattern in ("a.*.c", "a.#", "#.c", "*", "#", "", "#.b.#", "a.b.c"):
        program.queue(f"q {pattern}")
        program.bind(f"q {pattern}", "x", pattern)
    program.publish(1, "x", "a.b.c")
    program.publish(2, "x", "x.a.b.c")
    program.publish(3, "x", "a")
    program.publish(4, "x", "")
    program.expect(
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
def _(program: Program) -> None:
    program.exchange("x", "direct")
    program.exchange("t", "topic")
    for key in ("*", "#", "a.b"):
        program.queue(key)
        program.bind(key, "x", key)
        program.publish(key, "x", key)
    program.queue("t")
    program.bind("t", "t", "a.*")
    program.publish("t *", "t", "a.*")
    program.publish("t #", "t", "#")
    program.expect({"*": ["*"], "#": ["#"], "a.b": ["a.b"], "t": ["t *"]}, parked=1)


NAMES = ["a.b", "#", "*", "q %", "ключ.*", "!x", "@", "0.1.@..q"]


@table.cases(
    "a queue, an exchange and a key may all be called {}",
    {
        **{name: name for name in NAMES},
        "255 times x": "x" * 255,
        "127 times é": "é" * 127,
    },
)
def _(program: Program, value: str) -> None:
    name = value
    program.queue(name)
    program.queue("bystander")
    program.exchange(name, "direct")
    program.bind(name, name, name)
    program.publish("default", "", name)
    program.publish("direct", name, name)
    arrivals = program.expect({name: ["default", "direct"]})
    assert {(arrival.exchange, arrival.key) for arrival in arrivals} == {("", name), (name, name)}
    assert all(arrival.headers == {} for arrival in arrivals)


@table.case("a topic key that does not fit behind the digits is refused at the publish")
def _(program: Program) -> None:
    program.exchange("x", "topic")
    program.queue("q")
    program.bind("q", "x", "#")
    fits = "k" * 173  # an exchange of one character and a key have 174 bytes together
    program.publish(1, "x", fits)
    with pytest.raises(AddressError, match=r"takes 174 bytes; .* has room for 173"):
        program.publish(2, "x", fits + "k")
    (arrival,) = program.expect({"q": [1]})
    assert arrival.key == fits


@table.case("CC and BCC are delayed copies for their own keys", levels=True)
def _(program: Program) -> None:
    program.exchange("x", "direct")
    for queue in ("to", "cc", "bcc"):
        program.queue(queue)
        program.bind(queue, "x", queue)
    program.publish(1, "x", "to", headers={"CC": ["cc"], "BCC": ["bcc"]})
    arrivals = program.expect({"to": [1], "cc": [1], "bcc": [1]})
    assert all(arrival.headers == {"CC": ["cc"]} for arrival in arrivals)
    program.publish(2, "", "to", headers={"CC": ["cc", "bcc"]})
    program.expect({"to": [2], "cc": [2], "bcc": [2]})
