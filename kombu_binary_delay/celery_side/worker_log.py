"""One line in the log of a Celery worker that starts: the ladder, the broker and the settings.

It answers "is it on?". Celery's banner names only the broker's URL, which is the same with Kombu's
own transport. This module must not import Celery: a Kombu program may not have it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kombu.log import get_logger

from kombu_binary_delay.ladder.defects import CELERY, KOMBU, Known, defects_of
from kombu_binary_delay.ladder.durations import human
from kombu_binary_delay.ladder.ladder import Ladder
from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.settings import Settings
from kombu_binary_delay.wire.mechanism import mechanism_of

logger = get_logger(__name__)

#: What to say where a revoke of Celery's is not recorded.
NOT_RECORDED = "a revoke is not recorded, only sent to the running workers"


def log_at_worker_start() -> None:
    """Make Celery, if it is loaded, write the line when a worker is ready.

    Each transport calls it as it is made. Celery sends that signal once in the life of a worker,
    after its connection is made, and never in a program that only publishes.
    """
    signals = sys.modules.get("celery.signals")
    if signals is not None:
        signals.worker_ready.connect(_ready, dispatch_uid="binary-delay-worker-log")


def _ready(sender: Any = None, **_: Any) -> None:
    client = getattr(sender, "connection", None)
    connection = getattr(client, "connection", None)
    mechanism = mechanism_of(connection)
    if client is None or connection is None or mechanism is None:
        return
    settings = Settings.from_transport_options(client.transport_options)
    server = connection.server_properties
    broker = str(server.get("version", ""))
    text = line(
        settings,
        mechanism.router.topology,
        broker,
        is_refused="refused" in mechanism.executor.last_warning,
        confirms=confirms(client.transport_options),
    )
    logger.info("%s", text)
    if why := mechanism.amendments.why_impossible:
        logger.warning("%s: %s", NOT_RECORDED, why)
    for known in known_defects(server):
        logger.warning("%s", known)


def known_defects(server: Mapping[str, Any]) -> Iterator[Known]:
    """Yield the defects of a broker's release, and of the Celery and Kombu of this program.

    :param server: the properties that the broker sent when the connection opened.
    """
    is_rabbitmq = server.get("product") == "RabbitMQ"
    others = {product: _installed(product) for product in (CELERY, KOMBU)}
    yield from defects_of(str(server.get("version", "")) if is_rabbitmq else "", others)


def _installed(product: str) -> str:
    """Return the installed version of a product; empty if it is not installed."""
    try:
        return version(product)
    except PackageNotFoundError:
        return ""


def confirms(transport_options: Mapping[str, Any]) -> bool:
    """Whether Kombu waits at each publish until the broker has the message."""
    return bool(transport_options.get("confirm_publish"))


def line(
    settings: Settings,
    topology: Topology,
    version: str,
    *,
    is_refused: bool = False,
    confirms: bool = True,
) -> str:
    """Write what a worker says of its transport.

    :param version: the broker's.
    :param is_refused: whether the broker has refused a part of what it needs.
    :param confirms: whether each publish waits until the broker has the message.
    """
    given = [
        f"{field.name}={value!r}"
        for field in fields(settings)
        if (value := getattr(settings, field.name)) != field.default
    ]
    but = ", but RabbitMQ refused a part of what it needs, as the warning says" * is_refused
    return (
        f"kombu-binary-delay is on{but}: delayed tasks wait on RabbitMQ {version} in "
        f"{describe(topology)}; settings: {', '.join(given) or 'the defaults'}"
        + "; publisher confirms are off (confirm_publish): what a broken connection loses is lost"
        * (not confirms)
    )


def describe(topology: Topology) -> str:
    """Describe a ladder: its name, levels, tick and longest delay."""
    ladder: Ladder = topology.ladder
    return (
        f"{topology.queue_type} queues of the ladder {topology.prefix} ({ladder.levels} levels, "
        f"tick {human(ladder.tick)}, longest delay {human(ladder.maximum)})"
    )
