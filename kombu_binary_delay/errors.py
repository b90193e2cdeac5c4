"""One root, few leaves. Every message names the value, the limit and the remedy.

The root is a :class:`kombu.exceptions.KombuError`, so that code which already catches Kombu's
errors catches ours; whatever a bad value caused is a :class:`ValueError` too.
"""

from __future__ import annotations

from kombu.exceptions import KombuError


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
