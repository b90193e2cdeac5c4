"""What the consumer sees of a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.conformance.table import Table

if TYPE_CHECKING:
    from tests.conformance.program import Program

table = Table()


@table.case(
    "exchange, key, body, headers and properties arrive as they were published", levels=True
)
def _(program: Program) -> None:
    program.exchange("x", "topic")
    program.queue("q")
    program.bind("q", "x", "a.*")
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
    program.publish({"b": 1}, "x", "a.b", headers=headers, **properties)
    (arrival,) = program.expect({"q": [{"b": 1}]})
    assert (arrival.exchange, arrival.key) == ("x", "a.b")
    assert arrival.headers == headers
    assert {name: arrival.properties[name] for name in properties} == properties


@table.case("the user's own x-death headers arrive, and none of the ladder's", levels=True)
def _(program: Program) -> None:
    program.queue("q")
    deaths = [{"queue": "theirs", "count": 3}, {"queue": "older"}]
    headers = {"x-death": deaths, "x-first-death-queue": "older", "x-last-death-queue": "theirs"}
    program.publish(1, key="q", headers=headers)
    (arrival,) = program.expect({"q": [1]})
    assert arrival.headers == headers


@table.case("an expiration shorter than the delay does not shorten it, and arrives")
def _(program: Program) -> None:
    program.queue("q")
    program.publish(1, key="q", delay=program.later, expiration=0.5)
    (arrival,) = program.expect({"q": [1]})
    assert arrival.properties["expiration"] == "500"


@table.case("a key of the user's own that looks like an address stays what it is")
def _(program: Program) -> None:
    program.exchange("x", "direct")
    for queue, key in {"looks": "0.1.@..q", "q": "q", "escaped": "%2E.!x.@"}.items():
        program.queue(queue)
        program.bind(queue, "x", key)
        program.publish(key, "x", key)
    arrivals = program.expect({"looks": ["0.1.@..q"], "q": ["q"], "escaped": ["%2E.!x.@"]})
    assert all(arrival.key == arrival.body for arrival in arrivals)
