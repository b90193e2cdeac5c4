"""``export``: the topology for infrastructure as code, and as drawings."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import click

from kombu_binary_delay import export as formats
from kombu_binary_delay.admin.delivery import to_queue

from .command import Printer, ladder, queues_of_yours, subcommand
from .connect import Target
from .values import Delay

_PARTS = ("definitions", "graphviz", "kubernetes", "mermaid", "terraform")
#: These formats must be complete; the others are drawings.
_TO_BE_MADE = ("definitions", "kubernetes", "terraform")
_OF_TOPOLOGY = ("alerts", "grafana")


@click.command(
    short_help="Write the topology for other tools.",
    help="""Write the topology as FORMAT. Needs no broker.

    \b
      definitions  RabbitMQ's own, for rabbitmqctl import_definitions
      terraform    a module with a variable, vhost
      kubernetes   manifests for the Messaging Topology Operator
      mermaid      a flowchart for Markdown
      graphviz     the DOT language
      svg          a picture of the ladder, and of one message's way
      grafana      a dashboard over RabbitMQ's Prometheus plugin
      alerts       rules for Prometheus: stuck levels, parked messages, lateness

    The first three also have the streams for cancellations. RabbitMQ before 3.9 has no streams:
    give --no-amendments there.

    \b
      kombu-binary-delay export terraform -o ladder.tf
      kombu-binary-delay export definitions --queue mail > ladder.json
      kombu-binary-delay export graphviz | dot -Tpng > ladder.png
    """,
)
@click.argument(
    "format_", metavar="FORMAT", type=click.Choice(sorted([*_PARTS, *_OF_TOPOLOGY, "svg"]))
)
@click.option(
    "--output",
    "-o",
    type=click.File("w"),
    default="-",
    help="The file to write.  [default: the terminal]",
)
@queues_of_yours
@click.option(
    "--vhost",
    default="/",
    show_default=True,
    help="The virtual host, in definitions and kubernetes.",
)
@click.option(
    "--cluster",
    default="rabbitmq",
    show_default=True,
    help="The name of the RabbitmqCluster, in kubernetes.",
)
@click.option(
    "--delay", type=Delay(), default="10s", show_default=True, help="The delay whose way svg draws."
)
@ladder
@partial(subcommand, drawn=False)
def export(
    broker: Target,
    printer: Printer,
    format_: str,
    output: Any,
    queues: tuple[str, ...],
    vhost: str,
    cluster: str,
    delay: float,
    ladder: str | None,
) -> None:
    """Write the topology as FORMAT. Needs no broker."""
    lanes = broker.lanes(ladder=ladder)
    part = broker.part(lanes)
    if format_ in _TO_BE_MADE:
        part += broker.amendments()
    for queue in queues:
        relay = lanes[0].wants_relay(queue, broker.settings.relays)
        part += to_queue(lanes[0], queue, relay=relay)
    if format_ == "svg":
        at_most = min(int(delay), lanes[0].ladder.maximum)
        text = formats.svg(lanes[0], at_most, (queues or ("mail",))[0]) + "\n"
    elif format_ in _OF_TOPOLOGY:
        text = getattr(formats, format_)(lanes[0])
    elif format_ == "kubernetes":
        text = formats.kubernetes(part, vhost, cluster)
    elif format_ == "definitions":
        text = formats.definitions(part, vhost)
    else:
        text = getattr(formats, format_)(part)
    if printer.as_json:
        text = json.dumps({"format": format_, "text": text}) + "\n"
    output.write(text)
    output.flush()
