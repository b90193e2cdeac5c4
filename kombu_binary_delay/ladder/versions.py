"""What a broker supports, by its version and by who runs it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .address import length

#: The oldest release that is supported. Quorum queues have a message TTL, and dead-letter at least
#: once, since then.
OLDEST = (3, 10)
#: RabbitMQ does not start with the feature flag ``stream_queue`` left off, since 3.12.
STREAMS_ALWAYS_SINCE = (3, 12)
#: The names of Amazon MQ's brokers, from its documentation. The first has the suffix of China, too.
_AMAZON = re.compile(r"\.mq(-fips)?\.[a-z0-9-]+\.(amazonaws\.(com(\.cn)?|eu)|on\.aws)\.?(:\d+)?$")
#: Why there may be no streams on it.
AMAZON = "Amazon MQ does not support streams, and loses data where one is made"
#: The operator policy that Amazon MQ makes in each virtual host.
AMAZON_POLICY = "default_operator_policy_AWS_managed"
#: The most bytes of the text of a broker's error.
MAX_REPLY = 255
#: A name as long as any of an exchange's type: RabbitMQ's plugins have up to 17 characters.
_LONGEST_TYPE = "x-consistent-hash"
#: The lowest priority that quorum queues treat as high; they have two priorities.
URGENT = 5


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version such as ``"3.10.8"``, up to the third."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def release(version: str) -> tuple[int, ...]:
    """Return the major and minor number of a version such as ``"3.10.8"``."""
    return numbers(version)[:2]


def is_since(server: Mapping[str, Any], since: tuple[int, ...]) -> bool:
    """Whether a broker is a RabbitMQ of the version ``since`` or later.

    :param server: the properties that it sends when a connection opens.
    """
    version = str(server.get("version", ""))
    return server.get("product") == "RabbitMQ" and release(version) >= since


def is_amazon(host: str) -> bool:
    """Whether a name of a host, with or without a port, is that of an Amazon MQ broker."""
    return _AMAZON.search(host.lower()) is not None


def why_no_streams(server: Mapping[str, Any], host: str) -> str:
    """Return why streams may not be on a broker; empty if they may.

    What declares or reads a stream of ours asks this, and nothing else decides it.

    :param server: the properties that it sends when a connection opens.
    :param host: the name by which it was reached.
    """
    if is_amazon(host):
        return AMAZON
    if not is_since(server, OLDEST):
        return f"{server.get('product')} {server.get('version', '')} has no streams that are known"
    return ""


def can_be_denied(name: str, vhost: str) -> bool:
    """Whether a broker can report that an exchange or queue of this name does not exist.

    The error text has at most 255 bytes, and a longer one is cut. If it has a character that is not
    ASCII, RabbitMQ 4.3 closes the connection instead, and earlier releases can cut within the
    character, so that no client can read the text.
    """
    return _is_whole(f"NOT_FOUND - no exchange '{name}' in vhost '{vhost}'")


def can_have_type_told(exchange: str, vhost: str) -> bool:
    """Whether a broker can report that an exchange of this name has another type.

    For the reason, see :func:`can_be_denied`; this text is longer.
    """
    return _is_whole(
        f"PRECONDITION_FAILED - inequivalent arg 'type' for exchange '{exchange}' in vhost "
        f"'{vhost}': received 'headers' but current is '{_LONGEST_TYPE}'"
    )


def can_have_arguments_told(queue: str, vhost: str) -> bool:
    """Whether a broker can report the arguments of a queue of this name.

    For the reason, see :func:`can_be_denied`; this text has values of any length.
    """
    return queue.isascii() and vhost.isascii()


def _is_whole(text: str) -> bool:
    return text.isascii() or length(text) <= MAX_REPLY


def lets_urgent_hold_up(server: Mapping[str, Any]) -> bool:
    """Whether messages of a high priority keep other messages in a quorum queue from expiring.

    On RabbitMQ 4.0 to 4.2, a quorum queue checks only the message that it would deliver next, and
    it delivers two of a high priority before each other one; expired messages behind it wait.
    """
    return is_since(server, (4, 0)) and not is_since(server, (4, 3))
