"""What is told of delayed messages in virtual time, and exported by the real libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Queue
from opentelemetry import baggage, context
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from kombu_binary_delay import cancel, replace, reschedule, telemetry
from kombu_binary_delay.telemetry import labels, otel, prometheus, watch
from tests.testing.programs import OURS

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "lateness.md"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def stack(monkeypatch):
    """End what a test begins, and its listening."""
    for listeners in ("published", "delivered", "dropped"):
        monkeypatch.setattr(watch, listeners, getattr(watch, listeners).copy())
    with ExitStack() as stack:
        yield stack


class Shop:
    """An app whose task notes what its requests hold."""

    def __init__(self) -> None:
        self.app = app = Celery("shop", broker="amqp://", backend="cache+memory://")
        app.conf.broker_transport = OURS
        app.conf.broker_transport_options = {"binary_delay": {"radix": 2}}
        app.conf.worker_hijack_root_logger = False
        self.requests: list[dict[str, Any]] = []

        @app.task(name="pay", shared=False, bind=True, max_retries=None)
        def pay(self: Any, times: int = 0, countdown: float = 3) -> None:
            requests.append(dict(vars(self.request)))
            if self.request.retries < times:
                raise self.retry(countdown=countdown)

        requests, self.pay = self.requests, pay


@pytest.fixture
def shop():
    shop = Shop()
    yield shop
    shop.app.close()


def test_a_listener_learns_how_late_each_message_is(delayed, shop, stack):
    sent: list[telemetry.Published] = []
    came: list[telemetry.Delivered] = []
    telemetry.on_published(sent.append)
    telemetry.on_delivered(came.append)
    begin = delayed.now.timestamp()

    shop.pay.apply_async(countdown=10, task_id="late")
    delayed.outage(seconds=60)
    shop.pay.apply_async(countdown=3, task_id="on time")
    shop.pay.delay()
    delayed.run_until_idle()

    assert [(one.id, one.task, one.routing_key, one.asked) for one in sent] == [
        ("late", "pay", "celery", 10),
        ("on time", "pay", "celery", 3),
    ]
    on_time, late = sorted(came, key=lambda one: one.lateness)
    assert (on_time.id, on_time.task, on_time.queue, on_time.asked) == (
        "on time",
        "pay",
        "celery",
        3,
    )
    assert (on_time.due, on_time.lateness) == pytest.approx((begin + 63, 0), abs=0.001)
    assert late.id == "late"
    assert 50 <= late.lateness < 60
    # All of it is the ladder's, whose broker was down.
    assert late.left == int(late.arrived)
    assert late.broker_lateness == pytest.approx(late.lateness, abs=1)


def test_lateness_says_what_the_backlog_of_a_queue_adds(delayed, stack):
    came: list[telemetry.Delivered] = []
    telemetry.on_delivered(came.append)
    with Connection("amqp://", transport=OURS) as connection:
        queue = Queue("mail")(connection.channel())
        queue.declare()
        connection.Producer().publish(
            "hello", routing_key="mail", headers={"x-delay": 2000}, message_id="a"
        )
        delayed.advance(minutes=1)
        queue.get().requeue()
        assert queue.get().headers == {}

    assert [(one.id, one.task, one.queue) for one in came] == [("a", "", "mail")] * 2
    assert [one.redelivered for one in came] == [False, True]
    for one in came:
        assert one.lateness == pytest.approx(58, abs=0.001)
        assert one.broker_lateness == pytest.approx(0, abs=1)


def test_a_task_knows_how_late_it_came_and_its_retry_does_not_inherit_that(delayed, shop, stack):
    telemetry.on_delivered(lambda _: None)
    shop.pay.apply_async((1, 0), countdown=3)
    delayed.run_until_idle()

    first, again = shop.requests
    assert first[watch.DELIVERED]["asked"] == 3
    assert first[watch.DELIVERED]["lateness"] == pytest.approx(0, abs=0.001)
    # It was not delayed.
    assert watch.DELIVERED not in again


def test_while_nobody_listens_a_message_is_as_it_was_published(delayed, shop):
    shop.pay.apply_async(countdown=3)
    delayed.run_until_idle()
    assert not [name for name in shop.requests[0] if name.startswith("x-")]


def test_a_listener_that_fails_is_logged_and_stops_nothing(delayed, shop, stack, caplog):
    def fail(_: object) -> None:
        raise ValueError("a listener's own")

    for register in (telemetry.on_published, telemetry.on_delivered):
        register(fail)
    shop.pay.apply_async(countdown=3)
    delayed.run_until_idle()
    assert len(shop.requests) == 1
    assert caplog.text.count("a listener's own") >= 2


def run_some(delayed, shop):
    """Let two tasks and a message come on time, and let three be taken back."""
    with Connection("amqp://", transport=OURS) as connection:
        queue = Queue("mail")(connection.channel())
        queue.declare()
        for name in ("kept", "gone"):
            connection.Producer().publish(
                name, routing_key="mail", headers={"x-delay": 2000}, message_id=name
            )
        cancel("gone", connection=connection)
        tasks = [shop.pay.apply_async(countdown=3) for _ in range(3)]
        tasks[0].revoke()
        replace(shop.pay.s(), tasks[1].id, countdown=4)
        delayed.run_until_idle()
        assert queue.get().payload == "kept"
        assert queue.get() is None


def test_opentelemetry_counts_what_came_and_what_did_not(delayed, shop, stack):
    reader = InMemoryMetricReader()
    end = otel.instrument(MeterProvider([reader]))
    stack.callback(end)
    assert otel.instrument() == end
    run_some(delayed, shop)

    metrics: Any = reader.get_metrics_data()
    points = {
        metric.name: {tuple(point.attributes.values()): point for point in metric.data.data_points}
        for metric in metrics.resource_metrics[0].scope_metrics[0].metrics
    }
    assert {pair: point.value for pair, point in points[labels.DELIVERED].items()} == {
        ("celery", "pay"): 2,
        ("mail", ""): 1,
    }
    assert {key: point.value for key, point in points[labels.DROPPED].items()} == {
        ("celery", "pay", "cancelled"): 1,
        ("celery", "pay", "superseded"): 1,
        ("mail", "", "cancelled"): 1,
    }
    lateness = points[labels.LATENESS]["celery", "pay"]
    assert lateness.explicit_bounds == labels.BUCKETS
    assert lateness.bucket_counts[0] == lateness.count == 2


def test_prometheus_counts_the_same_until_it_is_ended(delayed, shop, stack):
    registry = CollectorRegistry()
    end = prometheus.instrument(registry)
    run_some(delayed, shop)

    pair = {"messaging_destination_name": "celery", "celery_task_name": "pay"}
    value = registry.get_sample_value
    assert value("messaging_delay_delivered_total", pair) == 2
    assert value("messaging_delay_dropped_total", {**pair, "reason": "superseded"}) == 1
    assert value("messaging_delay_lateness_seconds_bucket", {**pair, "le": "0.125"}) == 2
    end()
    assert generate_latest(registry) == b""
    assert not watch.delivered


PROCESS = """
import os, sys, urllib.request
from kombu_binary_delay.telemetry import Delivered, prometheus, watch
prometheus.instrument()
if os.fork() == 0:
    watch.notify(watch.delivered, Delivered("", "pay", "celery", 3.0, 10.0, 10, 10.5))
    os._exit(0)
os.wait()
watch.notify(watch.delivered, Delivered("", "pay", "celery", 3.0, 10.0, 10, 10.5))
from dev.service import free_ports
[port] = free_ports(1)
end = prometheus.serve(port)
print(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode())
end()
"""


def test_one_page_is_of_all_processes_that_share_a_folder(tmp_path):
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROCESS]
    page = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    labelled = '{celery_task_name="pay",messaging_destination_name="celery"}'
    assert f"messaging_delay_lateness_seconds_count{labelled} 2.0" in page.stdout


def test_however_many_names_there_are_the_labels_are_few():
    named = labels.Labels()
    assert named.pair("amq.gen-abc", "") == ("(temporary)", "")
    pairs = {named.pair(f"queue {number}", "") for number in range(2 * labels.MOST_PAIRS)}
    assert len(pairs) == labels.MOST_PAIRS
    assert named.pair("one more", "task") == ("(other)", "(other)")
    assert named.pair("queue 0", "") == ("queue 0", "")


RECIPE = """
import re, sys
from functools import partial
import sentry_sdk
from sentry_sdk.transport import Transport
from kombu_binary_delay.testing import Delayed

class Printer(Transport):
    def capture_envelope(self, envelope):
        for span in envelope.get_transaction_event()["spans"]:
            print(span["op"], span["data"][LATENCY])

options = {"dsn": "http://a@localhost/1", "traces_sample_rate": 1, "transport": Printer}
sentry_sdk.init = partial(sentry_sdk.init, **options)
for code in re.findall("<!-- file.*?```python(.*?)```", open(sys.argv[1]).read(), re.DOTALL):
    exec(code)

@app.task(name="pay", shared=False)
def pay():
    pass

with Delayed() as delayed:
    pay.apply_async(countdown=60)
    delayed.outage(seconds=100)
    delayed.run_until_idle()
"""


def test_the_code_of_the_page_tells_sentry_the_lateness_alone():
    command = [sys.executable, "-c", RECIPE, str(PAGE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # By the listener, and by Sentry, in milliseconds: some levels remain after the outage.
    (task, queue, asked, lateness), (op, latency) = map(str.split, done.stdout.splitlines())
    assert (task, queue, asked, op) == ("pay", "celery", "60.0", "queue.process")
    assert 40 <= float(lateness) < 60
    assert float(latency) == pytest.approx(1000 * float(lateness), abs=1)


# -- traces ----------------------------------------------------------------------------------------


@pytest.fixture
def spans(stack):
    """Trace as a program does, with links, and collect the spans in memory."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    CeleryInstrumentor().instrument(tracer_provider=provider, use_span_links=True)
    stack.callback(CeleryInstrumentor().uninstrument)
    stack.callback(otel.instrument(MeterProvider()))
    return exporter


def delay_of(span: ReadableSpan) -> dict[str, Any]:
    return {
        name.removeprefix("messaging.delay."): value
        for name, value in (span.attributes or {}).items()
        if name.startswith("messaging.delay.")
    }


def test_the_spans_of_a_task_that_retries_are_linked_and_say_how_late(delayed, shop, stack, spans):
    begin = delayed.now.timestamp()
    token = context.attach(baggage.set_baggage("customer", "7"))
    shop.pay.apply_async((2,), countdown=3)
    context.detach(token)
    delayed.run_until_idle()

    finished = spans.get_finished_spans()
    sent = [span for span in finished if span.name == "apply_async/pay"]
    ran = [span for span in finished if span.name == "run/pay"]
    # Each run links to the publish that it came by, and begins a trace of its own.
    assert [[link.context.span_id for link in span.links] for span in ran] == [
        [span.context.span_id] for span in sent
    ]
    assert len({span.context.trace_id for span in ran}) == 3
    assert [span.parent.span_id for span in sent[1:]] == [span.context.span_id for span in ran[:2]]
    for number, (publish, run) in enumerate(zip(sent, ran, strict=True), 1):
        due = pytest.approx(begin + 3 * number, abs=0.001)
        assert delay_of(publish) == {"asked": 3, "due": due}
        assert delay_of(run) == {
            "asked": 3,
            "due": due,
            "lateness": pytest.approx(0, abs=0.001),
        }
    assert [request["baggage"] for request in shop.requests] == ["customer=7"] * 3


def test_what_is_postponed_or_replaced_keeps_its_trace(delayed, shop):
    headers = {"traceparent": TRACEPARENT, "baggage": "customer=7"}
    postponed = shop.pay.apply_async(countdown=3, headers=headers)
    replaced = shop.pay.apply_async(countdown=3)
    reschedule(postponed, countdown=10)
    replace(shop.pay.s(), replaced.id, countdown=10, headers=headers)
    delayed.run_until_idle()

    assert len(shop.requests) == 2
    for request in shop.requests:
        assert {name: request[name] for name in headers} == headers


def test_a_programs_own_span_gets_no_attributes_of_ours(delayed, shop, stack, spans):
    tracer = TracerProvider().get_tracer("mine")
    CeleryInstrumentor().uninstrument()
    with tracer.start_as_current_span("mine") as span:
        shop.pay.apply_async(countdown=3)
    assert isinstance(span, ReadableSpan)
    assert not span.attributes
    CeleryInstrumentor().instrument()
