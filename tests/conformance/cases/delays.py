"""How long a message waits, and which delays are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kombu_binary_delay import DelayError
from tests.conformance.program import SOON
from tests.conformance.table import Table

if TYPE_CHECKING:
    from tests.conformance.program import Program

table = Table()


@table.case("delays published as 30, 20, 10 arrive as 10, 20, 30", levels=True)
def _(program: Program) -> None:
    program.queue("q")
    # The first message has the levels to declare, which takes its time.
    program.publish("first", key="q", delay=1)
    for delay in (30, 20, 10):
        program.publish(delay, key="q", delay=delay * program.later / 33)
    program.in_order(program.expect({"q": ["first", 10, 20, 30]}), ["first", 10, 20, 30])


@table.case("every number of ticks is waited for once, and none left early", levels=True)
def _(program: Program) -> None:
    program.queue("q")
    tick = program.topology.ladder.tick
    # Twice, since some ladders serve a delay that is asked for again in another way.
    for ticks in range(1, 18):
        for body in (ticks, f"{ticks} again"):
            program.publish(body, key="q", delay=ticks * tick)
    program.expect({"q": [*range(1, 18), *(f"{ticks} again" for ticks in range(1, 18))]})


@table.case("a fraction of a tick is rounded up", levels=True)
def _(program: Program) -> None:
    program.queue("q")
    tick = program.topology.ladder.tick
    for number, delay in enumerate((0.001, 1, tick - 0.5, tick + 0.001, tick * 2.5)):
        program.publish(number, key="q", delay=delay)
    program.expect({"q": [0, 1, 2, 3, 4]})


@table.case("a delay of zero is a plain publish")
def _(program: Program) -> None:
    program.queue("q")
    program.publish(1, key="q", delay=0)
    (arrival,) = program.expect({"q": [1]})
    assert arrival.headers == {}


@table.case("the longest delay waits, and a longer one is refused at the publish", levels=True)
def _(program: Program) -> None:
    program.queue("q")
    longest = program.topology.ladder.maximum
    # Time passes on the way to the ladder, but not as much as this.
    for beyond in (longest + 60_000, longest * 2, 1e18):
        with pytest.raises(DelayError, match=r"is longer than .*, the longest of the ladder"):
            program.publish(beyond, key="q", delay=beyond)
    program.publish("waits", key="q", delay=longest)
    assert program.waiting(1) == 1
    if program.is_pure:
        program.expect({"q": ["waits"]})


@table.cases(
    "a delay of {} is refused at the publish",
    {str(delay): delay for delay in (-1, "soon", float("nan"), True, None)},
)
def _(program: Program, value: object) -> None:
    program.queue("q")
    with pytest.raises(DelayError, match="x-delay must be a number of milliseconds"):
        program.publish(1, key="q", delay=None, headers={"x-delay": value})
    program.expect({})


@table.case("a numeric string and a float are delays, too")
def _(program: Program) -> None:
    program.queue("q")
    for delay in ("250", 250.5):
        program.publish(delay, key="q", delay=delay)
    program.expect({"q": ["250", 250.5]})


@table.case("a task of Celery waits for its eta")
def _(program: Program) -> None:
    program.queue("q")
    program.publish_task("due", "q", countdown=-1000)
    program.publish_task("later", "q", countdown=SOON)
    arrivals = program.expect({"q": ["due", "later"]})
    # Celery itself looks at it again.
    assert all(arrival.headers.keys() == {"task", "eta"} for arrival in arrivals)
