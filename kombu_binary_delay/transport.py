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

import math
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import lru_cache, partial
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import AccessRefused, NotFound, RecoverableConnectionError
from kombu.transport import TRANSPORT_ALIASES, pyamqp

from .amendments.celery import BROADCASTS, NESTED, REPLIES, as_resent, with_own_nested
from .amendments.door import AmendingChannel
from .amendments.generations import Generations
from .amendments.record import KEY, REPLACES
from .amendments.stream import Amendments
from .celery_side.celery import MarkedDriverType, check_declared_first, disable_native_delivery
from .celery_side.green import read_at_once
from .celery_side.hub import poll_at_once_if_ready, release_in_time
from .celery_side.urls import ALIAS, as_uri, check_scheme, read_urls
from .celery_side.worker_log import log_at_worker_start
from .errors import TopologyError
from .journal import Journal, follow_celery
from .ladder.address import Destination
from .ladder.delay import CHORD_UNLOCK, ETA, RETRIES, TASK, X_DELAY, is_over, is_retry
from .ladder.envelope import HEADERS
from .publishing import PublishBatch
from .publishing.frames import SMALLER
from .publishing.way_out import UNDELAYED, WayOut, encoded
from .routing.knowledge import Shared
from .routing.router import LOOK_AGAIN, Router
from .settings import Settings
from .wire.draining import raise_if_aborted, within
from .wire.executor import Executor
from .wire.following import is_consuming
from .wire.frame_buffer import BufferingConnection, FrameBuffer
from .wire.header_frames import leave_out_deaths
from .wire.mechanism import Mechanism, mechanism_of

#: How long to wait for each answer of the broker that a delayed message needs, in seconds, where
#: neither the publish nor the connection has a limit.
ANSWER_LIMIT = 30.0

#: How often a connection with consumers looks whether what they rely on still exists, in seconds.
LOOK_EVERY = LOOK_AGAIN / 1_000_000
#: How long to wait until the broker has taken the first message of a connection that relies on what
#: another one has found, in seconds.
TAKEN_LIMIT = 1.0

#: The base of a mixin; the class that it is combined with has the methods it calls.
_Above: Any = object


class ChannelMixin(AmendingChannel):
    """A channel that delays messages, and delivers them as they were published.

    Put it before a channel class of Kombu's ``pyamqp`` transport, or a similar one, whose
    connection a :class:`TransportMixin` makes.
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

        A retry of a Celery task that cannot be delayed is published without a delay instead.

        :raises DelayError: if the delay is invalid or out of range, or the message cannot be
            written, such as one whose headers do not fit into a frame with the ladder's.
        :raises AddressError: if the destination is invalid, or too long for a delayed message.
        :raises TopologyError: if the broker refuses to declare what the delay needs.
        :raises AmendmentError: if ``x-delay-key`` or ``x-delay-replaces`` is invalid, or cannot be
            recorded.
        """
        headers = msg.properties.get(HEADERS)
        if headers and TASK in headers and (headers.get(RETRIES) or headers[TASK] == CHORD_UNLOCK):
            msg, headers = _as_resent(msg, headers)
        # Each publish comes here: without a call, as long as nothing is asked for.
        if not headers or not (
            headers.get(ETA) is not None
            or X_DELAY in headers
            or KEY in headers
            or REPLACES in headers
        ):
            if exchange and exchange.endswith(BROADCASTS) and not exchange.startswith(REPLIES):
                self._record_broadcast(msg)
            # Positional: gathering them in a dict and unpacking it would cost a microsecond.
            return super()._basic_publish(
                msg, exchange, routing_key, mandatory, immediate, timeout, confirm_timeout, argsig
            )
        way_out, limit = self.way_out, timeout or self._confirm_timeout
        # amqp also writes None as an empty name.
        to = Destination(exchange or "", routing_key or "")
        in_transaction = not self.supports_batch_publish
        try:
            out = way_out.of(msg.properties, to, limit, in_transaction=in_transaction)
            # Kombu uses one dict of headers for all attempts of a publish, so it must not change.
            message = encoded(self.connection, msg.body, out.properties)
        except UNDELAYED as exc:
            if not is_retry(headers):
                raise
            # Celery would drop the task.
            out = way_out.left_to_worker(msg.properties, to, exc, in_transaction=in_transaction)
            message = encoded(self.connection, msg.body, out.properties)
        # py-amqp would hide a TimeoutError.
        self._raise_from_callbacks()
        options = (mandatory, immediate, timeout, confirm_timeout, argsig)
        result = super()._basic_publish(message, out.exchange, out.routing_key, *options)
        if out.due is not None and self._router.relies_on_others and not self._is_taken():
            out = way_out.again(out, limit)
            message = encoded(self.connection, msg.body, out.properties)
            result = super()._basic_publish(message, out.exchange, out.routing_key, *options)
        self._after_publish(partial(way_out.done, out))
        return result

    # With publisher confirms on, amqp hides this behind an instance attribute that calls
    # _basic_publish. So the work is done there, and this is the same function.
    basic_publish = _basic_publish

    def _is_taken(self) -> bool:
        """Return whether the broker has taken the first message, or will tell by a confirm.

        What another connection has found can be gone: without this answer, the message would be
        lost, and a program that closes the connection then would never know.

        :raises NotFound: if it was not, and the channel has consumers, which have ended with it.
        """
        self._router.relies_on_others = False
        if self._afterwards is not None:
            return True
        consumers = bool(self.callbacks)
        try:
            # It changes nothing, and is answered after the message.
            self.send_method(spec.Channel.Flow, "b", (True,))
            self.wait(spec.Channel.FlowOk, timeout=TAKEN_LIMIT)
        except NotFound as exc:
            if consumers or not self._router.topology.is_named_in(str(exc)):
                raise
            return False
        except (OSError, amqp.ConnectionError):
            # In an alarm, the broker answers nothing after a message, but takes it afterwards. And
            # if the connection has broken, the broker may have taken it: an error would have Kombu
            # publish it twice.
            pass
        return True

    @property
    def way_out(self) -> WayOut:
        """What makes this channel's messages ready to be published."""
        way_out: WayOut = self._mechanism.way_out
        return way_out

    def basic_publish_confirm(self, *args: Any, **kwargs: Any) -> Any:
        """Publish as :meth:`basic_publish`, and wait for the confirm.

        If the ladder was deleted, this declares it again and repeats the publish. The broker's
        error has closed the channel, which py-amqp then opens again without its consumers. So on a
        channel with consumers, the error is raised instead.

        :raises TopologyError: if this user may not publish to the ladder.
        """
        consumers = bool(self.callbacks)
        try:
            return self._publish_and_go_on(*args, **kwargs)
        except NotFound as exc:
            # The broker did not take the message, so another publish cannot duplicate it.
            if consumers or not self._router.topology.is_named_in(str(exc)):
                raise
            return self._publish_and_go_on(*args, **kwargs)
        except AccessRefused as exc:
            if not self._router.topology.is_named_in(str(exc)):
                raise
            raise TopologyError(f"RabbitMQ refused a delayed message: {exc.reply_text}") from exc

    def _publish_and_go_on(self, *args: Any, **kwargs: Any) -> Any:
        # The actions afterwards talk to the broker. Before the confirm, they would take the frame
        # with the confirm.
        before, self._afterwards = self._afterwards, []
        # py-amqp does not pass it on.
        self._confirm_timeout = kwargs.get("confirm_timeout")
        try:
            result = super().basic_publish_confirm(*args, **kwargs)
        finally:
            actions, self._afterwards = self._afterwards, before
            self._confirm_timeout = None
        for action in actions or ():
            action()
        return result

    def _after_publish(self, action: Callable[[], object]) -> None:
        """Call ``action`` now, after the confirm that a publish waits for, or after a commit."""
        if self._afterwards is not None:
            self._afterwards.append(action)
        else:
            action()

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        """Return the batch for Kombu's ``Producer.batch()`` (Kombu 5.7 and later)."""
        return PublishBatch(self, max_size)

    def tx_select(self) -> Any:
        """Begin transactions; batches use another channel and cannot take part in them."""
        result = super().tx_select()
        self.supports_batch_publish = False
        # Within a transaction, RabbitMQ takes it as well, and changes nothing.
        self._afterwards = self._afterwards or []
        return result

    def tx_commit(self) -> Any:
        """Commit a transaction, and record in the journal what it published."""
        result = super().tx_commit()
        actions, self._afterwards = self._afterwards, []
        for action in actions or ():
            action()
        return result

    def tx_rollback(self) -> Any:
        """Roll back a transaction: the journal records nothing of it."""
        result = super().tx_rollback()
        self._afterwards = []
        return result

    def _on_close(self, reply_code: int, reply_text: str, *args: Any) -> Any:
        # A transaction ends with its channel; py-amqp opens the channel again without one.
        self._afterwards, self.supports_batch_publish = None, True
        self._forget_consumers()
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
        """Return a Kombu message with the properties and the destination of its publish."""
        info = raw_message.delivery_info
        mechanism = (self.connection is None and self._left) or self._mechanism
        exchange, routing_key = info.get("exchange", ""), info.get("routing_key", "")
        found = mechanism.router.received(
            exchange, routing_key, raw_message.properties, self._queue_of(info)
        )
        journal = mechanism.journal
        if found is None:
            if journal is not None:
                journal.received(raw_message.properties, Destination(exchange, routing_key))
        else:
            if journal is not None:
                journal.released(raw_message.properties, found.destination)
            info["exchange"], info["routing_key"] = found.destination
            raw_message.properties = found.properties
        headers = raw_message.properties.get(HEADERS)
        if headers and X_DELAY in headers and is_over(headers[X_DELAY]):
            # Celery gives it to a retry, too.
            headers = {name: value for name, value in headers.items() if name != X_DELAY}
            raw_message.properties = {**raw_message.properties, HEADERS: headers}
        if headers and NESTED in headers:
            nested = {HEADERS: with_own_nested(headers)}
            raw_message.properties = {**raw_message.properties, **nested}
        return super().message_to_python(raw_message)

    #: Kombu checks this before it asks for a batch.
    supports_batch_publish = True
    #: See :mod:`.wire.header_frames`.
    removes_deaths = True
    #: How long the publish that waits for its confirm may wait, in seconds.
    _confirm_timeout: float | None = None
    #: Actions for after the confirm or the commit; None while no publish waits for one.
    _afterwards: list[Callable[[], object]] | None = None


class ConnectionMixin(BufferingConnection):
    """A connection whose channels delay messages."""

    delay_mechanism: Mechanism | None = None
    #: Whether the broker blocks its publishes, because of a memory or disk alarm.
    is_blocked = False
    #: Whether something waits until the broker does not block publishers.
    is_held_up = False
    #: The limit that a publish sets for each answer that it needs, in seconds.
    answer_limit: float | None = None
    #: When to look next whether what its consumers rely on still exists, by the monotonic clock.
    look_at = math.inf
    #: Why this transport has ended the connection, if it has.
    ended: RecoverableConnectionError | None = None
    #: Whether it consumed when it ended.
    was_consuming = False

    def collect(self) -> None:
        """End the connection without the broker."""
        # py-amqp then forgets its channels.
        self.was_consuming = is_consuming(self)
        if self.delay_mechanism is not None and not self.is_closing:
            self.delay_mechanism.router.cut_off()
        super().collect()

    def drain_events(self, timeout: float | None = None) -> Any:
        """Handle the next event of the broker, or what an alarm has held up before.

        :param timeout: in seconds. Unlike in py-amqp, a heartbeat does not begin it anew.
        :raises TimeoutError: if none comes in time.
        :raises RecoverableConnectionError: if this transport has ended the connection meanwhile.
        """
        mechanism = self.delay_mechanism
        if timeout != 0 and time.monotonic() > self.look_at and self.look():
            return None
        # Most events come where nothing is held up.
        if not self.is_held_up or mechanism is None:
            result = self._drain(timeout)
        else:
            result = self._release_or_drain(mechanism, timeout)
        if self.ended is not None:
            # The program, or Kombu's retry of a publish, has caught it in a callback. Without an
            # error here, Kombu would connect again, but not consume.
            raise self.ended
        return result

    def end(self, error: RecoverableConnectionError) -> None:
        """End the connection, since its program is to connect and consume again.

        :param error: is to be raised by the caller. :meth:`drain_events` raises it as well, as a
            callback may catch it.
        """
        self.ended = self.ended or error
        self.collect()

    def look(self) -> bool:
        """Check that what the connection's consumers rely on still exists.

        :returns: whether events were handled meanwhile.
        """
        mechanism, buffer = self.delay_mechanism, self.frame_buffer
        if mechanism is None or buffer is None or buffer.declaring:
            return False
        self.look_at = time.monotonic() + LOOK_EVERY
        if self.is_blocked or not is_consuming(self):
            return False
        before = buffer.dispatched
        try:
            mechanism.executor.run(mechanism.router.look(time.time_ns() // 1000))
        except RecoverableConnectionError:
            # Whether a broker that does not answer is too slow is not for a consumer to say.
            if not self.connected:
                raise
        return buffer.dispatched != before

    def release_held(self) -> bool:
        """Deliver or write what an alarm has held up, if its time has come.

        For an event loop, which only reads what has come.

        :returns: whether there was any.
        :raises RecoverableConnectionError: if this transport ends the connection, or has ended it.
        """
        mechanism = self.delay_mechanism
        if mechanism is None:
            return False
        if mechanism.journal is not None:
            mechanism.journal.end_if_blocked()
        # Not in the middle of a declaration: this can run the program's own code.
        if mechanism.executor.is_busy:
            return False
        parts = mechanism.holding
        self.is_held_up = any(each.is_holding for each in parts)
        released = [each.release() for each in parts]
        if self.frame_buffer is not None:
            released.append(self.frame_buffer.dispatch_waiting())
        if self.ended is not None:
            raise self.ended
        return any(released)

    def _release_or_drain(self, mechanism: Mechanism, timeout: float | None) -> Any:
        if timeout == 0:
            # Perhaps it is a publish that looks what has come: Kombu's retry would hide an end.
            return self._drain(timeout)
        rests = [each.rest for each in mechanism.holding if each.is_holding]
        # A caller that waits for an answer asks again: it may have come meanwhile.
        if self.release_held():
            return None
        if mechanism.executor.is_busy:
            return self._drain(timeout)
        # What could be released now, and was not, waits for an event.
        rest = min((each for each in rests if each > 0), default=None)
        if rest is None or (timeout is not None and timeout <= rest):
            return self._drain(timeout)
        end = time.monotonic() + rest
        try:
            return self._drain(rest)
        except TimeoutError as exc:
            raise_if_aborted(self, exc)
            if time.monotonic() < end:
                # From a callback.
                raise
            return None

    def _drain(self, timeout: float | None) -> Any:
        if timeout is None and self.frame_buffer is not None and self.frame_buffer.declaring:
            return self._drain_answer(self.frame_buffer)
        if not timeout:
            return super().drain_events(timeout)
        end = time.monotonic() + timeout
        while not self.blocking_read(timeout):
            # Never 0: py-amqp would wait for the rest of a frame without a limit, and busily.
            timeout = max(end - time.monotonic(), 0.001)
        return None

    @contextmanager
    def answered_within(self, timeout: float | None) -> Iterator[None]:
        """Limit the wait for each answer of the broker that a delayed message needs.

        :param timeout: in seconds; by default, ``read_timeout``, or :data:`ANSWER_LIMIT`.
        :raises RecoverableConnectionError: if an answer or a write takes longer.
        """
        before, self.answer_limit = self.answer_limit, timeout
        limit = timeout or self.write_timeout or ANSWER_LIMIT
        try:
            with within(self, limit):
                yield
        except TimeoutError as exc:
            # Reading has a limit of its own.
            raise RecoverableConnectionError(
                f"the broker did not take within {limit:g} s what a delayed message needs"
            ) from exc
        finally:
            self.answer_limit = before

    def _drain_answer(self, buffer: FrameBuffer) -> Any:
        """Handle the next event, while an answer is waited for that a delayed message needs.

        An event that is only buffered does not count: a consumer may get one after the other.

        :raises RecoverableConnectionError: if none comes in time.
        """
        given = self.answer_limit or self.read_timeout
        limit = given or ANSWER_LIMIT
        end, asked_for = time.monotonic() + limit, buffer.asked_for
        try:
            while True:
                before = buffer.waiting
                result = self._drain(max(end - time.monotonic(), 0.001))
                if buffer.waiting == before:
                    return result
        except TimeoutError as exc:
            raise_if_aborted(self, exc)
            if self.is_blocked and not given:
                # The broker has said why it does not answer: publishers wait until it goes on.
                return None
            # As py-amqp says it of a publish, so that Kombu connects again.
            raise RecoverableConnectionError(
                f"the broker did not answer within {limit:g} s when it was asked for {asked_for}"
            ) from exc

    def _on_close(self, reply_code: int, reply_text: str, *args: Any) -> Any:
        # By the second, it is the frame of a message's headers.
        if "frame_too_large" in reply_text and "type 2," in reply_text:
            reply_text += f"; a message's headers do not fit into a frame: {SMALLER}"
        return super()._on_close(reply_code, reply_text, *args)

    def _on_blocked(self) -> None:
        # The journal may have to end the connection.
        self.is_blocked = self.is_held_up = True
        self._call(super()._on_blocked)

    def _on_unblocked(self) -> None:
        self.is_blocked = False
        self._call(super()._on_unblocked)

    def _call(self, function: Callable[[], object]) -> None:
        """Call what may be the program's own: it can wait for the broker, too."""
        if self.frame_buffer is None:
            function()
        else:
            self.frame_buffer.call(function)


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
        leave_out_deaths(connection, router.topology.owns)
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


def _as_resent(msg: Any, headers: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    resent = as_resent(headers)
    if resent is headers:
        return msg, headers
    changed = amqp.Message(msg.body)
    changed.properties = {**msg.properties, HEADERS: resent}
    return changed, resent


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
