"""The exchange and the streams of amendments, and their names. Pure."""

from __future__ import annotations

import re
from dataclasses import replace

from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.parts import Binding, Exchange, Part, Queue
from kombu_binary_delay.ladder.topology import VERSION, Topology
from kombu_binary_delay.settings import Settings

#: The routing keys of the exchange, and the last words of the streams' names.
IDS = "ids"
KEYS = "keys"
#: How long the stream of keys keeps records, as RabbitMQ's ``x-max-age`` has it.
KEYS_MAX_AGE = "1D"
#: RabbitMQ deletes whole segments, and keeps the last: small ones expire in time. In bytes.
_SEGMENT = 1_000_000
#: RabbitMQ's header with the exchange that a message was published to before it was first in a
#: queue that it left as a dead letter.
ENTERED = "x-first-death-exchange"
#: The names of the exchange, and of the queues by which records leave ladders, in any namespace.
_EXCHANGE = re.compile(rf"[\w-]+\.{VERSION}\.amendments", re.ASCII)
_LATER = re.compile(rf"[\w-]+\.{VERSION}(?:-classic)?\.amendments\.later", re.ASCII)


def exchange_name(namespace: str) -> str:
    """Return the name of the exchange that amendments are published to."""
    return f"{namespace}.{VERSION}.amendments"


def stream_name(namespace: str, key: str) -> str:
    """Return the name of the stream of ids or of keys."""
    return f"{exchange_name(namespace)}.{key}"


def way_of_records(topology: Topology) -> Destination:
    """Return the destination of the records that wait on a ladder."""
    return Destination("", f"{topology.delivery_prefix}.amendments.later")


def takes_records(place: Destination) -> bool:
    """Return whether what is published to a destination may amend, in any namespace."""
    if place.exchange:
        return _EXCHANGE.fullmatch(place.exchange) is not None
    return _LATER.fullmatch(place.routing_key) is not None


def later_part(topology: Topology) -> Part:
    """Return the queue by which records leave the ladder, for the exchange of amendments.

    What has been in a queue has a first death, and RabbitMQ writes to which exchange it was
    published before. So no message gets from a level to a stream with what its publisher says of
    that.
    """
    name = way_of_records(topology).routing_key
    (relay,) = topology.queue_relay(name).queues
    back = {
        "x-dead-letter-exchange": exchange_name(topology.namespace),
        "x-dead-letter-routing-key": IDS,
    }
    arguments = tuple({**dict(relay.arguments), **back}.items())
    queue = replace(relay, name=name, arguments=arguments)
    return Part((), (queue,)) + topology.to_queue(name)


def amendments_part(settings: Settings) -> Part:
    """Return the exchange and the two streams of amendments."""
    exchange = exchange_name(settings.namespace)
    ages = {IDS: settings.amendments_max_age, KEYS: KEYS_MAX_AGE}
    return Part(
        (Exchange(exchange),),
        tuple(
            Queue(
                stream_name(settings.namespace, key),
                (
                    ("x-queue-type", "stream"),
                    ("x-max-age", age),
                    ("x-stream-max-segment-size-bytes", _SEGMENT),
                ),
            )
            for key, age in ages.items()
        ),
        tuple(Binding(exchange, stream_name(settings.namespace, key), key) for key in ages),
    )
