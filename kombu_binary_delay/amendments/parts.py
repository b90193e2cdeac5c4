"""What amendments need on the broker: their names, and the exchange with its streams. Pure."""

from __future__ import annotations

from kombu_binary_delay.model.parts import Binding, Exchange, Part, Queue
from kombu_binary_delay.model.topology import VERSION
from kombu_binary_delay.settings import Settings

#: The routing keys of the exchange, and the last words of the streams' names.
IDS = "ids"
KEYS = "keys"
#: How long the stream of keys keeps records, as RabbitMQ's ``x-max-age`` has it.
KEYS_MAX_AGE = "1D"
#: Retention takes whole segments, and leaves one: small ones are forgotten in time. In bytes.
_SEGMENT = 1_000_000
#: RabbitMQ's own: the exchange that a message was published to before it first waited.
ENTERED = "x-first-death-exchange"


def exchange_name(namespace: str) -> str:
    """Name the exchange that amendments are written to."""
    return f"{namespace}.{VERSION}.amendments"


def stream_name(namespace: str, key: str) -> str:
    """Name the stream of ids or of keys."""
    return f"{exchange_name(namespace)}.{key}"


def amendments_part(settings: Settings) -> Part:
    """Compute what amendments need on the broker: an exchange and two streams."""
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
