"""What changes on the broker while messages wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance.table import Table
from tests.conformance.world import LATER

if TYPE_CHECKING:
    from tests.conformance.world import World

table = Table()


@table.case("a publisher that starts before any worker still delivers")
def _(world: World) -> None:
    world.exchange("x", "topic")
    world.publish(1, "x", "a.b", delay=LATER)
    world.new_process()
    world.exchange("x", "topic")
    world.queue("q")
    world.bind("q", "x", "a.#")
    world.expect({"q": [1]})


@table.case("a queue that is declared after the publish is delivered to")
def _(world: World) -> None:
    world.publish(1, key="later", delay=LATER)
    world.new_process()
    world.queue("later")
    world.expect({"later": [1]})


@table.case("a message whose queue is missing is parked, and holds up no other")
def _(world: World) -> None:
    world.queue("q")
    world.publish("lost", key="nowhere")
    world.publish("found", key="q")
    world.expect({"q": ["found"]}, parked=1)


@table.case("a message whose queue was deleted meanwhile is parked")
def _(world: World) -> None:
    world.queue("gone")
    world.queue("q")
    world.publish("lost", key="gone", delay=LATER)
    world.publish("found", key="q", delay=LATER)
    world.delete_queue("gone")
    world.expect({"q": ["found"]}, parked=1)


@table.case("a message whose exchange was deleted meanwhile is parked")
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


@table.case("a queue that was unbound meanwhile gets nothing, its other bindings stay")
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


@table.case("a queue that was bound meanwhile gets the message, too")
def _(world: World) -> None:
    world.exchange("x", "fanout")
    for queue in ("early", "late"):
        world.queue(queue)
    world.bind("early", "x")
    world.publish(1, "x", "", delay=LATER)
    world.bind("late", "x")
    world.expect({"early": [1], "late": [1]})
