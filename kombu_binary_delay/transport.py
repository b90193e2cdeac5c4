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
* Supports Delay: Yes, by Celery's ``countdown`` and ``eta``, or an ``x-delay`` header in ms

Connection String
=================
With ``transport="kombu_binary_delay:Transport"`` (Celery: ``broker_transport``), any connection
string of Kombu's own ``amqp`` transport::

    amqp://[USER:PASSWORD@]BROKER_ADDRESS[:PORT][/VIRTUALHOST]
    amqps://[USER:PASSWORD@]BROKER_ADDRESS[:PORT][/VIRTUALHOST]

After :func:`kombu_binary_delay.register`, also, without and with TLS::

    binary-delay://[USER:PASSWORD@]BROKER_ADDRESS[:PORT][/VIRTUALHOST]
    binary-delays://[USER:PASSWORD@]BROKER_ADDRESS[:PORT][/VIRTUALHOST]

Transport Options
=================
* ``binary_delay``: a mapping of the settings of :class:`kombu_binary_delay.Settings`.

All others are those of Kombu's ``amqp`` transport.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import AccessRefused, NotFound
from kombu.transport import TRANSPORT_ALIASES, pyamqp

from .amendments.celery import BROADCASTS
from .amendments.door import AmendingChannel
from .amendments.record import GENERATION, KEY, REPLACES
from .amendments.stream import Amendments
from .batching import PublishBatch
from .buffering import BufferingConnection, FrameBuffer
from .compat.celery import MarkedDriverType, check_declared_first, disable_native_delivery
from .compat.urls import ALIAS, as_uri, check_scheme, read_urls
from .compat.worker_log import log_at_worker_start
from .errors import TopologyError
from .executor import Executor
from .journal import Journal, follow_celery
from .mechanism import Mechanism, mechanism_of
from .model.address import Destination
from .model.delay import ETA, X_DELAY, due_time, headers_of_body
from .router import Plan, Router
from .settings import Settings

_HEADERS = "application_headers"


#: The class that a mixin is mixed in before; it has all that they call.
_Above: Any = object


class ChannelMixin(AmendingChannel):
    """A channel that delays: outward by the ladder; inward a message looks as it was published.

    To be mixed in before a channel class of Kombu's ``pyamqp`` transport, or one like it, whose
    connection was made by a :class:`TransportMixin`.
    """

    # -- outward -------------------------------------------------------------------------------

    def _basic_publish(
        self,
        msg: Any,
        exchange: str = "",
        routing_key: str = "",
        mandatory: bool = False,
        immediate: bool = False,
        timeout: float | None = None,
        confirm_timeout: float | None = None,
        argsig: str = "Bssbb",
    ) -> Any:
        """Publish a message, with a delay if its headers ask for one.

        :raises DelayError: if they ask for a delay that cannot be read, or is out of range.
        :raises AddressError: if the destination is too long for a delayed message.
        :raises TopologyError: if the broker refuses to declare what the delay needs.
        """
        # Spared where nothing can ask: each publish comes here.
        headers = msg.properties.get(_HEADERS)
        asked = (headers or self._reads_bodies) and self.asked(msg)
        # One with a generation is a retry: it goes with the first.
        if headers and (KEY in headers or REPLACES in headers) and GENERATION not in headers:
            msg, records = self.begin_generation(msg, asked or {})
            options = (mandatory, immediate, timeout, confirm_timeout, argsig)
            result = self._basic_publish(msg, exchange, routing_key, *options)
            self._after_publish(partial(self.record_generations, records))
            return result
        if not asked:
            if exchange and exchange.endswith(BROADCASTS):
                self._record_broadcast(msg)
            # One by one: to gather them in a dict and spread it again would cost a microsecond.
            return super()._basic_publish(
                msg, exchange, routing_key, mandatory, immediate, timeout, confirm_timeout, argsig
            )
        now = time.time_ns() // 1000
        due = due_time(asked, now)
        # As amqp does, which writes None as an empty name.
        plan = self.plan(msg.properties, due, exchange or "", routing_key or "", now)
        # Kombu hands out one dict of headers for all attempts of a publish: it stays as it is.
        delayed = amqp.Message(msg.body)
        delayed.properties = plan.properties
        result = super()._basic_publish(
            delayed,
            plan.exchange,
            plan.routing_key,
            mandatory,
            immediate,
            timeout,
            confirm_timeout,
            argsig,
        )
        journal = self._mechanism.journal
        if journal is not None:
            note = partial(journal.scheduled, plan.properties, plan.exchange, plan.routing_key)
            self._after_publish(note)
        return result

    # amqp shadows this by an instance attribute where publisher confirms are on, and calls
    # _basic_publish from there: so the work is done in that one, and this is the same function.
    basic_publish = _basic_publish

    def asked(self, msg: Any) -> dict[str, Any] | None:
        """Return the headers by which a message asks for a delay, if it does."""
        headers: dict[str, Any] | None = msg.properties.get(_HEADERS)
        if headers and (headers.get(ETA) is not None or X_DELAY in headers):
            return headers
        return headers_of_body(msg.properties, msg.body) if self._reads_bodies else None

    def plan(
        self, properties: dict[str, Any], due: int | None, exchange: str, routing_key: str, now: int
    ) -> Plan:
        """Return how a message that asks for a delay is to be published; what it needs exists.

        :param due: microseconds since the epoch; None for a delay of zero.
        :param now: the same, of this machine's clock.
        :raises DelayError, AddressError, TopologyError: as :meth:`basic_publish`.
        """
        router = self._router
        destination = Destination(exchange, routing_key)
        plan = router.publish(properties, due, destination, now)
        if plan.needs:
            self._run(router.prepare(plan.needs, now))
            # That took time, which is a part of the delay; one tick of it is left at least.
            now = min(time.time_ns() // 1000, (due or 0) - 1)
            plan = router.publish(properties, due, destination, now, plan.lane)
        return plan

    def basic_publish_confirm(self, *args: Any, **kwargs: Any) -> Any:
        """Publish as :meth:`basic_publish`, and wait for the confirm.

        Where the ladder has gone, it is declared again. Its absence has closed the channel and
        opened it anew, so that a channel with consumers has lost them: there, the error is raised.

        :raises TopologyError: if this user may not publish to the ladder.
        """
        consumers = bool(self.callbacks)
        try:
            return self._publish_and_go_on(*args, **kwargs)
        except NotFound as exc:
            # The broker took nothing, so to send it again doubles nothing.
            if consumers or not self._router.topology.is_named_in(str(exc)):
                raise
            return self._publish_and_go_on(*args, **kwargs)
        except AccessRefused as exc:
            if not self._router.topology.is_named_in(str(exc)):
                raise
            raise TopologyError(f"a delayed message is refused: {exc.reply_text}") from exc

    def _publish_and_go_on(self, *args: Any, **kwargs: Any) -> Any:
        # What comes after talks to the broker. Between a publish and its confirm, it would take the
        # confirm that is waited for.
        before, self._afterwards = self._afterwards, []
        try:
            result = super().basic_publish_confirm(*args, **kwargs)
        finally:
            actions, self._afterwards = self._afterwards, before
        for action in actions or ():
            action()
        return result

    def _after_publish(self, action: Callable[[], object]) -> None:
        """Do something now, or after the confirm that is waited for."""
        if self._afterwards is not None:
            self._afterwards.append(action)
        else:
            action()

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        """Make what Kombu's ``Producer.batch()`` publishes with (Kombu 5.7 and later)."""
        return PublishBatch(self, max_size)

    def tx_select(self) -> Any:
        """Begin transactions; a batch, which has a channel of its own, has no part in them."""
        result = super().tx_select()
        self.supports_batch_publish = False
        return result

    def _on_close(self, reply_code: int, reply_text: str, *args: Any) -> Any:
        mechanism = mechanism_of(self.connection)
        if mechanism and mechanism.router.topology.is_named_in(reply_text):
            if reply_code == NotFound.code:
                mechanism.router.lost()
            if reply_code == AccessRefused.code and args == spec.Basic.Publish:
                reply_text += (
                    "; grant this user the permission write on that exchange, and the topic "
                    "permission write for that key where there are topic permissions"
                )
        return super()._on_close(reply_code, reply_text, *args)

    # -- inward --------------------------------------------------------------------------------

    def message_to_python(self, raw_message: Any) -> Any:
        """Make a Kombu message that looks as if just published to its destination."""
        info = raw_message.delivery_info
        exchange, routing_key = info.get("exchange", ""), info.get("routing_key", "")
        found = self._router.received(
            exchange, routing_key, raw_message.properties, self._queue_of(info)
        )
        journal = self._mechanism.journal
        if found is None:
            if journal is not None:
                journal.received(raw_message.properties, Destination(exchange, routing_key))
        else:
            if journal is not None:
                journal.released(raw_message.properties, found.destination)
            info["exchange"], info["routing_key"] = found.destination
            raw_message.properties = found.properties
        return super().message_to_python(raw_message)

    #: Kombu asks, before it asks for a batch.
    supports_batch_publish = True
    _reads_bodies = False
    #: What to do after the confirm; None where none is waited for.
    _afterwards: list[Callable[[], object]] | None = None


class ConnectionMixin(BufferingConnection):
    """A connection whose channels delay."""

    delay_mechanism: Mechanism | None = None
    #: Whether the broker has blocked it, as one that publishes while memory or disk are short.
    is_blocked = False

    def _on_blocked(self) -> Any:
        self.is_blocked = True
        return super()._on_blocked()

    def _on_unblocked(self) -> Any:
        self.is_blocked = False
        return super()._on_unblocked()


class TransportMixin(_Above):
    """A transport whose channels delay; to be mixed in before Kombu's ``pyamqp`` transport.

    Its ``Connection`` must be one with a :class:`ConnectionMixin`, and its channels with a
    :class:`ChannelMixin`.
    """

    driver_type = MarkedDriverType("amqp")
    implements = pyamqp.Transport.implements.extend(batch_publish=True)
    #: Kombu then leaves the URL to us, scheme and all: see :func:`.compat.urls.read_urls`.
    can_parse_url = True
    #: The scheme of the URLs that name this transport, and with an ``s`` behind it, its twin over
    #: TLS. Another transport needs another.
    alias = ALIAS

    def __init__(self, client: Any, **kwargs: Any) -> None:
        disable_native_delivery()
        check_declared_first()
        follow_celery(client.transport_options)
        log_at_worker_start()
        super().__init__(client, **kwargs)

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """Format the connection's parameters as a URL, without the password unless asked."""
        return as_uri(self.client, include_password=include_password, mask=mask)

    def establish_connection(self) -> Any:
        """Connect.

        :raises SettingsError: for invalid settings, and for the URL of another kind of broker among
            those to fail over to; before anything is sent.
        """
        for url in self.client.alt:
            check_scheme(url, type(self))
        settings = Settings.from_transport_options(self.client.transport_options)
        connection = super().establish_connection()
        server = connection.server_properties
        connection.frame_buffer = FrameBuffer(connection)
        executor = Executor(connection, settings.namespace)
        router = Router(settings, server, connection.virtual_host)
        journal = None
        if settings.journal is not None:
            journal = Journal(settings, router.topology, executor, server)
        amendments = Amendments(connection, router, executor, settings, server)
        connection.delay_mechanism = Mechanism(router, executor, journal, amendments)
        executor.run(router.opened())
        if settings.protocol_1:
            # Of this connection alone.
            reading = {"_reads_bodies": True}
            connection.Channel = type("Protocol1Channel", (connection.Channel,), reading)
        return connection


class Channel(ChannelMixin, pyamqp.Channel):
    """A channel of Kombu's ``pyamqp`` transport that delays."""


class Connection(ConnectionMixin, pyamqp.Connection):
    """A connection whose channels delay."""

    Channel = Channel


class Transport(TransportMixin, pyamqp.Transport):
    """Kombu's ``pyamqp`` transport, with delays that live in the broker."""

    Connection = Connection


class SSLTransport(TransportMixin, pyamqp.SSLTransport):
    """The same over TLS."""

    Connection = Connection


def register() -> None:
    """Let ``binary-delay://`` and, over TLS, ``binary-delays://`` name our transports."""
    for scheme, transport in ((ALIAS, Transport), (f"{ALIAS}s", SSLTransport)):
        TRANSPORT_ALIASES[scheme] = f"{transport.__module__}:{transport.__name__}"


read_urls()
