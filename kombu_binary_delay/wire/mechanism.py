"""What a connection of our transport carries for its channels, and how to find it.

Batches and journals also work on connections of Kombu's own transport, which carry nothing, so they
call :func:`mechanism_of`. This module imports the parts for their types only: some import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kombu_binary_delay.amendments.holding import Held
    from kombu_binary_delay.amendments.stream import Amendments
    from kombu_binary_delay.journal.writer import Journal
    from kombu_binary_delay.publishing.way_out import WayOut
    from kombu_binary_delay.routing.router import Router

    from .executor import Executor

#: The transport, as the settings of Kombu and Celery name it.
TRANSPORT = "kombu_binary_delay:Transport"


@dataclass(frozen=True)
class Mechanism:
    """The parts of one connection that delay messages; all of its channels share them.

    :param journal: None if the journal is off.
    """

    router: Router
    executor: Executor
    way_out: WayOut
    journal: Journal | None
    amendments: Amendments

    @property
    def holding(self) -> list[Held | Journal]:
        """Return the parts that may hold something in an alarm of the broker."""
        held = self.amendments.held
        return [held] if self.journal is None else [held, self.journal]


class MarkedDriverType(str):
    """The driver type of a transport that delays messages itself."""

    __slots__ = ()


def delays(transport: Any) -> bool:
    """Return whether a transport, or a class of transports, delays messages itself."""
    return isinstance(getattr(transport, "driver_type", None), MarkedDriverType)


def mechanism_of(connection: Any) -> Mechanism | None:
    """Return the mechanism of a py-amqp connection; None if it is not of our transport."""
    return getattr(connection, "delay_mechanism", None)


def without_transport(connected: Any) -> str:
    """Return the text of the error for a :class:`kombu.Connection` that is not of our transport."""
    return (
        f"{connected.as_uri()} is a connection without the transport {TRANSPORT}; give a "
        f"connection with it"
    )
