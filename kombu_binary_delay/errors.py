"""One root, few leaves. Every message names the value, the limit and the remedy.

The root is a :class:`kombu.exceptions.KombuError`, so that code which already catches Kombu's
errors catches ours; whatever a bad value caused is a :class:`ValueError` too.
"""

from __future__ import annotations

from typing import Any

from kombu.exceptions import KombuError

try:
    from kombu.exceptions import BatchPublishError
except ImportError:  # before Kombu 5.7

    class BatchPublishError(KombuError):  # type: ignore[no-redef]
        """Kombu has it since 5.7; who catches that one catches ours."""


class BinaryDelayError(KombuError):
    """The root of every error that this package raises."""


class LadderError(BinaryDelayError, ValueError):
    """A ladder that cannot be: no level, a radix below 2, a tick below 1 ms, a TTL too long."""


class DelayError(BinaryDelayError, ValueError):
    """A delay that cannot be read or is out of range: wrong type, NaN, negative, too long."""


class AddressError(BinaryDelayError, ValueError):
    """A destination that fits no routing key, or a routing key that is no address."""


class SettingsError(BinaryDelayError, ValueError):
    """An unknown key or a bad value in ``broker_transport_options["binary_delay"]``."""


class TopologyError(BinaryDelayError):
    """The broker refused to declare a part of the ladder or a binding of its delivery side."""


class AmendmentError(BinaryDelayError, ValueError):
    """What waits cannot be amended: a bad id, key or time, or a broker or user that cannot."""


class UnconfirmedError(BinaryDelayError, BatchPublishError):
    """The broker did not confirm all messages of a batch: ``outcomes`` says what it did.

    :param outcomes: the :class:`~kombu_binary_delay.Outcome` of each that it did not confirm.
    """

    def __init__(self, message: str, outcomes: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.outcomes = outcomes
