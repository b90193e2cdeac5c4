"""Alerting rules for Prometheus, and a dashboard for Grafana: templates filled for a ladder. Pure.

Their PromQL is in the folder ``templates``, over RabbitMQ's own metrics: ``rabbitmq_prometheus``
exports each queue under ``/metrics/detailed``, and counts the dead letters of a whole node under
``/metrics``. ``@NAME@`` stands for what differs by ladder: regular expressions of names that cover
every ladder of a namespace. ``rabbitmq_cluster`` is a label that a scrape may add if one Prometheus
watches several brokers; without it, nothing changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from colorsys import hls_to_rgb
from dataclasses import replace
from importlib.resources import files
from typing import Any

from kombu_binary_delay.ladder.durations import human
from kombu_binary_delay.ladder.topology import LEAST_DISK, VERSION, WORKER_HOLDS, Topology
from kombu_binary_delay.telemetry.labels import BUCKETS

from .names import shorten

_Json = dict[str, Any]

_HORIZONS = (60_000, 600_000, 3_600_000, 86_400_000, 604_800_000)  # ms
#: A regular expression that no name of ours matches.
_NONE = "-"
_WAITING = (
    'rabbitmq_detailed_queue_messages{{queue=~"{}",rabbitmq_cluster=~"$cluster",vhost=~"$vhost"}}'
)
#: How the names of the parts of a ladder and of its delivery side end.
_DIRECT = Topology().direct.removeprefix(f"{Topology().prefix}.")
_RELAYS = "|".join(
    name("").removeprefix(f"{Topology().delivery_prefix}.").rstrip(".")
    for name in (Topology().queue_relay_name, Topology().exchange_relay_name)
)


def alerts(topology: Topology) -> str:
    """Return the alerting rules, as YAML, for every ladder in the namespace of ``topology``."""
    return _filled("alerts.yml", topology)


def grafana(topology: Topology) -> str:
    """Return a dashboard, as JSON, for every ladder in the namespace of ``topology``.

    It shows the levels of ``topology`` by their waits. Its variables are the data source, the value
    of the label ``rabbitmq_cluster`` if there is one, and the virtual host.
    """
    topology = replace(topology, lane=0, urgent=False)
    document = json.loads(_filled("dashboard.json", topology))
    document["uid"] = shorten("kombu-binary-delay", topology.prefix, 40)
    document["title"] += topology.prefix.rstrip(".")
    for panel in document["panels"]:
        if panel["fieldConfig"]["overrides"] == ["levels"]:
            panel["fieldConfig"]["overrides"] = list(_levels(topology))
        if panel["targets"] == ["due"]:
            panel["targets"] = list(_due(topology))
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def names(topology: Topology) -> dict[str, str]:
    """Return regular expressions, without a backslash, of what a ladder's namespace has.

    :returns: ``levels``: the queues in which messages wait; ``ways_in``: the exchanges to which
        delayed messages are published; ``parking`` and ``relays``: those queues; ``lanes``: a level
        queue, whose name without its lane is both groups.
    """
    if not topology.is_ours:
        queues = (queue.name for part in topology.levels for queue in part.queues)
        numbered = (re.sub(r"[0-9]+$", "[0-9]+", _plain(queue)) for queue in queues)
        levels = "|".join(dict.fromkeys(numbered))
        return {
            "levels": levels,
            "ways_in": levels,
            "parking": _NONE,
            "relays": _NONE,
            "lanes": "(.+)()",
        }
    versioned = f"{_plain(topology.namespace)}[.]{VERSION}"
    return {
        "levels": rf"{versioned}-.+[.](level-[0-9]+[.][0-9]+|{_DIRECT}[.][0-9]+ms)",
        "ways_in": rf"{versioned}-.+[.](level-[0-9]+([.][0-9]+)?|{_DIRECT})",
        "parking": f"{versioned}(-classic)?[.]parking" if topology.parking else _NONE,
        "relays": f"{versioned}(-classic)?[.]({_RELAYS})[.].+",
        "lanes": f"(.+?)(?:-lane[0-9]+|-urgent)?((?:-classic)?[.](?:level|{_DIRECT}).+)",
    }


def within(topology: Topology, milliseconds: int) -> tuple[str, str]:
    """Return queries for the messages that leave a ladder within a time: at least, and probably.

    A level shows how long its messages stay at most. The probable figure assumes that the remaining
    times are spread evenly below that.
    """
    surely: list[str] = []
    probably: list[str] = []
    below = 0
    for part in replace(topology, lane=0, urgent=False).levels:
        waits = [queue.wait or 0 for queue in part.queues]
        for queue, wait in zip(part.queues, waits, strict=True):
            name, latest = _in_any_lane(topology, queue.name), wait + below
            if latest <= milliseconds:
                surely.append(name)
            else:
                probably.append(f"{milliseconds / latest:.3g} * {_WAITING.format(name)}")
        below += max(waits)
    known = _WAITING.format("|".join(surely) or _NONE)
    return f"sum({known}) or vector(0)", f"sum({' or '.join([known, *probably])}) or vector(0)"


def _filled(template: str, topology: Topology) -> str:
    values = {
        **names(topology),
        "namespace": topology.namespace.strip("._-"),
        "worker_holds": str(WORKER_HOLDS),
        "least_disk": str(LEAST_DISK),
        "tick": _bucket(topology.ladder.tick),
    }
    text = files(__package__).joinpath("templates", template).read_text()
    # A number in JSON, where the placeholder is all of a string.
    text = text.replace('"@worker_holds@"', values["worker_holds"])
    return re.sub("@([a-z_]+)@", lambda placeholder: values[placeholder[1]], text)


def _bucket(milliseconds: int) -> str:
    """Return a regular expression of the lateness within a time, as exporters write its label."""
    bucket = next((bucket for bucket in BUCKETS if bucket * 1000 >= milliseconds), None)
    return "[+]Inf" if bucket is None else f"{_plain(f'{bucket:g}')}([.]0)?"


def _levels(topology: Topology) -> Iterator[_Json]:
    """Yield overrides that show each level's queues by their wait, from red (short) to violet."""
    queues = [queue for part in topology.levels for queue in part.queues]
    for number, queue in enumerate(queues):
        red, green, blue = hls_to_rgb(0.8 * number / len(queues), 0.55, 0.6)
        color = "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))
        yield {
            "matcher": {"id": "byName", "options": queue.name},
            "properties": [
                {"id": "displayName", "value": human(queue.wait or 0)},
                {"id": "color", "value": {"mode": "fixed", "fixedColor": color}},
            ],
        }


def _due(topology: Topology) -> Iterator[_Json]:
    """Yield the queries of the forecast, two for each time that the ladder reaches."""
    for number, horizon in enumerate(
        reached for reached in _HORIZONS if reached <= topology.ladder.maximum
    ):
        surely, probably = within(topology, horizon)
        for second, (query, legend) in enumerate(((probably, ""), (surely, "surely "))):
            yield {
                "refId": chr(ord("A") + 2 * number + second),
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "expr": query,
                "legendFormat": f"{legend}within {human(horizon)}",
                "instant": True,
                "range": False,
            }


def _in_any_lane(topology: Topology, queue: str) -> str:
    if not topology.is_ours:
        return _plain(queue)
    ladder, at, level = _plain(queue).rpartition("[.]level")
    kind = "-classic" if ladder.endswith("-classic") else ""
    return f"{ladder.removesuffix(kind)}(-lane[0-9]+|-urgent)?{kind}{at}{level}"


def _plain(name: str) -> str:
    """Return a regular expression that matches only a name."""
    return re.sub(r"[^\w-]", r"[\g<0>]", name)
