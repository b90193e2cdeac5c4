"""A dashboard for Grafana, as JSON to import. Pure."""

from __future__ import annotations

import json
from colorsys import hls_to_rgb
from dataclasses import replace
from typing import Any

from kombu_binary_delay.model.topology import WORKER_HOLDS, Topology

from .graph import human
from .names import shorten
from .promql import Questions

_Json = dict[str, Any]

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WINDOW = "$__rate_interval"
_HORIZONS = (60_000, 600_000, 3_600_000, 86_400_000, 604_800_000)


def grafana(topology: Topology) -> str:
    """Return a dashboard, as JSON, for every ladder in the namespace of ``topology``.

    It shows the levels of ``topology`` by their waits. Its variables are the data source, the value
    of the label ``rabbitmq_cluster`` if there is one, and the virtual host.
    """
    topology = replace(topology, lane=0, urgent=False)
    ask = Questions(
        topology,
        more=',rabbitmq_cluster=~"$cluster",vhost=~"$vhost"',
        everywhere=',rabbitmq_cluster=~"$cluster"',
    )
    rows = [
        (4, _figures(ask)),
        (11, [(16, _waiting(ask, topology)), (8, _due(ask))]),
        (8, [(12, _traffic(ask)), (12, _hops(ask))]),
        (8, [(12, _held(ask, topology)), (12, _aside(ask))]),
        (7, [(8, panel) for panel in _broker(ask)]),
    ]
    panels: list[_Json] = []
    y = 0
    for height, row in rows:
        x = 0
        for width, panel in row:
            place = {"x": x, "y": y, "w": width, "h": height}
            panels.append({"id": len(panels) + 1, "gridPos": place, **panel})
            x += width
        y += height
    document = {
        "uid": shorten("kombu-binary-delay", topology.prefix, 40),
        "title": f"Delayed messages: {topology.prefix.rstrip('.')}",
        "tags": ["rabbitmq", "celery", "kombu-binary-delay"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-3h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": _variables(ask)},
        "panels": panels,
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _variables(ask: Questions) -> list[_Json]:
    known = f'rabbitmq_detailed_queue_messages{{queue=~"{ask.levels}"'
    asked = {
        "cluster": ("Cluster", f"{known}}}, rabbitmq_cluster"),
        "vhost": ("Virtual host", f'{known},rabbitmq_cluster=~"$cluster"}}, vhost'),
    }
    return [
        {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus"},
        *(
            {
                "type": "query",
                "name": name,
                "label": label,
                "datasource": _SOURCE,
                "query": {"query": f"label_values({values})", "refId": name},
                "refresh": 2,
                "sort": 1,
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "current": {"text": "All", "value": "$__all"},
            }
            for name, (label, values) in asked.items()
        ),
    ]


# -- the panels, from top to bottom --------------------------------------------------------------


def _figures(ask: Questions) -> list[tuple[int, _Json]]:
    figures: list[tuple[str, str, str, _Json]] = [
        ("Waiting", f"sum({ask.messages(ask.levels)})", "Messages on all levels.", {}),
        (
            "Stuck levels",
            f"count({ask.stuck()}) or vector(0)",
            f"Levels with {WORKER_HOLDS} or more due messages that nothing leaves.",
            {"red": 1},
        ),
        (
            "Late, per hop",
            # An idle cluster has no mean.
            f"max(({ask.lateness()}) >= 0)",
            "From due to confirmed at the next hop: a mean of five minutes; of the latest cluster.",
            {"unit": "s", "orange": 1, "red": 10},
        ),
        (
            "On their way",
            f"sum({ask.held(ask.levels)})",
            "Messages that are due, and in the hands of the levels' dead-letter workers.",
            {},
        ),
    ]
    if ask.parking:
        figures.append(
            (
                "Parked",
                f"sum({ask.messages(ask.parking)}) or vector(0)",
                "Messages whose destination was gone when they were due.",
                {"red": 1},
            )
        )
    if ask.relays:
        figures.append(
            (
                "In relays",
                f"sum({ask.messages(ask.relays)}) or vector(0)",
                "Due messages that wait for a destination which does not take them now.",
                {"orange": WORKER_HOLDS},
            )
        )
    width = 24 // len(figures)
    return [(width, _stat(*figure)) for figure in figures]


def _waiting(ask: Questions, topology: Topology) -> _Json:
    expr = f"{ask.level(ask.messages(ask.levels))} > 0"
    return _series(
        "Waiting, by level",
        "Messages on each level, the longest wait below. Queues of other ladders in the namespace "
        "are shown by their names.",
        [(expr, "{{level}}")],
        stack=True,
        overrides=_levels(topology),
    )


def _due(ask: Questions) -> _Json:
    asked = []
    for horizon in _HORIZONS:
        if horizon <= ask.topology.ladder.maximum:
            surely, probably = ask.within(horizon)
            asked.append((probably, f"within {human(horizon)}"))
            asked.append((surely, f"surely within {human(horizon)}"))
    return {
        **_panel(
            "bargauge",
            "Due soon",
            "A forecast, as far as the levels show it: a level knows how long its messages stay "
            "at most, not how long each has been there.",
            asked,
            instant=True,
        ),
        "fieldConfig": {
            "defaults": {"min": 0, "decimals": 0, "color": {"mode": "continuous-BlPu"}},
            "overrides": [],
        },
        "options": {
            "orientation": "horizontal",
            "displayMode": "gradient",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
    }


def _traffic(ask: Questions) -> _Json:
    return _series(
        "In and out",
        "Delayed messages a second that are published, and that leave the ladder: the latter is "
        "computed from what is published and what waits.",
        [(ask.rate_in(_WINDOW), "in"), (ask.rate_out("5m"), "out")],
        unit="cps",
    )


def _hops(ask: Questions) -> _Json:
    return _series(
        "Dead letters, at least once",
        "What expires in a second, and what has been confirmed by the next level or the "
        "destination, on the whole broker. Confirmed stays below expired while something is held "
        "up.",
        [
            (ask.hops("expired", _WINDOW), "expired {{rabbitmq_cluster}}"),
            (ask.hops("confirmed", _WINDOW), "confirmed {{rabbitmq_cluster}}"),
        ],
        unit="cps",
    )


def _held(ask: Questions, topology: Topology) -> _Json:
    return _series(
        "Due and not gone, by level",
        f"Messages in the hands of each level's dead-letter worker and before it; of several "
        f"lanes, virtual hosts or clusters, the most. A level that stays above the line, where the "
        f"worker's hands are full ({WORKER_HOLDS}), is stuck or cannot keep up.",
        [(f"{ask.level(ask.held(ask.levels), over='max')} > 0", "{{level}}")],
        overrides=_levels(topology),
        line=WORKER_HOLDS,
    )


def _aside(ask: Questions) -> _Json:
    asked = [(ask.messages(queues), "{{queue}}") for queues in (ask.parking, ask.relays) if queues]
    return _series(
        "Parked, and in relays",
        "Both are empty when all destinations are there and take their messages.",
        asked or [("vector(0)", "none on this ladder")],
    )


def _broker(ask: Questions) -> list[_Json]:
    free, floor, used, most = (
        f"sum by (instance) ({ask.node(name)})"
        for name in (
            "disk_space_available",
            "disk_space_available_limit",
            "process_resident_memory",
            "resident_memory_limit",
        )
    )
    queues = f'rabbitmq_detailed_queue_messages{{queue=~"{ask.levels}"{ask.more}}}'
    return [
        _series(
            "Level queues led, by node",
            "Only the node with a queue's leader reports it, and does its work.",
            [(f"count by (instance) ({queues})", "{{instance}}")],
        ),
        _series(
            "Disk left before the broker's alarm",
            "At zero, RabbitMQ blocks publishers. What waits is on its disks.",
            [(f"{free} - {floor}", "{{instance}}")],
            unit="bytes",
        ),
        _series(
            "Memory, of what the broker may have",
            "At 100 %, RabbitMQ blocks publishers.",
            [(f"{used} / {most}", "{{instance}}")],
            unit="percentunit",
        ),
    ]


# -- how a panel is made -------------------------------------------------------------------------


def _panel(
    kind: str,
    title: str,
    description: str,
    asked: list[tuple[str, str]],
    *,
    instant: bool = False,
) -> _Json:
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": _SOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": expr,
                "legendFormat": legend,
                "instant": instant,
                "range": not instant,
            }
            for number, (expr, legend) in enumerate(asked)
        ],
    }


def _stat(title: str, expr: str, description: str, more: _Json) -> _Json:
    steps: list[_Json] = [{"color": "green", "value": None}]
    steps += [{"color": each, "value": more[each]} for each in ("orange", "red") if each in more]
    return {
        **_panel("stat", title, description, [(expr, "")]),
        "fieldConfig": {
            "defaults": {
                "unit": more.get("unit", "short"),
                "color": {"mode": "thresholds"},
                "thresholds": {"mode": "absolute", "steps": steps},
            },
            "overrides": [],
        },
        "options": {
            "colorMode": "background" if len(steps) > 1 else "value",
            "graphMode": "area",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
    }


def _series(  # noqa: PLR0913 - each is another look
    title: str,
    description: str,
    asked: list[tuple[str, str]],
    *,
    unit: str = "short",
    stack: bool = False,
    overrides: list[_Json] | None = None,
    line: int | None = None,
) -> _Json:
    custom: _Json = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 70 if stack else 10}
    custom["stacking"] = {"mode": "normal" if stack else "none", "group": "A"}
    defaults: _Json = {"unit": unit, "min": 0, "custom": custom}
    if line is not None:
        custom["thresholdsStyle"] = {"mode": "dashed"}
        steps = [{"color": "transparent", "value": None}, {"color": "red", "value": line}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    return {
        **_panel("timeseries", title, description, asked),
        "fieldConfig": {"defaults": defaults, "overrides": overrides or []},
        "options": {
            "legend": {
                "showLegend": True,
                "displayMode": "table" if overrides else "list",
                "placement": "right" if overrides else "bottom",
                "calcs": ["lastNotNull"] if overrides else [],
            },
            "tooltip": {"mode": "multi", "sort": "none"},
        },
    }


def _levels(topology: Topology) -> list[_Json]:
    """Return overrides that show each level's queues by their wait, from red (short) to violet."""
    queues = [queue for part in topology.levels for queue in part.queues]
    found = []
    for number, queue in enumerate(queues):
        red, green, blue = hls_to_rgb(0.8 * number / len(queues), 0.55, 0.6)
        color = "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))
        wait = human(queue.wait or 0)
        found.append(
            {
                "matcher": {"id": "byName", "options": queue.name},
                "properties": [
                    {"id": "displayName", "value": wait},
                    {"id": "color", "value": {"mode": "fixed", "fixedColor": color}},
                ],
            }
        )
    return found
