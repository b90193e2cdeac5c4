"""Delayed delivery for Kombu and Celery on RabbitMQ: the delay lives in the broker."""

from .batch import Outcome, PublishBatch
from .errors import (
    AddressError,
    BinaryDelayError,
    DelayError,
    LadderError,
    SettingsError,
    TopologyError,
    UnconfirmedError,
)
from .ladder import Ladder
from .settings import Settings
from .topology import Topology
from .transport import (
    ChannelMixin,
    ConnectionMixin,
    SSLTransport,
    Transport,
    TransportMixin,
    register,
)

__all__ = [
    # a transport and its parts
    "ChannelMixin",
    "ConnectionMixin",
    "SSLTransport",
    "Transport",
    "TransportMixin",
    "register",
    # many publishes with few waits
    "Outcome",
    "PublishBatch",
    # values
    "Ladder",
    "Settings",
    "Topology",
    # errors
    "AddressError",
    "BinaryDelayError",
    "DelayError",
    "LadderError",
    "SettingsError",
    "TopologyError",
    "UnconfirmedError",
]
