"""Alerting rules for Prometheus, in YAML: what the operator of a ladder must know. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import indent

from kombu_binary_delay.model.topology import WORKER_HOLDS, Topology

from .promql import Questions

_HEAD = """\
# Alerting rules of kombu-binary-delay for Prometheus, over RabbitMQ's own rabbitmq_prometheus.
# Made by a program: do not edit.
"""


@dataclass(frozen=True)
class _Rule:
    name: str
    expr: str
    time: str
    severity: str
    summary: str
    description: str


def alerts(topology: Topology) -> str:
    """Return the alerting rules, as YAML, for every ladder in the namespace of ``topology``."""
    group = f"kombu-binary-delay {topology.namespace.strip('._-')}"
    lines = [_HEAD, f"groups:\n  - name: {json.dumps(group)}\n    rules:\n"]
    lines += ["".join(_yaml(rule)) for rule in _rules(Questions(topology))]
    return "".join(lines)


def _rules(ask: Questions) -> Iterator[_Rule]:
    yield _Rule(
        "BinaryDelayLevelStuck",
        ask.stuck(),
        "5m",
        "critical",
        "Nothing leaves {{ $labels.queue }} in {{ $labels.vhost }}",
        "{{ $value }} messages in it are due. What they lead to is gone, full, or does not "
        "confirm, and holds up all behind them: find the destination that does not take its "
        "messages, and give it room, or a relay. See 'kombu-binary-delay verify' and 'status'.",
    )
    if ask.parking:
        yield _Rule(
            "BinaryDelayParked",
            f"{ask.messages(ask.parking)} > 0",
            "1m",
            "warning",
            "{{ $value }} messages are parked in {{ $labels.vhost }}",
            "Their destination was gone when they were due. Declare or bind it again, then send "
            "on what is in {{ $labels.queue }}: 'kombu-binary-delay redrive'.",
        )
    if ask.relays:
        yield _Rule(
            "BinaryDelayRelayFilling",
            f"{ask.messages(ask.relays)} >= {WORKER_HOLDS}",
            "10m",
            "warning",
            "{{ $value }} due messages wait in {{ $labels.queue }} in {{ $labels.vhost }}",
            "The queue that it is named after takes fewer messages than become due for it, or "
            "none. Others are not held up.",
        )
    yield _Rule(
        "BinaryDelayLate",
        f"{ask.lateness()} > 10",
        "5m",
        "warning",
        "Delayed messages are late by {{ $value | humanizeDuration }} a hop",
        "That is the mean of five minutes, over all that was due. The broker cannot keep up, or "
        "does not get confirms; look for a stuck level, for an alarm of the broker, and at its "
        "disks.",
    )
    yield _Rule(
        "BinaryDelayDiskFills",
        ask.disk_fills(),
        "5m",
        "warning",
        "{{ $labels.instance }} has little disk left, or fills it within hours",
        "What waits is on the broker's disks. Below its limit, disk_free_limit, RabbitMQ blocks "
        "all publishers: make room, publish less in advance, or add nodes.",
    )
    yield _Rule(
        "BinaryDelayUnwatched",
        f'absent(rabbitmq_detailed_queue_messages{{queue=~"{ask.levels}"}})',
        "10m",
        "warning",
        "Prometheus gets no metrics of the ladder",
        "No level is reported: RabbitMQ, its plugin or the scrape is down, or the ladder is not "
        "made yet. The other alerts cannot fire.",
    )


def _yaml(rule: _Rule) -> Iterator[str]:
    yield f"      - alert: {rule.name}\n"
    yield f"        expr: |-\n{indent(rule.expr, ' ' * 10)}\n"
    yield f"        for: {rule.time}\n"
    yield f"        labels:\n          severity: {rule.severity}\n"
    yield "        annotations:\n"
    for name in ("summary", "description"):
        yield f"          {name}: {json.dumps(getattr(rule, name))}\n"
