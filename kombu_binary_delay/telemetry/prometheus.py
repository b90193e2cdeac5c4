"""Lateness for Prometheus, as a page of text. It needs the extra ``prometheus``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.multiprocess import MultiProcessCollector

from . import labels, watch
from .watch import Delivered, Dropped

_PAIR = tuple(name.replace(".", "_") for name in (labels.DESTINATION, labels.TASK))


def instrument(registry: CollectorRegistry = REGISTRY) -> Callable[[], None]:
    """Record the lateness of delayed messages.

    :param registry: gets the metrics.
    :returns: what ends it.
    """

    def of(kind: Any, name: str, unit: str = "", more: tuple[str, ...] = (), **other: Any) -> Any:
        what = labels.WHAT[name]
        return kind(name.replace(".", "_") + unit, what, _PAIR + more, registry=registry, **other)

    lateness = of(Histogram, labels.LATENESS, "_seconds", buckets=labels.BUCKETS)
    delivered = of(Counter, labels.DELIVERED)
    dropped = of(Counter, labels.DROPPED, more=(labels.REASON,))
    named = labels.Labels()

    def on_delivered(message: Delivered) -> None:
        pair = named.pair(message.queue, message.task)
        delivered.labels(*pair).inc()
        if not message.redelivered:
            # Why it came again is no lateness of the broker's.
            lateness.labels(*pair).observe(max(message.lateness, 0.0))

    def on_dropped(message: Dropped) -> None:
        pair = named.pair(message.queue, watch.task_of(message.properties))
        dropped.labels(*pair, message.reason).inc()

    watch.on_delivered(on_delivered)
    watch.on_dropped(on_dropped)

    def end() -> None:
        watch.delivered.remove(on_delivered)
        watch.dropped.remove(on_dropped)
        for metric in (lateness, delivered, dropped):
            registry.unregister(metric)

    return end


def serve(port: int, address: str = "127.0.0.1") -> Callable[[], None]:
    """Serve the page ``/metrics`` from a thread of this process.

    With ``PROMETHEUS_MULTIPROC_DIR`` in the environment, the page is of all processes that share
    that folder, such as several workers of one host.

    :raises OSError: if the port is taken.
    :returns: what ends it.
    """
    registry = REGISTRY
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    server, thread = start_http_server(port, address, registry)

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end
