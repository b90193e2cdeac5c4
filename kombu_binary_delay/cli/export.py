"""``export``: the topology for infrastructure as code and monitoring, and as a drawing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import click

from kombu_binary_delay import export as formats
from kombu_binary_delay.export.files import write_file
from kombu_binary_delay.operate.delivery import to_queue

from .command import Printer, ladder, queues_of_yours, subcommand
from .connect import Target
from .values import Delay

#: These formats must be complete.
_TO_BE_MADE = ("definitions", "kubernetes", "terraform")
_OF_TOPOLOGY = ("alerts", "grafana")
_BROKER_CONFIG = "broker-config"


def _release(_: click.Context, __: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"[0-9]+\.[0-9]+(\.[0-9]+)?", value):
        raise click.BadParameter(f"{value!r} is no release of RabbitMQ, such as 3.10 or 4.3.6")
    return value


@click.command(
    short_help="Write the topology for other tools.",
    help="""Write the topology as FORMAT. Needs no broker.

    \b
      definitions  RabbitMQ's own, for rabbitmqctl import_definitions
      terraform    a module with a variable, vhost
      kubernetes   manifests for the Messaging Topology Operator
      svg          a picture of the ladder, and of one message's way
      grafana      a dashboard over RabbitMQ's Prometheus plugin
      alerts       rules for Prometheus: stuck levels, parked messages, lateness
      broker-config
                   the settings of RabbitMQ that we recommend: rabbitmq.conf
                   and advanced.config, in the folder that --output names

    The first three are to be made, and also have the streams for cancellations and for the
    journal. RabbitMQ 4.0 to 4.2 needs a ladder more, for messages with a priority above 4: give
    --rabbitmq there.

    \b
      kombu-binary-delay export terraform -o ladder.tf.json
      kombu-binary-delay export definitions --queue mail > ladder.json
      kombu-binary-delay export svg --delay 1h > ladder.svg
      kombu-binary-delay export broker-config --rabbitmq 3.10 -o /etc/rabbitmq
    """,
)
@click.argument(
    "format_",
    metavar="FORMAT",
    type=click.Choice(sorted([*_TO_BE_MADE, *_OF_TOPOLOGY, "svg", _BROKER_CONFIG])),
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, allow_dash=True),
    default="-",
    help="The file to write; the folder, for broker-config without --json.  "
    "[default: the terminal]",
)
@queues_of_yours
@click.option(
    "--vhost",
    help="The virtual host, in what is to be made.  [default: that of the broker's URL]",
)
@click.option(
    "--cluster",
    default="rabbitmq",
    show_default=True,
    help="The name of the RabbitmqCluster, in kubernetes.",
)
@click.option(
    "--rabbitmq",
    "release",
    metavar="RELEASE",
    default=formats.NEWEST,
    show_default=True,
    callback=_release,
    help="The release of RabbitMQ, for broker-config and what is to be made.",
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
    output: Path,
    queues: tuple[str, ...],
    vhost: str | None,
    cluster: str,
    release: str,
    delay: float,
    ladder: str | None,
) -> None:
    """Write the topology as FORMAT. Needs no broker."""
    if format_ == _BROKER_CONFIG:
        _write_files(printer, output, formats.broker_config(release))
        return
    to_be_made = format_ in _TO_BE_MADE
    server = {"product": "RabbitMQ", "version": release}
    lanes = broker.lanes(ladder=ladder, server=server if to_be_made else None)
    vhost = vhost or broker.plain().virtual_host or "/"
    part = broker.part(lanes)
    if to_be_made:
        part = sum(broker.streams().values(), part)
    for queue in dict.fromkeys(queues):
        relay = lanes[0].wants_relay(queue, broker.settings.relays)
        part += to_queue(lanes[0], queue, relay=relay)
    if format_ == "svg":
        at_most = min(int(delay), lanes[0].ladder.maximum)
        text = formats.svg(lanes[0], at_most, (queues or ("mail",))[0]) + "\n"
    elif format_ in _OF_TOPOLOGY:
        text = getattr(formats, format_)(lanes[0])
    elif format_ == "kubernetes":
        text = formats.kubernetes(part, vhost, cluster)
    else:
        text = getattr(formats, format_)(part, vhost)
    if printer.as_json:
        text = json.dumps({"format": format_, "text": text}) + "\n"
    _write(output, text)


def _write_files(printer: Printer, output: Path, texts: Mapping[str, str]) -> None:
    """Write files into a folder, or as JSON into one file; or print them, each after its name."""
    if printer.as_json:
        _write(output, json.dumps({"format": _BROKER_CONFIG, "files": texts}) + "\n")
    elif str(output) == "-":
        _write(output, "\n".join(f"==> {name} <==\n{text}" for name, text in texts.items()))
    else:
        # An operator's settings must not be lost.
        if there := [name for name in texts if (output / name).exists()]:
            raise click.UsageError(
                f"{output} has {' and '.join(there)} already; write to another folder, and copy "
                f"the settings from there"
            )
        output.mkdir(exist_ok=True)
        for name, text in texts.items():
            _write(output / name, text)


def _write(path: Path, text: str) -> None:
    if str(path) != "-":
        write_file(path, text)
        return
    with click.open_file("-", "w") as file:
        file.write(text)
        file.flush()
