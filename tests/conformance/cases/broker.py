"""What only a broker can show."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from celery import Celery
from kombu import Producer

from dev.broker import Broker
from tests.conformance.program import SOON
from tests.conformance.table import Table

if TYPE_CHECKING:
    from tests.conformance.real import RealProgram

table = Table(broker=True)


CONFIRMS = {"off": False, "on": True}


@table.cases("a quorum queue is a destination, publisher confirms {}", CONFIRMS)
def _(program: RealProgram, *, value: bool) -> None:
    into_queues_of(program, "quorum", confirms=value)


@table.cases("a classic queue is a destination, publisher confirms {}", CONFIRMS)
def _(program: RealProgram, *, value: bool) -> None:
    into_queues_of(program, "classic", confirms=value)


def into_queues_of(program: RealProgram, kind: str, *, confirms: bool) -> None:
    program.new_process(confirm_publish=confirms)
    program.queue("q", **{"x-queue-type": kind})
    program.exchange("x", "topic")
    program.bind("q", "x", "#")
    for number in range(20):
        program.publish(f"by name {number}", "", "q", delay=SOON + number)
        program.publish(f"by exchange {number}", "x", "k", delay=SOON + number)
    program.expect({"q": [f"by {way} {n}" for way in ("name", "exchange") for n in range(20)]})


@table.case("with publisher confirms, a publish returns when the ladder has the message")
def _(program: RealProgram) -> None:
    program.new_process(confirm_publish=True)
    program.queue("q")
    program.publish(1, key="q", delay=3_600_000)
    assert program.waiting(1) == 1


@table.case("the ladder's queues are of the type that was asked for")
def _(program: RealProgram) -> None:
    program.queue("q")
    program.publish(1, key="q", delay=program.later)
    levels = [row for row in program.vhost.queues() if program.topology.owns(row["name"])]
    assert {row["type"] for row in levels} == {program.topology.queue_type}
    program.expect({"q": [1]})


@table.case("a consumer without the transport gets the message when it is due")
def _(program: RealProgram) -> None:
    program.queue("q")
    program.publish(1, key="q")
    # Nothing of ours looks at the queue meanwhile.
    program.ready("q", 1)
    stock = program.connect("amqp").default_channel
    message = stock.message_to_python(stock.basic_get("q", no_ack=True))
    assert message.decode() == 1


@table.case("what Celery sends with a countdown arrives as what it sends without")
def _(program: RealProgram) -> None:
    app = Celery("conformance", broker=program.vhost.url, set_as_current=False)
    app.conf.broker_transport = "kombu_binary_delay:Transport"
    app.conf.broker_transport_options = {"binary_delay": program.settings}
    for countdown in (None, SOON / 1000):
        with app.connection_for_write() as connection, Producer(connection) as producer:
            app.send_task("tasks.add", (2, 2), countdown=countdown, producer=producer)
    app.close()
    program.ready("celery", 2)
    prompt, delayed = (program.take("celery") for _ in range(2))
    assert delayed.headers.keys() == prompt.headers.keys()
    assert delayed.delivery_info["routing_key"] == prompt.delivery_info["routing_key"] == "celery"
    assert delayed.delivery_info["exchange"] == prompt.delivery_info["exchange"]
    assert delayed.payload == prompt.payload


@table.case("a restart of the broker loses nothing, whether due before or after", restarts=True)
def _(program: RealProgram) -> None:
    program.new_process(confirm_publish=True)
    program.queue("q")
    program.publish("makes the ladder", key="q", delay=15_000)
    # A quorum queue that is younger than about a second may come back empty.
    time.sleep(3)
    for number, delay in enumerate((SOON, 4000, 15_000)):
        program.publish(number, key="q", delay=delay)
    broker = program.vhost.broker
    assert isinstance(broker, Broker), "a broker that may be restarted"
    broker.restart()
    program.new_process()
    program.queue("q")
    program.expect({"q": ["makes the ladder", 0, 1, 2]})
