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
from amqp.exceptions import AccessRefused, NotFound, RecoverableConnectionError
from kombu.transport import pyamqp

from .batching.batch import PublishBatch
from .compat.celery import MarkedDriverType, look_before_copying, stand_aside
from .compat.urls import display, enlist, settle
from .declare import Declarer
from .errors import AddressError, TopologyError
from .journal import follow_celery
from .model.address import Destination
from .model.delay import ETA, PLUGIN_TYPE, X_DELAY, due_time, headers_of_body, plain_exchange
from .model.envelope import HEADER, carried, further_keys, unwrap, wrap
from .model.foreign import FOREIGN_BY_DELIVERY
from .model.topology import Topology
from .settings import Settings

_HEADERS = "application_headers"


#: What a mixin stands before; it has all that they call.
_Above: Any = object


class ChannelMixin(_Above):
    """The door: outward a delayed publish enters the ladder, inward it looks as it did before.

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

        :raises DelayError: where they ask for a delay that cannot be read, or is out of range.
        :raises AddressError: where the routing key is too long for a delayed message.
        :raises TopologyError: where the broker refuses to declare what the delay needs.
        """
        # Spared where nothing can ask: each publish comes here.
        asked = (msg.properties.get(_HEADERS) or self._reads_bodies) and self.asked(msg)
        if asked:
            now = time.time_ns() // 1000
            due = due_time(asked, now)
            # As amqp does, which writes None as an empty name.
            properties, exchange, routing_key = self.delayed(
                msg.properties, due, now, exchange or "", routing_key or ""
            )
            # Kombu hands out one dict of headers for all attempts of a publish: it stays as it is.
            msg = amqp.Message(msg.body)
            msg.properties = properties
        # One by one: to gather them in a dict and spread it again would cost a microsecond.
        result = super()._basic_publish(
            msg, exchange, routing_key, mandatory, immediate, timeout, confirm_timeout, argsig
        )
        if asked and (journal := self._declarer.journal) is not None:
            if self._to_note is None:
                journal.scheduled(properties, exchange, routing_key)
            else:
                self._to_note.append((properties, exchange, routing_key))
        return result

    # amqp mirrors this by an instance attribute where publisher confirms are on, and calls
    # _basic_publish from there: so the work is done in that one, and this is the same function.
    basic_publish = _basic_publish

    def basic_publish_confirm(self, *args: Any, **kwargs: Any) -> Any:
        """Publish as :meth:`basic_publish`, and wait for the confirm.

        Where the ladder has gone, it is declared again. Its absence has closed the channel and
        opened it anew, so that a channel with consumers has lost them: there, the error is raised.

        :raises TopologyError: where this user may not publish to the ladder.
        """
        consumers = bool(self.callbacks)
        try:
            return self._publish_and_note(*args, **kwargs)
        except NotFound as exc:
            # The broker took nothing, so to send it again doubles nothing.
            if consumers or not self._declarer.topology.is_named_in(str(exc)):
                raise
            return self._publish_and_note(*args, **kwargs)
        except AccessRefused as exc:
            if not self._declarer.topology.is_named_in(str(exc)):
                raise
            raise TopologyError(f"a delayed message is refused: {exc.reply_text}") from exc

    def _publish_and_note(self, *args: Any, **kwargs: Any) -> Any:
        # The journal talks to the broker. Between a publish and its confirm, it would take the
        # confirm that is waited for.
        before, self._to_note = self._to_note, []
        try:
            result = super().basic_publish_confirm(*args, **kwargs)
        finally:
            noted, self._to_note = self._to_note, before
        if noted and (journal := self._declarer.journal) is not None:
            for each in noted:
                journal.scheduled(*each)
        return result

    def asked(self, msg: Any) -> dict[str, Any] | None:
        """Read the headers by which a message asks for a delay, if it does."""
        headers: dict[str, Any] | None = msg.properties.get(_HEADERS)
        if headers and (headers.get(ETA) is not None or X_DELAY in headers):
            return headers
        return headers_of_body(msg.properties, msg.body) if self._reads_bodies else None

    def delayed(
        self, properties: dict[str, Any], due: int | None, now: int, exchange: str, routing_key: str
    ) -> tuple[dict[str, Any], str, str]:
        """Tell with what properties a message that asks for a delay is to be published, and where.

        :param due: microseconds since the epoch; None for a delay of zero.
        :param now: the same, of the publisher's clock.
        :returns: the properties, the exchange and the routing key.
        :raises DelayError, AddressError, TopologyError: as :meth:`basic_publish`.
        """
        headers = properties.get(_HEADERS) or {}
        if due is None or due <= now:
            if X_DELAY in headers:
                headers = {name: headers[name] for name in headers if name != X_DELAY}
                properties = {**properties, _HEADERS: headers}
            return properties, exchange, routing_key
        declarer = self._declarer
        topology = declarer.topology
        destination = Destination(exchange, routing_key)
        if exchange:
            theirs = FOREIGN_BY_DELIVERY.get(exchange, topology)
            if theirs is not topology:
                # A retry of what came by another system's ladder goes the way it came.
                digits = theirs.ladder.digits((due - now) / 1000)
                packed, key = _pack(theirs, theirs.address, properties, due, digits, destination)
                return packed, theirs.entry(digits), key
            if topology.owns(exchange):
                destination = topology.unwrap(destination, carried(headers))
        lane = declarer.lane(properties)
        pack = partial(_pack, topology, declarer.address, properties, due)
        digits = topology.ladder.digits((due - now) / 1000)
        # What cannot be addressed is an error before anything is declared.
        packed, key = pack(digits, destination)
        keys = [destination.routing_key, *further_keys(headers)]
        if declarer.prepare(lane, digits, destination.exchange, keys):
            # That took time, which is a part of the delay; what is left is one tick at least.
            left = max(due - time.time_ns() // 1000, 1)
            digits = topology.ladder.digits(left / 1000)
            packed, key = pack(digits, destination)
        return packed, lane.entry(digits), key

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        """Make what Kombu's ``Producer.batch()`` publishes with (Kombu 5.7 and later)."""
        return PublishBatch(self, max_size)

    def tx_select(self) -> Any:
        """Begin transactions; a batch, which has a channel of its own, has no part in them."""
        result = super().tx_select()
        self.supports_batch_publish = False
        return result

    def _on_close(self, reply_code: int, reply_text: str, *args: Any) -> Any:
        connection = self.connection
        declarer = getattr(connection, "binary_delay", None)
        if declarer and declarer.topology.is_named_in(reply_text):
            if reply_code == NotFound.code:
                declarer.forget()
            if reply_code == AccessRefused.code and args == spec.Basic.Publish:
                reply_text += (
                    "; grant this user the permission write on that exchange, and the topic "
                    "permission write for that key where there are topic permissions"
                )
        return super()._on_close(reply_code, reply_text, *args)

    # -- inward --------------------------------------------------------------------------------

    def message_to_python(self, raw_message: Any) -> Any:
        """Make a Kombu message that looks as if just published to its destination."""
        headers = raw_message.properties.get(_HEADERS)
        info = raw_message.delivery_info
        declarer = self._declarer
        # Another system's ladder may lead here, too.
        topology = FOREIGN_BY_DELIVERY.get(info.get("exchange"), declarer.topology)
        owns = topology.owns
        on_ladder = owns(info.get("exchange"))
        if on_ladder or (headers and HEADER in headers):
            try:
                _, destination = topology.parse(info.get("routing_key", ""), carried(headers or {}))
            except AddressError:
                pass
            else:
                info["routing_key"] = destination.routing_key
                # Elsewhere, the exchange is the user's: a relay led to it, or a dead letter.
                if on_ladder and declarer.believes(destination, topology):
                    info["exchange"] = destination.exchange
                if (journal := declarer.journal) is not None:
                    journal.released(raw_message.properties, destination)
            if headers:
                unwrap(raw_message.properties, owns)
                if on_ladder and topology.delay_header:
                    headers.pop(topology.delay_header, None)
        elif (journal := declarer.journal) is not None:
            destination = Destination(info.get("exchange", ""), info.get("routing_key", ""))
            journal.received(raw_message.properties, destination)
        return super().message_to_python(raw_message)

    # -- the delivery side follows what the user binds -----------------------------------------

    def exchange_declare(
        self,
        exchange: str,
        type: str,
        passive: bool = False,
        durable: bool = False,
        auto_delete: bool = True,
        nowait: bool = False,
        arguments: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Declare an exchange, and remember its type.

        One of the delayed-message plugin's type becomes a plain exchange of the type that it was
        to route like: the delay is ours, the plugin is not needed.

        :raises DelayError: where it does not say which type that is.
        """
        if type == PLUGIN_TYPE and not passive:
            type, arguments = plain_exchange(arguments)  # noqa: A001 - amqp's own name for it
        result = super().exchange_declare(
            exchange, type, passive, durable, auto_delete, nowait, arguments, **kwargs
        )
        if not passive:
            # A passive declaration proves that the exchange stands, and nothing of its type.
            self._declarer.declared_exchange(exchange, type)
        return result

    def exchange_delete(self, exchange: str, *args: Any, **kwargs: Any) -> Any:
        """Delete an exchange, and the way that delayed messages take to it."""
        result = super().exchange_delete(exchange, *args, **kwargs)
        self._declarer.deleted_exchange(exchange)
        return result

    def exchange_bind(
        self, destination: str, source: str = "", routing_key: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        """Bind an exchange to another, for delayed messages too."""
        result = super().exchange_bind(destination, source, routing_key, *args, **kwargs)
        self._declarer.bound(source, destination, routing_key, to_queue=False)
        return result

    def exchange_unbind(
        self, destination: str, source: str = "", routing_key: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        """Unbind an exchange from another, for delayed messages too."""
        result = super().exchange_unbind(destination, source, routing_key, *args, **kwargs)
        self._declarer.unbound(source, destination, routing_key, to_queue=False)
        return result

    def queue_declare(
        self,
        queue: str = "",
        passive: bool = False,
        durable: bool = False,
        exclusive: bool = False,
        auto_delete: bool = True,
        nowait: bool = False,
        arguments: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Declare a queue, and remember one that can be addressed by its name."""
        result = super().queue_declare(
            queue, passive, durable, exclusive, auto_delete, nowait, arguments, **kwargs
        )
        self._last_queue = result.queue if result is not None else queue
        # An exclusive queue, or one that expires, is somebody's mailbox for a while.
        given = arguments or {}
        if queue and not (exclusive or "x-expires" in given):
            refuses = str(given.get("x-overflow")).startswith("reject-publish")
            # A passive declaration proves that the queue stands, and nothing of its arguments.
            self._declarer.declared_queue(queue, refuses=None if passive else refuses)
        return result

    def queue_delete(self, queue: str = "", *args: Any, **kwargs: Any) -> Any:
        """Delete a queue; its bindings go with it."""
        result = super().queue_delete(queue, *args, **kwargs)
        self._declarer.deleted_queue(queue)
        return result

    def queue_bind(
        self, queue: str, exchange: str = "", routing_key: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        """Bind a queue, for delayed messages too."""
        result = super().queue_bind(queue, exchange, routing_key, *args, **kwargs)
        # To AMQP, an empty name is the queue that this channel declared last.
        self._declarer.bound(exchange, queue or self._last_queue, routing_key, to_queue=True)
        return result

    def queue_unbind(
        self, queue: str, exchange: str, routing_key: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        """Unbind a queue, for delayed messages too."""
        result = super().queue_unbind(queue, exchange, routing_key, *args, **kwargs)
        self._declarer.unbound(exchange, queue or self._last_queue, routing_key, to_queue=True)
        return result

    def basic_consume(self, *args: Any, **kwargs: Any) -> Any:
        """Consume: from here on, what this connection bound takes delayed messages too."""
        self._declarer.activate_or_warn()
        return super().basic_consume(*args, **kwargs)

    def basic_get(self, *args: Any, **kwargs: Any) -> Any:
        """Get a message: from here on as with :meth:`basic_consume`."""
        self._declarer.activate_or_warn()
        return super().basic_get(*args, **kwargs)

    #: Kombu asks, before it asks for a batch.
    supports_batch_publish = True
    _last_queue = ""
    _reads_bodies = False
    #: What to tell the journal of after the confirm; None where none is waited for.
    _to_note: list[tuple[dict[str, Any], str, str]] | None = None

    @property
    def _declarer(self) -> Declarer:
        connection = self.connection
        if connection is None:
            raise RecoverableConnectionError("the channel is closed")
        declarer: Declarer = connection.binary_delay
        return declarer


class ConnectionMixin(_Above):
    """A connection whose channels declare, now and then, in the middle of something else."""

    binary_delay: Declarer | None = None

    def on_inbound_method(self, channel_id: int, *args: Any) -> None:
        """Dispatch what came in, unless a declaration is to end first."""
        dispatch = partial(super().on_inbound_method, channel_id, *args)
        if self.binary_delay is None:
            dispatch()
        else:
            self.binary_delay.own.take(channel_id, dispatch)

    def read_held_first(self, timeout: float | None = None) -> Any:
        """Read from the broker, after what was read in the middle of a declaration.

        It stands in for ``blocking_read`` while any of that is held.
        """
        served = self.binary_delay is not None and self.binary_delay.own.serve_next()
        return served or super().blocking_read(timeout)


class TransportMixin(_Above):
    """A transport whose channels delay; to be mixed in before Kombu's ``pyamqp`` transport.

    Its ``Connection`` must be one with a :class:`ConnectionMixin`, and its channels with a
    :class:`ChannelMixin`.
    """

    driver_type = MarkedDriverType("amqp")
    implements = pyamqp.Transport.implements.extend(batch_publish=True)
    #: Kombu then leaves the URL to us, scheme and all.
    can_parse_url = True
    #: The URL scheme that names this transport; another transport needs another.
    alias = "binary-delay"

    def __init__(self, client: Any, **kwargs: Any) -> None:
        stand_aside()
        look_before_copying()
        follow_celery(client.transport_options)
        settle(client, type(self), self.alias)
        super().__init__(client, **kwargs)

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """Write the connection's parameters as a URL, without the password unless asked."""
        return display(self.client, include_password=include_password, mask=mask)

    def establish_connection(self) -> Any:
        """Connect.

        :raises SettingsError: for settings that cannot be, before anything is sent.
        """
        settings = Settings.from_transport_options(self.client.transport_options)
        connection = super().establish_connection()
        connection.binary_delay = Declarer(connection, settings)
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
    alias = "binary-delay-tls"


def register() -> None:
    """Let ``binary-delay://`` and, over TLS, ``binary-delays://`` name our transports."""
    enlist(Transport, Transport.alias)


def _pack(
    topology: Topology,
    address: Callable[[tuple[int, ...], Destination], str],
    properties: dict[str, Any],
    due: int,
    digits: tuple[int, ...],
    destination: Destination,
) -> tuple[dict[str, Any], str]:
    packed, key = wrap(
        properties, destination, -(-due // 1000), partial(address, digits), topology.owns
    )
    if topology.delay_header:
        packed[_HEADERS][topology.delay_header] = topology.ladder.delay(digits) // 1000
    return packed, key
