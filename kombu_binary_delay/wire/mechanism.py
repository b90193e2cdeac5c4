"""The parts that a connection of our transport holds: router, executor, journal, amendments.

Batches and journals also work on connections of Kombu's own transport, which hold none of these, so
they call :func:`mechanism_of`. This module must not import the parts: some of them import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: The transport, as the settings of Kombu and Celery name it.
TRANSPORT = "kombu_binary_delay:Transport"


@dataclass(frozen=True)
class Mechanism:
    """The parts of one connection that delay messages; all of its channels share them.

    :param router: a :class:`.routing.router.Router`.
    :param executor: an :class:`.executor.Executor`.
    :param journal: a :class:`.journal.Journal`, or None if the journal is off.
    :param amendments: the :class:`.amendments.stream.Amendments`.
    """

    router: Any
    executor: Any
    journal: Any = None
    amendments: Any = None

    @property
    def holding(self) -> list[Any]:
        """Return the parts that may hold something in an alarm of the broker."""
        held = [] if self.amendments is None else [self.amendments.held]
        return held if self.journal is None else [*held, self.journal]


def mechanism_of(connection: Any) -> Mechanism | None:
    """Return the mechanism of a py-amqp connection; None if it is not of our transport."""
    return getattr(connection, "delay_mechanism", None)


def without_transport(connected: Any) -> str:
    """Return the text of the error for a :class:`kombu.Connection` that is not of our transport."""
    return (
        f"{connected.as_uri()} is a connection without the transport {TRANSPORT}; give a "
        f"connection with it"
    )
