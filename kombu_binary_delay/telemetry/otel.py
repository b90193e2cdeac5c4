"""Lateness by OpenTelemetry: metrics, and attributes of the spans of its Celery instrumentation.

It needs the extra ``otel``. Celery is used only if the program has loaded it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from opentelemetry import metrics, trace

from . import labels, watch
from .watch import Delivered, Dropped, Published

#: The attributes of a publisher's and a run's span, in seconds; the first two of both.
ASKED, DUE, LATENESS = (f"messaging.delay.{name}" for name in ("asked", "due", "lateness"))
_SCOPE = "kombu_binary_delay"
#: What ends the recording of this process.
_ends: list[Callable[[], None]] = []


def instrument(meter_provider: metrics.MeterProvider | None = None) -> Callable[[], None]:
    """Record the lateness of delayed messages, and write it on the spans of tasks.

    A second call in a process changes nothing, and returns what the first did.

    :param meter_provider: by default, the global one.
    :returns: what ends it.
    """
    if _ends:
        return _ends[0]
    meter = metrics.get_meter(_SCOPE, meter_provider=meter_provider)
    lateness = meter.create_histogram(
        labels.LATENESS,
        "s",
        labels.WHAT[labels.LATENESS],
        explicit_bucket_boundaries_advisory=labels.BUCKETS,
    )
    delivered = meter.create_counter(labels.DELIVERED, "1", labels.WHAT[labels.DELIVERED])
    dropped = meter.create_counter(labels.DROPPED, "1", labels.WHAT[labels.DROPPED])
    named = labels.Labels()

    def attributes(queue: str, task: str) -> dict[str, str]:
        destination, name = named.pair(queue, task)
        return {labels.DESTINATION: destination, labels.TASK: name}

    def on_delivered(message: Delivered) -> None:
        about = attributes(message.queue, message.task)
        delivered.add(1, about)
        if not message.redelivered:
            # Why it came again is no lateness of the broker's.
            lateness.record(max(message.lateness, 0.0), about)

    def on_dropped(message: Dropped) -> None:
        about = attributes(message.queue, watch.task_of(message.properties))
        dropped.add(1, {**about, labels.REASON: message.reason})

    watch.on_published(_on_published)
    watch.on_delivered(on_delivered)
    watch.on_dropped(on_dropped)
    with ExitStack() as stack:
        stack.callback(watch.published.remove, _on_published)
        stack.callback(watch.delivered.remove, on_delivered)
        stack.callback(watch.dropped.remove, on_dropped)
        signals: Any = sys.modules.get("celery.signals")
        if signals is not None:
            # At both ends of a run, since its span may begin after the first of them is heard.
            for signal in (signals.task_prerun, signals.task_postrun):
                signal.connect(_on_run, weak=False, dispatch_uid=_SCOPE)
                stack.callback(signal.disconnect, dispatch_uid=_SCOPE)
        stack.callback(_ends.clear)
        _ends.append(stack.pop_all().close)
    return _ends[0]


def _on_published(message: Published) -> None:
    _write(trace.SpanKind.PRODUCER, {ASKED: message.asked, DUE: message.due})


def _on_run(task: Any = None, **_: Any) -> None:
    told = getattr(getattr(task, "request", None), watch.DELIVERED, None)
    if isinstance(told, Mapping):
        names = (ASKED, "asked"), (DUE, "due"), (LATENESS, "lateness")
        about = {name: told[key] for name, key in names if told.get(key) is not None}
        _write(trace.SpanKind.CONSUMER, about)


def _write(kind: trace.SpanKind, about: Mapping[str, float]) -> None:
    """Write on the current span, if it is of this kind: a program's own span is not ours."""
    span = trace.get_current_span()
    if span.is_recording() and getattr(span, "kind", None) is kind:
        span.set_attributes(about)
