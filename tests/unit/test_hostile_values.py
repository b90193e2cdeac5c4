"""Nothing that anybody writes ends a reader: each value is read, left, or refused by our errors."""

from __future__ import annotations

from contextlib import suppress
from struct import pack
from typing import Any

import amqp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kombu_binary_delay import BinaryDelayError, Ladder, LadderError, Settings
from kombu_binary_delay.amendments.memory import Memory
from kombu_binary_delay.amendments.record import Cancel, CancelStamped, Postpone, Supersede
from kombu_binary_delay.celery_side import tasks
from kombu_binary_delay.journal import events
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.delay import is_over, is_retry, keep_due
from kombu_binary_delay.ladder.envelope import HEADERS
from kombu_binary_delay.ladder.foreign import CELERY, NSERVICEBUS, ladder_of_name
from kombu_binary_delay.ladder.identity import id_and_headers
from kombu_binary_delay.ladder.parts import Exchange, Part
from kombu_binary_delay.ladder.recognise import (
    ladder_of_exchange,
    parking_of,
    topology_of_name,
)
from kombu_binary_delay.ladder.returns import returns
from kombu_binary_delay.operate.migrate import _Sorter as Migrating
from kombu_binary_delay.operate.mover import Done, Keep, Send
from kombu_binary_delay.operate.reading import (
    UNREADABLE_ERRORS,
    Source,
    delay_queues,
    put_back,
    read,
)
from kombu_binary_delay.operate.redrive import _Sorter as Redriving
from kombu_binary_delay.operate.text import plain
from kombu_binary_delay.operate.waiting.node import NodeReader
from kombu_binary_delay.publishing.frames import EncodedMessage
from kombu_binary_delay.routing.router import Router
from kombu_binary_delay.wire.header_frames import without_deaths
from tests.hostile import KEYS, LADDERS, NAMES, OBJECTS, OURS, headers, properties
from tests.raw_messages import RAW
from tests.simulated_broker import SimulatedBroker

NOW = 1_900_000_000_000
SERVER = {"product": "RabbitMQ", "version": "4.3.0"}
#: The start of a header frame's payload, with the size of a body that does not matter here.
START = pack(">HHQ", 60, 0, 7)
SETTINGS = [
    Settings(radix=2, levels=12, lanes=2),
    Settings(radix=2, levels=12, queue_per_delay=True, queue_type="classic"),
    Settings(foreign_ladder="celery"),
    Settings(foreign_ladder="nservicebus"),
]


def full_memory() -> Memory:
    """Return amendments of all kinds, for the ids ``i`` and ``j``, the key ``k`` and a stamp."""
    memory = Memory(10**12)
    for record in (
        Cancel(("i",), NOW, NOW),
        CancelStamped((("order", ("1",)),), NOW),
        Postpone("j", NOW + 1, NOW),
        Supersede("j", "1-b", NOW, NOW),
        Supersede("k", "1-b", NOW, NOW, keyed=True),
    ):
        memory.learn(record, NOW)
    return memory


def written(properties: dict[str, Any]) -> bytes:
    """Return a message's properties as they are written; nothing if they are nested too deep.

    Who publishes them leaves such a message: tests/broker/test_hostile_input.py.
    """
    with suppress(RecursionError):
        return EncodedMessage(b"", dict(properties), 10**6)._encoded  # noqa: SLF001 - as it is sent
    return b""


# -- what a program publishes ----------------------------------------------------------------------


@given(
    st.sampled_from(SETTINGS),
    properties(OBJECTS),
    st.sampled_from(["", "", "events"]) | NAMES | OBJECTS,
    NAMES | OBJECTS,
)
def test_a_publish_is_planned_or_refused_by_an_error_of_ours(settings, given, exchange, key):
    router, broker = Router(settings, SERVER), SimulatedBroker()
    broker.declare(Part((Exchange("events", "topic"),)))
    now, to = NOW * 1000, Destination(exchange, key)
    with suppress(BinaryDelayError):
        due = router.due(given[HEADERS], now, "name")
        plan = router.plans.publish(given, due, to, now)
        is_retry(given[HEADERS])
        broker.run(router.prepare(plan.needs, now))
        plan = router.plans.publish(given, due, to, now, plan.lane)
        if isinstance(exchange, str) and isinstance(key, str):
            events.scheduled(router.topology, plan.properties, plan.exchange, plan.routing_key)
        if due and due > now:
            # Who receives it gets it as it was published.
            delivery = router.deliveries.received(
                router.topology.delivery, plan.routing_key, plan.properties, ""
            )
            assert delivery
            assert delivery.properties.get("expiration") == given.get("expiration")


# -- what a consumer receives ----------------------------------------------------------------------


@given(
    st.sampled_from(SETTINGS),
    properties(),
    st.sampled_from([ladder.delivery for ladder in LADDERS]) | NAMES,
    NAMES,
)
def test_what_is_received_is_judged_noted_and_published_again(settings, given, exchange, key):
    router = Router(settings, SERVER)
    delivery = router.deliveries.received(exchange, key, given, "mail")
    to, arrived = delivery or (Destination(exchange, key), given)
    headers = arrived[HEADERS]

    assert all(isinstance(part, str) for part in to)
    assert "x-binary-delay" not in headers or not delivery
    if "expiration" in arrived and arrived["expiration"] != given.get("expiration"):
        assert 0 <= int(arrived["expiration"]) < 2**63
    memory = full_memory()
    for published in (given, arrived):
        assert isinstance(id_and_headers(published)[0], str)
        for ask in (memory.judge, memory.revives, memory.awaits_record):
            ask(published, NOW)
        assert events.from_line(
            events.to_line({"event": "released", "at": 1, **events.about(published, *to)})
        )
    assert isinstance(returns(headers), int)
    is_over(headers.get("x-delay"))
    tasks.with_own_nested(headers)
    if "task" in headers:
        tasks.as_resent(headers)
    written(arrived)
    with suppress(BinaryDelayError):
        again = router.plans.publish(
            arrived, NOW * 1000 + 10**6, Destination("", "mail"), NOW * 1000
        )
        written(again.properties)


@given(st.binary(max_size=60), st.booleans())
def test_no_header_frame_is_too_odd_for_leaving_out_deaths(raw, shown):
    field = b"\x0ex-binary-delayF\0\0\0\0\x07x-deathA" if shown else b"\x07x-deathA"
    payload = START + pack(">HI", 0x2000, len(field) + len(raw)) + field + raw

    for frame in (payload, START + raw):
        left = without_deaths(frame, OURS.owns)
        assert len(left) <= len(frame)


# -- what an operator's command reads --------------------------------------------------------------

KEY = NAMES | st.sampled_from(KEYS)
SOURCES = [
    Source("q"),
    Source("level", OURS, 4000, 2),
    Source("level", CELERY, 1000, 0),
    Source("level", NSERVICEBUS, 8000, 3),
]
of_each_kind = pytest.mark.parametrize(
    "source", SOURCES, ids=lambda source: type(source.topology).__name__
)


def message(given: dict[str, Any], key: str, body: Any = b"", exchange: str = "") -> Any:
    built = amqp.Message(body, **given)
    built.delivery_info = {"routing_key": key, "exchange": exchange}
    return built


@of_each_kind
@given(headers=headers(), key=KEY)
def test_a_message_that_waits_is_read_or_cannot_be_read(source, headers, key):
    properties = {HEADERS: headers}

    put_back(source, key, properties, NOW, "x")
    reading = None
    with suppress(*UNREADABLE_ERRORS):
        reading = read(source, key, properties, NOW, lambda _: "")
    if reading is not None:
        keep_due(reading.properties[HEADERS], reading.due)


class Nothing:
    """A broker's answers, where there is nothing; what is declared is."""

    def __getattr__(self, _: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    __enter__ = __call__

    def __exit__(self, *_: object) -> None:
        return None


BODIES = st.sampled_from([b"", b'{"cancel":["i"],"at":1}', b"[" * 9999])


@of_each_kind
@given(st.sampled_from([OURS, CELERY]), st.builds(message, properties(), KEY, BODIES, NAMES))
def test_what_waits_is_moved_or_left(source, to, waiting):
    emptied = [source.topology] if source.topology else []
    broker: Any = Nothing()
    broker.bindings, broker.exchanges, broker.has_queue = frozenset(), (), lambda _: False
    arguments = (emptied, to, broker, broker.bindings, "poison", broker, broker, broker, None)
    sorter = Migrating(*arguments)
    sorter._has_poison = True  # noqa: SLF001 - nothing is declared

    decision = sorter.decide(source, waiting)

    assert isinstance(decision, (Send, Keep, Done))
    if isinstance(decision, Send):
        written(decision.message.properties)


@given(given=properties(), key=KEY)
@example({HEADERS: {"x-binary-delay": {"expiration": "soon"}}}, "0.1.@..mail")
def test_what_is_parked_is_sent_on_or_left(given, key):
    sorter = Redriving(OURS, Nothing(), None, Destination("", "mail"))  # type: ignore[arg-type] # see there
    decision = sorter.decide(message(given, key))
    assert isinstance(decision, (Send, Keep))
    if isinstance(decision, Send):
        written(decision.message.properties)


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
def test_a_node_lists_the_others_where_one_message_cannot_be_decoded(raw):
    waiters = NodeReader.__new__(NodeReader)
    waiters._unreadable = 0  # noqa: SLF001 - without a node

    assert waiters._task(SOURCES[1], b"0.1.@..mail", raw, NOW, set()) is None  # noqa: SLF001
    assert waiters._unreadable == 1  # noqa: SLF001


@given(NAMES)
def test_a_name_is_a_ladders_or_not(name):
    ladder = topology_of_name(name)
    if ladder is not None:
        assert ladder.whole
    ladder_of_name(name)
    ladder_of_exchange(name, OURS)
    parking_of(name)
    delay_queues(OURS, [name])
    plain(name)
    for ladder_ in LADDERS:
        ladder_.owns(name)
        ladder_.is_named_in(name)
        with suppress(BinaryDelayError):
            ladder_.to_queue(name)
        with suppress(BinaryDelayError):
            ladder_.parse(name, Destination(name, name))
        with suppress(BinaryDelayError):
            ladder_.address(("1",), Destination("", name))
    with suppress(LadderError):
        Ladder.from_name(name)
    assert len(OURS.mirror_name(name).encode("utf-8", "surrogatepass")) <= 255
