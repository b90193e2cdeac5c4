"""What the consumer sees of a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.conformance.table import Table
from tests.conformance.world import LATER

if TYPE_CHECKING:
    from tests.conformance.world import World

table = Table()


@table.case(
    "exchange, key, body, headers and properties arrive as they were published", levels=True
)
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


@table.case("the user's own x-death headers arrive, and none of the ladder's", levels=True)
def _(world: World) -> None:
    world.queue("q")
    deaths = [{"queue": "theirs", "count": 3}, {"queue": "older"}]
    headers = {"x-death": deaths, "x-first-death-queue": "older", "x-last-death-queue": "theirs"}
    world.publish(1, key="q", headers=headers)
    (arrival,) = world.expect({"q": [1]})
    assert arrival.headers == headers


@table.case("an expiration shorter than the delay does not shorten it, and arrives")
def _(world: World) -> None:
    world.queue("q")
    world.publish(1, key="q", delay=LATER, expiration=0.5)
    (arrival,) = world.expect({"q": [1]})
    assert arrival.properties["expiration"] == "500"


@table.case("a key of the user's own that looks like an address stays what it is")
def _(world: World) -> None:
    world.exchange("x", "direct")
    for queue, key in {"looks": "0.1.@..q", "q": "q", "escaped": "%2E.!x.@"}.items():
        world.queue(queue)
        world.bind(queue, "x", key)
        world.publish(key, "x", key)
    arrivals = world.expect({"looks": ["0.1.@..q"], "q": ["q"], "escaped": ["%2E.!x.@"]})
    assert all(each.key == each.body for each in arrivals)
