"""Delayed delivery for Kombu and Celery: messages wait inside RabbitMQ until they are due."""

from .amendments.api import cancel, replace, reschedule
from .channel import ChannelMixin
from .errors import (
    AddressError,
    AmendmentError,
    BinaryDelayError,
    DelayError,
    LadderError,
    ScheduleError,
    SettingsError,
    TopologyError,
    UnconfirmedError,
)
from .ladder.ladder import Ladder
from .ladder.topology import Topology
from .publishing.batch import Outcome, PublishBatch
from .settings import Settings
from .telemetry import Dropped, on_dropped
from .transport import SSLTransport, Transport, TransportMixin, register
from .wire.connection import ConnectionMixin

__all__ = [
    # a transport and its parts
    "ChannelMixin",
    "ConnectionMixin",
    "SSLTransport",
    "Transport",
    "TransportMixin",
    "register",
    # what waits, taken back
    "Dropped",
    "cancel",
    "on_dropped",
    "replace",
    "reschedule",
    # many publishes with few waits
    "Outcome",
    "PublishBatch",
    # values
    "Ladder",
    "Settings",
    "Topology",
    # errors
    "AddressError",
    "AmendmentError",
    "BinaryDelayError",
    "DelayError",
    "LadderError",
    "ScheduleError",
    "SettingsError",
    "TopologyError",
    "UnconfirmedError",
]
