"""What a connection of our transport carries: its router, executor, journal, amendments.

A batch or a journal is also used on connections of Kombu's own transport, which carry none: so they
ask :func:`mechanism_of`. This module must not import what it holds: some of that looks up this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mechanism:
    """The parts of one connection that delay; all of its channels share them.

    :param router: a :class:`.router.Router`.
    :param executor: an :class:`.executor.Executor`.
    :param journal: a :class:`.journal.Journal`, or None where nothing is to be journalled.
    :param amendments: the :class:`.amendments.stream.Amendments`.
    """

    router: Any
    executor: Any
    journal: Any = None
    amendments: Any = None


def mechanism_of(connection: Any) -> Mechanism | None:
    """Return what a connection of py-amqp carries; None where it is not of our transport."""
    return getattr(connection, "delay_mechanism", None)
