"""Declare parts of a topology, and undo them: all that the operator's side changes on a broker."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from amqp.exceptions import ChannelError, NotFound

from kombu_binary_delay.channel import OwnChannel, declare_part
from kombu_binary_delay.errors import BinaryDelayError
from kombu_binary_delay.model.topology import Binding, Part, Topology


def declare(connection: Any, topology: Topology, part: Part, stale: Iterable[Binding] = ()) -> None:
    """Declare a part, and then remove bindings that it takes the place of.

    :param connection: a :class:`kombu.Connection`.
    :raises TopologyError: where the broker refuses.
    """
    own = OwnChannel(connection.connection, topology.namespace)
    with own.lend("a part of the ladder") as channel:
        try:
            declare_part(channel, part)
            unbind(channel, stale)
        except (ChannelError, BinaryDelayError):
            channel.close()
            raise
        channel.close()


def unbind(channel: Any, bindings: Iterable[Binding]) -> None:
    """Remove bindings on a channel; those that are gone already count as removed."""
    for each in bindings:
        remove = channel.queue_unbind if each.to_queue else channel.exchange_unbind
        with suppress(NotFound):
            remove(each.destination, each.source, each.key, arguments=dict(each.arguments))


def delete_exchanges(connection: Any, names: Iterable[str]) -> None:
    """Delete exchanges; those that do not exist count as deleted."""
    channel = connection.channel()
    for name in names:
        channel.exchange_delete(name)
    channel.close()
