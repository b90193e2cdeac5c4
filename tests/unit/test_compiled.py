"""A message that is filled in is, byte for byte, the one that ``send_task`` would have made."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any

import pyarrow as pa
import pytest
from celery import Celery, Task, signals
from celery._state import _task_stack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu import Connection, Exchange, Queue
from kombu.transport.pyamqp import Channel

from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.publishing.frames import encode
from kombu_binary_delay.spark import compiled
from kombu_binary_delay.spark.compiled import (
    REASONS,
    Call,
    Calls,
    Compiler,
    Kind,
    Made,
    headers_of,
)
from kombu_binary_delay.spark.rows import Row, Rows
from kombu_binary_delay.spark.send import _Producer


@pytest.fixture(autouse=True, scope="module")
def apart():
    """Let no handler of another test's, or of an app that one imported, be seen here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signals.before_task_publish, "receivers", [])
        yield


NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
MICROS = round(NOW.timestamp() * 1_000_000)
HOUR = 3_600_000_000  # microseconds


def run():
    """Stand for a task."""


class Recorder(_Producer):
    """A producer that keeps what would be written to the broker, instead of writing it."""

    def __init__(self):
        super().__init__(Connection("memory://"))
        self.written: list[Any] = []
        self.declared = {}
        self.patience = 1.0
        self.batch = self

    def declare(self, entities):
        self.entities = list(entities or ())

    def _publish(self, *given, **options):
        body, priority, kind, encoding, headers, properties, routing_key = given[:7]
        if given[9] == "celeryev":
            # No two events are equal.
            return
        message = Channel.prepare_message(None, body, priority, kind, encoding, headers, properties)
        if self.made is not None:
            destination = Destination(given[9], routing_key)
            made = (message.body, dict(message.properties), destination, list(given[10] or ()))
            self.made.append(Made(*made))
        self.declare(given[10])
        encoded = encode(message.body, message.properties, 131072)
        self.written.append((*encoded, Destination(given[9], routing_key), self.entities))


def fill(producer, kind, call):
    """Publish a message of a kind, as a sender does."""
    run = kind.fill(Calls.of(call))
    if kind.on_call is not None:
        kind.on_call(producer, call.row.task_id)
    [body], [written] = run.bodies, run.template.encode(run, slice(1), [None], run.further)
    # What is read is what is written.
    assert encode(body, run.read(0), 131072)[1] == written
    producer.written.append((body, written, kind.template.destination, kind.declare))


def kind_of(row):
    columns = {name: [value] for name, value in row._asdict().items()}
    schema = {"due": pa.int64(), "expires": pa.int64(), "eta": pa.int64(), "priority": pa.int32()}
    schema = pa.schema([(name, schema.get(name, pa.string())) for name in columns])
    return Rows(pa.RecordBatch.from_pydict(columns, schema)).kinds[0]


def by_templates(app):
    compiler = Compiler(app)

    def publish(producer, call):
        known = compiler.known(kind_of(call.row))
        if not isinstance(known, int):
            known = compiler.way_of(known, call.headers, call.row.expires)
        if isinstance(known, Kind):
            return fill(producer, known, call)
        compiler.publish(producer, kind_of(call.row), call, known)
        return known

    return publish


def made_by(calls, publish):
    producer = Recorder()
    return [publish(producer, call) for call in calls], producer.written


def compare(app, calls):
    """Check that both ways make the same; return the reasons for which ``send_task`` was called."""
    app.now = lambda: NOW
    _, expected = made_by(calls, lambda producer, call: call.send(app, producer))
    reasons, made = made_by(calls, by_templates(app))
    assert made == expected
    return reasons


texts = st.text(max_size=30) | st.sampled_from(["it's", 'a "b"', "\\n", "ü" * 600, "x" * 1030])
scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | texts


def is_finite(value):
    """Return whether a header can have this value."""
    return not isinstance(value, float) or math.isfinite(value)


values = st.recursive(
    scalars,
    lambda nested: st.lists(nested, max_size=3) | st.dictionaries(texts, nested, max_size=3),
    max_leaves=4,
)
rows = st.lists(
    st.fixed_dictionaries(
        {
            "args": st.lists(values, max_size=4),
            "kwargs": st.dictionaries(texts, values, max_size=3),
            "due": st.integers(-(10**12), 10**13),
            "left": st.integers(0, 10**13),
            "tenant": scalars.filter(is_finite),
        }
    ),
    min_size=3,
    max_size=5,
)
options = st.fixed_dictionaries(
    {},
    optional={
        "queue": st.sampled_from(["mail", "post", "unheard of"]),
        "exchange": st.sampled_from(["post", "elsewhere"]),
        "routing_key": st.sampled_from(["m.x", "key"]),
        "priority": st.integers(0, 9),
    },
)
MAIL = Queue("mail", Exchange("post", "topic"), routing_key="m.mail", max_priority=9)
POST = Queue("post", Exchange("parcels", "direct", delivery_mode=1), routing_key="p")
routes = st.sampled_from(
    [
        None,
        {"shop.*": "mail"},
        {"shop.remind": {"queue": "post", "priority": 3, "headers": {"route": 1}}},
        ([("shop.*", {"exchange": "post", "routing_key": "m.r", "exchange_type": "topic"})],),
        {"other": "post"},
    ]
)
serializers = [serializer for serializer in ("json", "pickle", "yaml", "msgpack") if serializer in
               ("json", "pickle") or find_spec(serializer)]  # fmt: skip
configurations = st.fixed_dictionaries(
    {
        "task_routes": routes,
        "task_queues": st.sampled_from([None, (MAIL, POST, Queue("celery"))]),
        "task_serializer": st.sampled_from(serializers),
        "task_compression": st.sampled_from([None, "gzip", "bzip2"]),
        "task_default_delivery_mode": st.sampled_from([1, 2]),
        "task_ignore_result": st.booleans(),
        "task_default_priority": st.none() | st.integers(0, 9),
        "timezone": st.sampled_from(["UTC", "Europe/Berlin"]),
        "broker_transport": st.just("kombu_binary_delay:Transport"),
    }
)
#: What a task that the application knows says of its messages, which Celery 5.7 reads.
of_tasks = st.none() | st.fixed_dictionaries(
    {},
    optional={
        "time_limit": st.just(5),
        "ignore_result": st.booleans(),
        "compression": st.just("gzip"),
        "serializer": st.just("json"),
    },
)


def call(task_id, due, **given):
    columns: dict[str, Any] = {
        name: json.dumps(value) if isinstance(value, (dict, list)) else value
        for name, value in given.items()
    }
    row = Row(task_id, "shop.remind", **columns)
    return Call(row, due, headers_of(row.headers))


def call_of(row, given, asked):
    return call(
        f"id-{row['due']}-{len(row['args'])}-{row['left']}",
        args=row["args"],
        kwargs=row["kwargs"],
        due=MICROS + row["due"],
        expires=MICROS + row["left"] if "expires" in asked else None,
        headers={"tenant": row["tenant"], "b": [1, {}]} if "headers" in asked else None,
        **given,
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(rows, options, configurations, of_tasks, st.sets(st.sampled_from(["headers", "expires"])))
def test_a_message_is_byte_for_byte_what_send_task_makes(
    rows, given, configuration, of_task, asked
):
    app = Celery("shop", set_as_current=False)
    app.conf.update(configuration)
    if of_task is not None:
        app.task(name="shop.remind", shared=False, lazy=False, **of_task)(run)
    calls = [call_of(row, given, asked) for row in rows]
    assert set(compare(app, calls)) == {None}


def calls(number=4, **fields):
    return [
        call(f"id-{place}", MICROS + HOUR, args=[place], kwargs={"number": place}, **fields)
        for place in range(number)
    ]


def test_the_first_two_of_a_kind_are_made_by_send_task_and_all_others_filled_in(monkeypatch):
    by_send_task = []
    send = Call.send

    def count(*call):
        by_send_task.append(call)
        send(*call)

    monkeypatch.setattr(Call, "send", count)
    app = Celery("shop", set_as_current=False)
    publish, producer = by_templates(app), Recorder()
    for asked in [*calls(5), *calls(5, queue="mail")]:
        assert publish(producer, asked) is None
    assert len(by_send_task) == 4
    assert len(producer.written) == 10


class OwnTask(Task):
    def apply_async(self, *args, **kwargs):
        return super().apply_async(*args, **kwargs)


class OwnApp(Celery):
    def send_task(self, *args, **kwargs):
        return super().send_task(*args, **kwargs)


class OldRouter:
    def route_for_task(self, task, args=None, kwargs=None):
        return {"queue": "odd" if args and args[0] % 2 else "even"}


def by_arguments(name, args, kwargs, options, task=None, **_):
    return {"queue": "odd" if args and args[0] % 2 else "even"}


def with_task(app):
    app.task(name="shop.remind", shared=False, lazy=False, base=OwnTask)(run)


def wrapped(app):
    send_task = app.send_task
    app.send_task = lambda *args, **kwargs: send_task(*args, **kwargs)  # noqa: PLW0108


def with_own_amqp(app):
    create = app.amqp.create_task_message
    app.amqp.create_task_message = lambda *args, **kwargs: create(*args, **kwargs)  # noqa: PLW0108


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda app: app.conf.update(task_protocol=1), compiled.PROTOCOL),
        (wrapped, compiled.APPLICATION),
        (with_own_amqp, compiled.APPLICATION),
        (lambda app: app.conf.update(task_routes=(by_arguments,)), compiled.ROUTER),
        (lambda app: app.conf.update(task_routes=[{"a": "b"}, OldRouter()]), compiled.ROUTER),
        (lambda app: app.conf.update(task_routes=f"{__name__}.by_arguments"), compiled.ROUTER),
        (lambda app: app.conf.update(task_send_sent_event=True), compiled.EVENT),
        (with_task, compiled.TASK),
    ],
)
def test_where_the_application_has_a_say_send_task_makes_all_and_it_is_said_why(change, reason):
    app = Celery("shop", set_as_current=False)
    change(app)
    assert compare(app, calls()) == [reason] * 4
    assert REASONS[reason]


def test_an_application_with_a_send_task_of_its_own_is_asked():
    assert compare(OwnApp("shop", set_as_current=False), calls()) == [compiled.APPLICATION] * 4


def test_a_publish_within_a_workers_task_is_its_child():
    app = Celery("shop", set_as_current=False)
    parent = app.task(name="parent", shared=False, lazy=False)(run)
    parent.push_request(id="parent", root_id="root", called_directly=False)
    _task_stack.push(parent)
    try:
        assert compare(app, calls()) == [compiled.WORKER] * 4
    finally:
        _task_stack.pop()
        parent.pop_request()


@pytest.mark.parametrize(
    "signal",
    [signals.before_task_publish, signals.after_task_publish, signals.task_sent],
    ids=lambda signal: signal.name,
)
def test_handlers_of_a_publish_are_called_for_each_message(signal):
    heard: list[Any] = []
    app = Celery("shop", set_as_current=False)

    def hears(sender, **given):
        heard.append(sender)
        if "headers" in given:
            given["headers"]["number"] = given["body"][0][0]

    signal.connect(hears, sender="shop.remind")
    try:
        assert compare(app, calls()) == [compiled.HANDLER] * 4
        assert heard == ["shop.remind"] * 8
    finally:
        signal.disconnect(hears, sender="shop.remind")
    signal.connect(hears, sender="another")
    try:
        assert compare(app, calls()) == [None] * 4
    finally:
        signal.disconnect(hears, sender="another")


def test_a_row_that_is_none_of_its_kind_goes_by_send_task_and_the_others_do_not():
    app = Celery("shop", set_as_current=False)
    rows = calls(5, headers={"tenant": 1})
    rows[3] = call("id-3", MICROS + HOUR, headers={"shadow": "another name"})
    assert compare(app, rows) == [None, None, None, compiled.HEADERS, None]
    rows = calls(5, expires=MICROS + HOUR)
    for place in (0, 4):
        rows[place] = rows[place]._replace(row=rows[place].row._replace(expires=MICROS - 1))
    assert compare(app, rows) == [compiled.EXPIRED, None, None, None, compiled.EXPIRED]


def test_a_second_message_that_is_not_what_the_template_says_ends_the_filling_in(monkeypatch):
    app = Celery("shop", set_as_current=False)
    fill, filled = Kind.fill, []

    def differs(kind, calls):
        filled.append(calls)
        run = fill(kind, calls)
        run.bodies = [body + b" " * (len(filled) > 1) for body in run.bodies]
        return run

    monkeypatch.setattr(Kind, "fill", differs)
    assert compare(app, calls(4)) == [None, None, compiled.DIFFERENT, compiled.DIFFERENT]


def test_results_are_awaited_as_send_task_does(monkeypatch):
    app = Celery("shop", set_as_current=False)
    asked: list[str] = []
    monkeypatch.setattr(
        type(app.backend),
        "on_task_call",
        lambda *arguments: asked.append(arguments[-1]),
        raising=False,
    )
    compare(app, calls(4))
    assert asked == [f"id-{number}" for number in range(4)] * 2
