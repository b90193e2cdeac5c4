"""``export``: the topology for infrastructure as code, and for the eye."""

from __future__ import annotations

import json
from typing import Any

import click

from kombu_binary_delay import export as formats
from kombu_binary_delay.topology import Part, Topology

from .site import Site
from .values import Delay
from .verb import Out, ladder, verb

_PARTS = ("definitions", "graphviz", "kubernetes", "mermaid", "terraform")
_OF_TOPOLOGY = ("alerts", "grafana")


@click.command()
@click.argument(
    "format_", metavar="FORMAT", type=click.Choice(sorted([*_PARTS, *_OF_TOPOLOGY, "svg"]))
)
@click.option(
    "--output", "-o", type=click.File("w"), default="-", help="A file; else the terminal."
)
@click.option("--queue", "queues", multiple=True, metavar="NAME", help="Lead to this queue, too.")
@click.option("--vhost", default="/", show_default=True, help="For definitions and kubernetes.")
@click.option("--cluster", default="rabbitmq", show_default=True, help="For kubernetes.")
@click.option("--delay", type=Delay(), default="10s", show_default=True, help="For svg.")
@ladder
@verb
def export(
    site: Site,
    out: Out,
    format_: str,
    output: Any,
    queues: tuple[str, ...],
    vhost: str,
    cluster: str,
    delay: float,
    ladder: str | None,
) -> None:
    """Write the topology as FORMAT. Needs no broker.

    \b
      definitions  RabbitMQ's own, for rabbitmqctl import_definitions
      terraform    a module with a variable, vhost
      kubernetes   manifests for the Messaging Topology Operator
      mermaid      a flowchart for Markdown
      graphviz     the DOT language
      svg          a picture of the ladder, and of one message's way
      grafana      a dashboard over RabbitMQ's Prometheus plugin
      alerts       rules for Prometheus: stuck levels, parked messages, lateness

    \b
      kombu-binary-delay export terraform -o ladder.tf
      kombu-binary-delay export definitions --vhost shop --queue mail > ladder.json
      kombu-binary-delay export graphviz | dot -Tpng > ladder.png
    """
    topology = site.topology(ladder=ladder)
    text = _write(format_, topology, queues, vhost, cluster, delay)
    if out.as_json:
        text = json.dumps({"format": format_, "text": text}) + "\n"
    output.write(text)


def _write(
    name: str, topology: Topology, queues: tuple[str, ...], vhost: str, cluster: str, delay: float
) -> str:
    if name == "svg":
        longest = topology.ladder.maximum
        return formats.svg(topology, min(int(delay), longest), (queues or ("mail",))[0]) + "\n"
    if name in _OF_TOPOLOGY:
        drawn: str = getattr(formats, name)(topology)
        return drawn
    part: Part = sum((topology.to_queue(queue) for queue in queues), topology.whole)
    if name == "kubernetes":
        return formats.kubernetes(part, vhost, cluster)
    if name == "definitions":
        return formats.definitions(part, vhost)
    written: str = getattr(formats, name)(part)
    return written
