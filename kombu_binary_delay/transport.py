"""RabbitMQ transport for Kombu that keeps delayed messages in the broker.

Features
========
* Type: Native
* Supports Direct: Yes
* Supports Topic: Yes
* Supports Fanout: Yes
* Supports Headers: Yes
* Supports Priority: Yes
* Supports TTL: Yes
* Supports Delay: Yes, with Celery's ``countdown`` and ``eta``, or an ``x-delay`` header in ms

Connection String
=================
With ``transport="kombu_binary_delay:Transport"`` (Celery: ``broker_transport``), any connection
string of Kombu's ``amqp`` transport::

    amqp://[USER:PASSWORD@]BROKER_ADDRESS[:PORT][/VIRTUALHOST]
    amqps://[USER:PASSWORD@]BROKER_ADDRESS[:PORT][/VIRTUALHOST]

After a call of :func:`kombu_binary_delay.register`, also, without and with TLS::

    binary-delay://[USER:PASSWORD@]BROKER_ADDRESS[:PORT][/VIRTUALHOST]
    binary-delays://[USER:PASSWORD@]BROKER_ADDRESS[:PORT][/VIRTUALHOST]

Transport Options
=================
* ``binary_delay``: a mapping of settings, see :class:`kombu_binary_delay.Settings`.

All other options are those of Kombu's ``amqp`` transport.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from copy import copy
from functools import lru_cache
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, pyamqp

from .amendments.generations import Generations
from .amendments.stream import Amendments
from .celery_side.celery import check_declared_first, disable_native_delivery
from .celery_side.executed import follow_celery
from .celery_side.green import read_at_once
from .celery_side.hub import poll_at_once_if_ready, release_in_time
from .celery_side.urls import ALIAS, as_uri, check_scheme, read_urls
from .celery_side.worker_log import log_at_worker_start
from .channel import ChannelMixin
from .journal import Journal
from .publishing.way_out import WayOut
from .routing.knowledge import Shared
from .routing.router import Router
from .schedules.worker import take_part
from .settings import Settings
from .telemetry import watch
from .wire.connection import LOOK_EVERY, ConnectionMixin
from .wire.executor import Executor
from .wire.frame_buffer import FrameBuffer
from .wire.header_frames import leave_out_deaths
from .wire.mechanism import MarkedDriverType, Mechanism

#: The base of a mixin; the class that it is combined with has the methods it calls.
_Above: Any = object


class TransportMixin(_Above):
    """A transport whose channels delay messages. Put it before Kombu's ``pyamqp`` transport.

    Its ``Connection`` must have a :class:`ConnectionMixin`, and the connection's channels a
    :class:`ChannelMixin`.
    """

    driver_type = MarkedDriverType("amqp")
    implements = pyamqp.Transport.implements.extend(batch_publish=True)
    #: Kombu then passes the whole URL to us: see :func:`.celery_side.urls.read_urls`.
    can_parse_url = True
    #: The URL scheme of this transport; with an ``s`` at the end, of its TLS variant. A subclass
    #: that is registered as well needs another scheme.
    alias = ALIAS

    def __init__(self, client: Any, **kwargs: Any) -> None:
        disable_native_delivery()
        check_declared_first()
        read_at_once()
        follow_celery(client.transport_options)
        log_at_worker_start()
        take_part()
        super().__init__(client, **kwargs)

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """Format the connection's parameters as a URL; the password is masked by default."""
        return as_uri(self.client, include_password=include_password, mask=mask)

    def establish_connection(self) -> Any:
        """Connect.

        :raises SettingsError: before anything is sent, if the settings are invalid, or a failover
            URL is of another kind of broker.
        """
        for url in self.client.alt:
            check_scheme(url, type(self))
        settings = Settings.from_transport_options(self.client.transport_options)
        connection = self._connect()
        server = connection.server_properties
        connection.frame_buffer = FrameBuffer(connection)
        executor = Executor(connection, settings.namespace)
        place = connection.host, connection.virtual_host, self.client.userid
        broker = server.get("cluster_name"), server.get("version")
        router = Router(
            settings, server, connection.virtual_host, _shared(settings, *place, *broker)
        )
        journal = None
        if settings.journal is not None:
            journal = Journal(settings, router.topology, executor, server)
        amendments = Amendments(connection, router, executor, settings, server)
        way_out = WayOut(connection, router, executor, journal, Generations(amendments))
        connection.delay_mechanism = Mechanism(router, executor, way_out, journal, amendments)
        connection.look_at = time.monotonic() + LOOK_EVERY
        leave_out_deaths(
            connection,
            router.topology.owns,
            lambda: journal is not None or bool(watch.delivered),
        )
        executor.run(router.opened())
        return connection

    def _connect(self) -> Any:
        # Kombu writes the host's name into TLS options without one; the next URL has another host.
        options = self.client.ssl
        self.client.ssl = copy(options)
        try:
            return super().establish_connection()
        finally:
            self.client.ssl = options

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Read from the connection in an event loop, which does not wait while it has work."""
        super().register_with_event_loop(connection, loop)
        poll_at_once_if_ready(loop)
        release_in_time(loop, connection)


@lru_cache(maxsize=64)
def _shared(*_: Hashable) -> Shared:
    """Return what connections share, by their settings, and what tells brokers and users apart."""
    return Shared()


class Channel(ChannelMixin, pyamqp.Channel):
    """A channel of Kombu's ``pyamqp`` transport that delays messages."""


class Connection(ConnectionMixin, pyamqp.Connection):
    """A connection whose channels delay messages."""

    Channel = Channel


class Transport(TransportMixin, pyamqp.Transport):
    """Kombu's ``pyamqp`` transport, with delays that RabbitMQ keeps."""

    Connection = Connection


class SSLTransport(TransportMixin, pyamqp.SSLTransport):
    """The same transport over TLS."""

    Connection = Connection


def register() -> None:
    """Register the URL schemes ``binary-delay://`` and, for TLS, ``binary-delays://``."""
    for scheme, transport in ((ALIAS, Transport), (f"{ALIAS}s", SSLTransport)):
        TRANSPORT_ALIASES[scheme] = f"{transport.__module__}:{transport.__name__}"


read_urls()
