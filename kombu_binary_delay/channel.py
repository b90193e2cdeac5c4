"""A channel that delays messages, and delivers them as they were published.

A publish asks the way out what to publish where, and a delivery is judged by the way in. What the
program declares is done first and then passed on, see :mod:`.wire.following`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import AccessRefused, NotFound, RecoverableConnectionError

from .amendments.record import KEY, REPLACES
from .amendments.way_in import WayIn
from .celery_side import tasks
from .errors import TopologyError
from .ladder.address import Destination
from .ladder.delay import (
    CHORD_UNLOCK,
    ETA,
    PLUGIN_TYPE,
    RETRIES,
    TASK,
    X_DELAY,
    is_retry,
    plain_exchange,
)
from .ladder.envelope import HEADERS
from .publishing import PublishBatch
from .publishing.frames import EncodedMessage
from .publishing.way_out import UNDELAYED, Outgoing, WayOut, encoded
from .routing.knowledge import UserBinding
from .wire.following import Following
from .wire.mechanism import Mechanism, mechanism_of
from .wire.received import keep_body

#: How long to wait until the broker has taken the first message of a connection that relies on what
#: another one has found, in seconds.
TAKEN_LIMIT = 1.0

#: The base of a mixin; the class that it is combined with has the methods it calls.
_Above: Any = object


class ChannelMixin(_Above):
    """A channel that delays messages, and delivers them as they were published.

    Put it before a channel class of Kombu's ``pyamqp`` transport, or a similar one, whose
    connection a :class:`.TransportMixin` makes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        #: What the program has declared, bound and consumed.
        self.following = Following(self)
        #: What judges deliveries.
        self.way_in = WayIn(self, tasks)
        super().__init__(*args, **kwargs)

    # -- a publish -----------------------------------------------------------------------------

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
        # Each publish comes here: as long as nothing is asked for, it costs no call.
        if not headers or not (
            headers.get(ETA) is not None
            or X_DELAY in headers
            or KEY in headers
            or REPLACES in headers
        ):
            if exchange and exchange.endswith(tasks.BROADCASTS):
                tasks.record_broadcast(self.mechanism.amendments, msg, exchange)
            # Positional: gathering them in a dict and unpacking it would cost a microsecond.
            return super()._basic_publish(
                msg, exchange, routing_key, mandatory, immediate, timeout, confirm_timeout, argsig
            )
        mechanism, limit = self.mechanism, timeout or self._confirm_timeout
        way_out = mechanism.way_out
        # amqp also writes None as an empty name.
        to = Destination(exchange or "", routing_key or "")
        out, message = self._ready(way_out, msg, to, limit)
        # py-amqp would hide a TimeoutError.
        self.following.raise_from_callbacks()
        options = (mandatory, immediate, timeout, confirm_timeout, argsig)
        result = super()._basic_publish(message, out.exchange, out.routing_key, *options)
        if mechanism.router.relies_on_others and out.due is not None and not self._is_taken():
            out = way_out.ready_again(out, limit)
            message = encoded(self.connection, msg.body, out.properties)
            result = super()._basic_publish(message, out.exchange, out.routing_key, *options)
        if self._afterwards is None:
            way_out.done(out)
        else:
            # After the confirm that the publish waits for, or after the commit.
            self._afterwards.append(partial(way_out.done, out))
        return result

    # With publisher confirms on, amqp hides this behind an instance attribute that calls
    # _basic_publish. So the work is done there, and this is the same function.
    basic_publish = _basic_publish

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
            if consumers or not self._is_of_ladder(str(exc)):
                raise
            return self._publish_and_go_on(*args, **kwargs)
        except AccessRefused as exc:
            if not self._is_of_ladder(str(exc)):
                raise
            raise TopologyError(f"RabbitMQ refused a delayed message: {exc.reply_text}") from exc

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        """Return the batch for Kombu's ``Producer.batch()`` (Kombu 5.7 and later)."""
        return PublishBatch(self, max_size)

    @property
    def way_out(self) -> WayOut:
        """What makes messages ready to be published."""
        return self.mechanism.way_out

    def _ready(
        self, way_out: WayOut, msg: Any, to: Destination, limit: float | None
    ) -> tuple[Outgoing, EncodedMessage]:
        """Return what to publish where; all that it needs exists, and it can be written."""
        in_transaction = not self.supports_batch_publish
        try:
            out = way_out.ready(msg.properties, to, limit, in_transaction=in_transaction)
            # Kombu uses one dict of headers for all attempts of a publish, so it must not change.
            return out, encoded(self.connection, msg.body, out.properties)
        except UNDELAYED as why:
            if not is_retry(msg.properties[HEADERS]):
                raise
            # Celery would drop the task.
            out = way_out.ready_without_delay(
                msg.properties, to, why, in_transaction=in_transaction
            )
            return out, encoded(self.connection, msg.body, out.properties)

    def _is_taken(self) -> bool:
        """Return whether the broker has taken the first message, or will tell by a confirm.

        What another connection has found can be gone: without this answer, the message would be
        lost, and a program that closes the connection then would never know.

        :raises NotFound: if it was not, and the channel has consumers, which have ended with it.
        """
        self.mechanism.router.relies_on_others = False
        if self._afterwards is not None:
            return True
        consumers = bool(self.callbacks)
        try:
            # It changes nothing, and is answered after the message.
            self.send_method(spec.Channel.Flow, "b", (True,))
            self.wait(spec.Channel.FlowOk, timeout=TAKEN_LIMIT)
        except NotFound as exc:
            if consumers or not self._is_of_ladder(str(exc)):
                raise
            return False
        except (OSError, amqp.ConnectionError):
            # In an alarm, the broker answers nothing after a message, but takes it afterwards. And
            # if the connection has broken, the broker may have taken it: an error would have Kombu
            # publish it twice.
            pass
        return True

    def _is_of_ladder(self, error: str) -> bool:
        return self.mechanism.router.topology.is_named_in(error)

    # -- after the confirm, or the commit ------------------------------------------------------

    def _publish_and_go_on(self, *args: Any, **kwargs: Any) -> Any:
        # The actions afterwards talk to the broker. Before the confirm, they would take the frame
        # with the confirm.
        before = self._afterwards, self._confirm_timeout
        # py-amqp does not pass the timeout on.
        self._afterwards, self._confirm_timeout = [], kwargs.get("confirm_timeout")
        try:
            result = super().basic_publish_confirm(*args, **kwargs)
        finally:
            actions = self._afterwards
            self._afterwards, self._confirm_timeout = before
        for action in actions or ():
            action()
        return result

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

    # -- a delivery ----------------------------------------------------------------------------

    def dispatch_method(self, method_sig: tuple[int, int], payload: Any, content: Any) -> Any:
        """Handle a method of the broker's; what comes with one may have to be published again."""
        if content is not None:
            keep_body(content)
        return super().dispatch_method(method_sig, payload, content)

    def basic_consume(
        self,
        queue: str = "",
        consumer_tag: str = "",
        no_local: bool = False,
        no_ack: bool = False,
        exclusive: bool = False,
        nowait: bool = False,
        callback: Callable[[Any], object] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Consume. From now on, the bindings of this connection also apply to delayed messages.

        What was amended so far is read before, and the way in judges each message.
        """
        tag = consumer_tag or f"ctag-{uuid.uuid4().hex}"
        name = queue or self.following.last_queue
        callback = self.way_in.consumer(name, tag, callback, no_ack=no_ack)
        # amqp does this when the broker has answered. But where another consumer's callback runs
        # while that is waited for, and declares, the first deliveries are dispatched together with
        # the answer: amqp would reject them, and without acks they would be lost.
        self.callbacks[tag] = callback
        if no_ack:
            self.no_ack_consumers.add(tag)
        options = (no_local, no_ack, exclusive, nowait, callback)
        try:
            self.following.consuming()
            self.following.consumes(queue, tag)
            return super().basic_consume(queue, tag, *options, *args, **kwargs)
        except BaseException:
            self.following.forget_consumer(tag)
            self.callbacks.pop(tag, None)
            self.no_ack_consumers.discard(tag)
            raise

    def basic_get(self, queue: str = "", no_ack: bool = False, *args: Any, **kwargs: Any) -> Any:
        """Get a message; dropped and postponed messages are skipped.

        The bindings of this connection then apply as with :meth:`basic_consume`.
        """
        self.mechanism.amendments.reader.look()
        while True:
            self.following.consuming()
            message = super().basic_get(queue, no_ack, *args, **kwargs)
            if message is None:
                return None
            self.following.got(queue)
            if self.way_in.passes(message, no_ack=no_ack):
                return message

    def message_to_python(self, raw_message: Any) -> Any:
        """Return a Kombu message with the properties and the destination of its publish."""
        mechanism = (self.connection is None and self._left) or self.mechanism
        self.way_in.unwrap(raw_message, mechanism)
        return super().message_to_python(raw_message)

    def basic_qos(
        self, prefetch_size: int, prefetch_count: int, a_global: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Limit the number of messages in the program, and remember the limit."""
        self.way_in.prefetch = prefetch_count
        return super().basic_qos(prefetch_size, prefetch_count, a_global, *args, **kwargs)

    def basic_cancel(self, consumer_tag: str, *args: Any, **kwargs: Any) -> Any:
        """Cancel a consumer and forget it."""
        result = super().basic_cancel(consumer_tag, *args, **kwargs)
        self.following.forget_consumer(consumer_tag)
        return result

    def _on_basic_cancel(self, consumer_tag: str) -> None:
        # The broker has cancelled it.
        self.following.forget_consumer(consumer_tag)
        super()._on_basic_cancel(consumer_tag)

    # -- what the program declares -------------------------------------------------------------
    # Without ``nowait``: what follows, on another channel, must not come before it; and what is in
    # use may stay.

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

        An exchange of the delayed-message plugin's type is declared with its underlying type
        instead: this transport delays the messages, and the plugin is not needed.

        :raises DelayError: if the exchange does not name its underlying type.
        """
        if type == PLUGIN_TYPE and not passive:
            type, arguments = plain_exchange(arguments)  # noqa: A001 - amqp's own name for it
        options = (passive, durable, auto_delete, False, arguments)
        result = super().exchange_declare(exchange, type, *options, **kwargs)
        if not passive:
            # A passive declaration proves that the exchange exists, but not its type.
            self.following.declared_exchange(exchange, type)
        return result

    def exchange_delete(
        self, exchange: str, if_unused: bool = False, nowait: bool = False, **kwargs: Any
    ) -> Any:
        """Delete an exchange, and the route of delayed messages to it."""
        result = super().exchange_delete(exchange, if_unused, False, **kwargs)
        self.following.deleted_exchange(exchange)
        return result

    def exchange_bind(
        self,
        destination: str,
        source: str = "",
        routing_key: str = "",
        nowait: bool = False,
        arguments: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Bind an exchange to another, also for delayed messages."""
        result = super().exchange_bind(
            destination, source, routing_key, nowait, arguments, **kwargs
        )
        binding = UserBinding(source, destination, routing_key, to_queue=False)
        self.following.bound(binding, arguments)
        return result

    def exchange_unbind(
        self,
        destination: str,
        source: str = "",
        routing_key: str = "",
        nowait: bool = False,
        arguments: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Unbind an exchange from another, also for delayed messages."""
        result = super().exchange_unbind(
            destination, source, routing_key, nowait, arguments, **kwargs
        )
        binding = UserBinding(source, destination, routing_key, to_queue=False)
        self.following.unbound(binding, arguments)
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
        """Declare a queue, and route delayed messages to it by its name.

        A passive declaration only asks: it makes no route.
        """
        options = (passive, durable, exclusive, auto_delete, False, arguments)
        result = super().queue_declare(queue, *options, **kwargs)
        self.following.last_queue = result.queue
        if not passive:
            # A queue that is exclusive, or that the broker named, belongs to this connection alone.
            mailbox = exclusive or not queue
            self.following.declared_queue(
                result, arguments, mailbox=mailbox, auto_delete=auto_delete
            )
        return result

    def queue_delete(
        self,
        queue: str = "",
        if_unused: bool = False,
        if_empty: bool = False,
        nowait: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Delete a queue, and its bindings for delayed messages."""
        result = super().queue_delete(queue, if_unused, if_empty, False, **kwargs)
        self.following.deleted_queue(queue)
        return result

    def queue_bind(
        self,
        queue: str,
        exchange: str = "",
        routing_key: str = "",
        nowait: bool = False,
        arguments: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Bind a queue, also for delayed messages."""
        result = super().queue_bind(queue, exchange, routing_key, nowait, arguments, **kwargs)
        binding = UserBinding(exchange, queue, routing_key, to_queue=True)
        self.following.bound(binding, arguments)
        return result

    def queue_unbind(
        self,
        queue: str,
        exchange: str,
        routing_key: str = "",
        nowait: bool = False,
        arguments: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Unbind a queue, also for delayed messages."""
        result = super().queue_unbind(queue, exchange, routing_key, nowait, arguments, **kwargs)
        binding = UserBinding(exchange, queue, routing_key, to_queue=True)
        self.following.unbound(binding, arguments)
        return result

    # -- its end, and another begin ------------------------------------------------------------

    def _on_close(self, reply_code: int, reply_text: str, *args: Any) -> Any:
        # A transaction ends with its channel; py-amqp opens the channel again without one.
        self._afterwards, self.supports_batch_publish = None, True
        self.following.forget_consumers()
        mechanism = mechanism_of(self.connection)
        if mechanism and mechanism.router.topology.is_named_in(reply_text):
            if reply_code == NotFound.code:
                mechanism.router.known.lost()
            if reply_code == AccessRefused.code and args == spec.Basic.Publish:
                reply_text += (
                    "; grant this user the permission write on that exchange, and the topic "
                    "permission write for that key where there are topic permissions"
                )
        return super()._on_close(reply_code, reply_text, *args)

    def _do_revive(self) -> None:
        self.way_in.reopened()
        # py-amqp before 5.4.2 takes the channel, opened anew, for one in confirm mode.
        self._confirm_selected = False
        super()._do_revive()

    def collect(self) -> None:
        """Leave the connection; messages without acks that it has delivered can still be read."""
        connection, self._left = self.connection, mechanism_of(self.connection)
        super().collect()
        self.following.left(connection)

    @property
    def mechanism(self) -> Mechanism:
        """What the connection carries for its channels.

        :raises RecoverableConnectionError: if the channel is closed.
        """
        if self.connection is None:
            raise RecoverableConnectionError("the channel is closed")
        mechanism: Mechanism = self.connection.delay_mechanism
        return mechanism

    #: Kombu checks this before it asks for a batch.
    supports_batch_publish = True
    #: See :mod:`.wire.header_frames`.
    removes_deaths = True
    #: The mechanism of the connection that a closed channel was on.
    _left: Mechanism | None = None
    #: How long the publish that waits for its confirm may wait, in seconds.
    _confirm_timeout: float | None = None
    #: Actions for after the confirm or the commit; None while no publish waits for one.
    _afterwards: list[Callable[[], object]] | None = None


def _as_resent(msg: Any, headers: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    resent = tasks.as_resent(headers)
    if resent is headers:
        return msg, headers
    changed = amqp.Message(msg.body)
    changed.properties = {**msg.properties, HEADERS: resent}
    return changed, resent
