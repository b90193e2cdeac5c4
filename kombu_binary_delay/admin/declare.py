"""Declare and delete parts of a topology: the only changes that operators' functions make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from amqp.exceptions import ChannelError

from kombu_binary_delay.errors import BinaryDelayError
from kombu_binary_delay.executor import Executor, unbind
from kombu_binary_delay.executor import declare as declare_on
from kombu_binary_delay.model.parts import Binding, Part
from kombu_binary_delay.model.topology import Topology


def declare(connection: Any, topology: Topology, part: Part, stale: Iterable[Binding] = ()) -> None:
    """Declare a part, and then remove the bindings that it replaces.

    :param connection: a :class:`kombu.Connection`.
    :raises TopologyError: if the broker refuses.
    """
    executor = Executor(connection.connection, topology.namespace)
    with executor.channel("a part of the ladder") as channel:
        try:
            declare_on(channel, part)
            unbind(channel, stale)
        except (ChannelError, BinaryDelayError):
            channel.close()
            raise
        channel.close()


def delete_exchanges(connection: Any, names: Iterable[str]) -> None:
    """Delete exchanges; those that do not exist are ignored."""
    channel = connection.channel()
    for name in names:
        channel.exchange_delete(name)
    channel.close()
