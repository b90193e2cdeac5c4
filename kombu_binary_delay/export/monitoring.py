"""A Grafana dashboard, and alert rules, over RabbitMQ's own Prometheus plugin. Pure.

The metrics are those of one queue each, so Prometheus must scrape ``/metrics/per-object``, or
``/metrics/detailed?family=queue_coarse_metrics``. A queue's messages are those that are ready,
those that consumers hold, and the rest: those that are due, in the hands of its dead-letter worker.
"""

from __future__ import annotations

import json
import re
from typing import Any

from kombu_binary_delay.topology import Queue, Topology

from .graph import human

#: As many unconfirmed messages as a dead-letter worker holds at most: then nothing moves.
_STUCK = 32
_LATE = 1  # seconds that a hop takes
_EXPIRED = "rabbitmq_global_messages_dead_lettered_expired_total"
_CONFIRMED = "rabbitmq_global_messages_dead_lettered_confirmed_total"
_PUBLISHED = "rabbitmq_channel_messages_published_total"
_AT_LEAST_ONCE = 'dead_letter_strategy="at_least_once"'


def alerts(topology: Topology) -> str:
    """Write alert rules for Prometheus: a stuck level, parked messages, lateness."""
    levels = _levels(topology)
    rules = [
        _rule(
            "BinaryDelayLevelStuck",
            f"{_held(levels)} >= {_STUCK}",
            "2m",
            "critical",
            "{{ $labels.queue }} passes nothing on",
            "{{ $value }} messages are due and not taken: what they lead to is gone, full, or does "
            "not confirm. Run 'kombu-binary-delay verify' and 'status'.",
        ),
        _rule(
            "BinaryDelayLate",
            f"{_hop(levels)} > {_LATE}",
            "5m",
            "warning",
            "delayed messages are late",
            "From one level to the next they take {{ $value | humanizeDuration }} on average.",
        ),
    ]
    if topology.parking:
        rules.insert(
            1,
            _rule(
                "BinaryDelayParked",
                f"{_sum('', f'queue={_quote(topology.parking)}')} > 0",
                "1m",
                "warning",
                "{{ $value }} delayed messages are parked in {{ $labels.vhost }}",
                "Their destination was gone when they were due. Run 'kombu-binary-delay redrive'.",
            ),
        )
    return "groups:\n  - name: kombu-binary-delay\n    rules:\n" + "".join(rules)


def grafana(topology: Topology) -> str:
    """Write a dashboard for Grafana, as JSON to import."""
    levels = _levels(topology)
    queues = sorted(
        (queue for part in topology.levels for queue in part.queues),
        key=_ttl,
    )
    by_wait = [
        (_sum("", f"queue={_quote(queue.name)}", by=""), human(_ttl(queue))) for queue in queues
    ]
    panels = [
        _panel("stat", "Waiting", (0, 0, 6, 4), [(_sum("", levels, by=""), "")]),
        _panel("stat", "Due, and not taken", (6, 0, 6, 4), [(_sum_of_held(levels), "")], _STUCK),
        _panel("stat", "Time per hop", (12, 0, 6, 4), [(_hop(levels), "")], _LATE, unit="s"),
        _panel("bargauge", "Waiting, by the wait of the level", (0, 4, 12, 12), by_wait),
        _panel("timeseries", "Waiting, by the wait of the level", (12, 4, 12, 12), by_wait),
        _panel(
            "timeseries",
            "Messages a second",
            (0, 16, 12, 8),
            [
                (f"sum(rate({_PUBLISHED}{{{_exchanges(topology)},{_VHOST}}}[1m]))", "delayed"),
                (f"sum(rate({_EXPIRED}{{{_AT_LEAST_ONCE}}}[1m]))", "hops between levels"),
            ],
        ),
        _panel(
            "timeseries",
            "Due, and not taken, by level",
            (12, 16, 12, 8),
            [(_held(levels), "{{queue}}")],
        ),
    ]
    if topology.parking:
        parked = _sum("", f"queue={_quote(topology.parking)}", by="")
        panels.insert(3, _panel("stat", "Parked", (18, 0, 6, 4), [(parked, "")], 1))
    dashboard = {
        "title": f"Delayed messages: {topology.prefix}",
        "uid": re.sub(r"[^A-Za-z0-9_-]", "-", f"kbd-{topology.prefix}")[:40],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "vhost",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": f"label_values({_selector('', levels, vhost=False)}, vhost)",
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, start=1)],
    }
    return json.dumps(dashboard, indent=2, ensure_ascii=False) + "\n"


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_VHOST = 'vhost=~"$vhost"'


# -- queries -------------------------------------------------------------------------------------


def _levels(topology: Topology) -> str:
    """Match the names of the ladder's queues."""
    if topology.mirrors:
        return f"queue=~{_quote(re.escape(topology.prefix) + '[.](level|own)[.-].*')}"
    names = "|".join(re.escape(queue.name) for part in topology.levels for queue in part.queues)
    return f"queue=~{_quote(names)}"


def _exchanges(topology: Topology) -> str:
    names = "|".join(
        re.escape(exchange.name) for part in topology.levels for exchange in part.exchanges
    )
    return f"exchange=~{_quote(names)}"


def _selector(kind: str, which: str, *, vhost: bool) -> str:
    # The two ways to scrape give the same metric two names.
    name = f'__name__=~"rabbitmq_(detailed_)?queue_messages{kind}"'
    return "{" + ",".join([name, which, *([_VHOST] if vhost else [])]) + "}"


def _sum(kind: str, which: str, *, by: str = "vhost, queue") -> str:
    """Sum a kind of messages; on the dashboard, which sums all, of the virtual hosts chosen."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} ({_selector(kind, which, vhost=not by)})"


def _held(which: str) -> str:
    parts = (_sum(kind, which) for kind in ("", "_ready", "_unacked"))
    return " - ".join(parts)


def _sum_of_held(which: str) -> str:
    return " - ".join(_sum(kind, which, by="") for kind in ("", "_ready", "_unacked"))


def _hop(which: str) -> str:
    """Tell the seconds between two levels, by Little's law: those on the way, by their rate."""
    return f"sum({_held(which)}) / sum(rate({_CONFIRMED}{{{_AT_LEAST_ONCE}}}[5m]))"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _ttl(queue: Queue) -> int:
    return int(dict(queue.arguments)["x-message-ttl"])


# -- how they are written ------------------------------------------------------------------------


def _rule(  # noqa: PLR0913, PLR0917 - as many as a rule has
    name: str, query: str, lasts: str, severity: str, summary: str, description: str
) -> str:
    return (
        f"      - alert: {name}\n"
        f"        expr: {json.dumps(query, ensure_ascii=False)}\n"
        f"        for: {lasts}\n"
        f"        labels:\n"
        f"          severity: {severity}\n"
        f"        annotations:\n"
        f"          summary: {json.dumps(summary, ensure_ascii=False)}\n"
        f"          description: {json.dumps(description, ensure_ascii=False)}\n"
    )


def _panel(  # noqa: PLR0913 - as many as a panel has
    kind: str,
    title: str,
    place: tuple[int, int, int, int],
    queries: list[tuple[str, str]],
    red_from: float | None = None,
    *,
    unit: str = "short",
) -> dict[str, Any]:
    x, y, width, height = place
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if red_from is not None:
        steps.append({"color": "red", "value": red_from})
    return {
        "type": kind,
        "title": title,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": height},
        "fieldConfig": {
            "defaults": {"unit": unit, "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "orientation": "horizontal"}
        if kind != "timeseries"
        else {"legend": {"displayMode": "list"}},
        "targets": [
            {
                "refId": f"Q{number}",
                "datasource": _SOURCE,
                "expr": query,
                "legendFormat": legend,
                "instant": kind == "bargauge",
            }
            for number, (query, legend) in enumerate(queries, start=1)
        ],
    }
