"""What changes on the broker while messages wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conformance.table import Table

if TYPE_CHECKING:
    from tests.conformance.program import Program

table = Table()


@table.case("a publisher that starts before any worker still delivers")
def _(program: Program) -> None:
    program.exchange("x", "topic")
    program.publish(1, "x", "a.b", delay=program.later)
    program.new_process()
    program.exchange("x", "topic")
    program.queue("q")
    program.bind("q", "x", "a.#")
    program.expect({"q": [1]})


@table.case("a queue that is declared after the publish is delivered to")
def _(program: Program) -> None:
    program.publish(1, key="later", delay=program.later)
    program.new_process()
    program.queue("later")
    program.expect({"later": [1]})


@table.case("a message whose queue is missing is parked, and holds up no other")
def _(program: Program) -> None:
    program.queue("q")
    program.publish("lost", key="nowhere")
    program.publish("found", key="q")
    program.expect({"q": ["found"]}, parked=1)


@table.case("a message whose queue was deleted meanwhile is parked")
def _(program: Program) -> None:
    program.queue("gone")
    program.queue("q")
    program.publish("lost", key="gone", delay=program.later)
    program.publish("found", key="q", delay=program.later)
    program.delete_queue("gone")
    program.expect({"q": ["found"]}, parked=1)


@table.case("a message whose exchange was deleted meanwhile is parked")
def _(program: Program) -> None:
    for name, kind in {"x": "direct", "h": "headers"}.items():
        program.exchange(name, kind)
        program.queue(f"q of {name}")
        program.bind(f"q of {name}", name, "k")
    program.publish("direct", "x", "k", delay=program.later)
    program.publish("headers", "h", "k", delay=program.later)
    program.delete_exchange("x")
    program.delete_exchange("h")
    program.expect({}, parked=2)


@table.case("a queue that was unbound meanwhile gets nothing, its other bindings stay")
def _(program: Program) -> None:
    program.exchange("x", "direct")
    program.exchange("f", "fanout")
    for queue, exchange, keys in (("q", "x", ("a", "b")), ("f", "f", ("1", "2"))):
        program.queue(queue)
        for key in keys:
            program.bind(queue, exchange, key)
    program.publish("a", "x", "a", delay=program.later)
    program.publish("b", "x", "b", delay=program.later)
    program.publish("f", "f", "", delay=program.later)
    # By a process that has never bound it.
    program.new_process()
    program.unbind("q", "x", "a")
    program.unbind("f", "f", "1")
    program.expect({"q": ["b"], "f": ["f"]}, parked=1)


@table.case("a queue that was bound meanwhile gets the message, too")
def _(program: Program) -> None:
    program.exchange("x", "fanout")
    for queue in ("early", "late"):
        program.queue(queue)
    program.bind("early", "x")
    program.publish(1, "x", "", delay=program.later)
    program.bind("late", "x")
    program.expect({"early": [1], "late": [1]})
