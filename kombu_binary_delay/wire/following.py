"""Pass on to the router what a program declares, binds, deletes and consumes.

Each method calls the one that it overrides first. After that, the program's own call has succeeded,
so an error of the ladder is logged as a warning and not raised. And a declaration
ignores ``nowait``: the router's own, on another channel, must not come before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from amqp.exceptions import RecoverableConnectionError

from kombu_binary_delay.ladder.delay import PLUGIN_TYPE, plain_exchange
from kombu_binary_delay.routing.commands import Steps
from kombu_binary_delay.routing.router import Router

from .mechanism import Mechanism, mechanism_of


def is_consuming(connection: Any) -> bool:
    """Return whether a py-amqp connection has a program's consumers, or had them at its end."""
    channels = getattr(connection, "channels", None)
    if not isinstance(channels, dict):
        # It has ended, or is of another kind of broker.
        return bool(getattr(connection, "was_consuming", False))
    return any(getattr(each, "_consumed", None) for each in list(channels.values()))


def _leave(connection: Any, queues: Iterable[str]) -> None:
    """Forget queues that a channel was the last to consume, if the broker deletes them then."""
    mechanism = mechanism_of(connection)
    if mechanism is None:
        return
    channels = list((connection.channels or {}).values())
    consumed = {each for other in channels for each in getattr(other, "_consumed", {}).values()}
    for queue in set(queues) - consumed:
        mechanism.router.left(queue)


#: The base of the mixin; the class that it is combined with has the methods it calls.
_Above: Any = object


class FollowingChannel(_Above):
    """The part of a channel that follows the program's own topology."""

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
        result = super().exchange_declare(
            exchange, type, passive, durable, auto_delete, False, arguments, **kwargs
        )
        if not passive:
            # A passive declaration proves that the exchange exists, but not its type.
            self._router.declared_exchange(exchange, type)
        return result

    def exchange_delete(
        self, exchange: str, if_unused: bool = False, nowait: bool = False, **kwargs: Any
    ) -> Any:
        """Delete an exchange, and the route of delayed messages to it.

        It waits for the answer also with ``nowait``: the exchange may stay, as one in use does.
        """
        result = super().exchange_delete(exchange, if_unused, False, **kwargs)
        self._run(self._router.deleted_exchange(exchange))
        return result

    def exchange_bind(
        self, destination: str, source: str = "", routing_key: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        """Bind an exchange to another, also for delayed messages."""
        result = super().exchange_bind(destination, source, routing_key, *args, **kwargs)
        self._run(self._router.bound(source, destination, routing_key, to_queue=False))
        return result

    def exchange_unbind(
        self, destination: str, source: str = "", routing_key: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        """Unbind an exchange from another, also for delayed messages."""
        result = super().exchange_unbind(destination, source, routing_key, *args, **kwargs)
        self._run(self._router.unbound(source, destination, routing_key, to_queue=False))
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
        result = super().queue_declare(
            queue, passive, durable, exclusive, auto_delete, False, arguments, **kwargs
        )
        self._last_queue = result.queue
        if passive:
            return result
        # A queue that is exclusive, or that the broker named, belongs to this connection alone.
        mailbox = exclusive or not queue
        self._run(
            self._router.declared_queue(
                self._last_queue,
                arguments,
                mailbox=mailbox,
                auto_delete=auto_delete,
                is_in_use=bool(result.message_count or result.consumer_count),
            )
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
        """Delete a queue, and its bindings for delayed messages.

        It waits for the answer also with ``nowait``: the queue may stay, as one in use does.
        """
        result = super().queue_delete(queue, if_unused, if_empty, False, **kwargs)
        self._run(self._router.deleted_queue(queue or self._last_queue))
        return result

    def queue_bind(
        self, queue: str, exchange: str = "", routing_key: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        """Bind a queue, also for delayed messages."""
        result = super().queue_bind(queue, exchange, routing_key, *args, **kwargs)
        queue, routing_key = self._queue_and_key(queue, routing_key)
        self._run(self._router.bound(exchange, queue, routing_key, to_queue=True))
        return result

    def queue_unbind(
        self, queue: str, exchange: str, routing_key: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        """Unbind a queue, also for delayed messages."""
        result = super().queue_unbind(queue, exchange, routing_key, *args, **kwargs)
        queue, routing_key = self._queue_and_key(queue, routing_key)
        self._run(self._router.unbound(exchange, queue, routing_key, to_queue=True))
        return result

    def _queue_and_key(self, queue: str, routing_key: str) -> tuple[str, str]:
        """Return the queue and the key of a binding: in AMQP, both can be left out.

        An empty name is the queue that this channel declared last, and, together with that, an
        empty key is its name.
        """
        if queue:
            return queue, routing_key
        return self._last_queue, routing_key or self._last_queue

    def basic_consume(
        self, queue: str = "", consumer_tag: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        """Consume. From now on, the bindings of this connection also apply to delayed messages."""
        self._run(self._router.consuming())
        name = queue or self._last_queue
        # Deliveries may come before the answer with the tag.
        self._consumed = {**self._consumed, consumer_tag: name}
        tag = super().basic_consume(queue, consumer_tag, *args, **kwargs)
        self._consumed = {**self._consumed, tag: name}
        return tag

    def _on_basic_cancel(self, consumer_tag: str) -> None:
        # The broker has cancelled it.
        self._forget_consumer(consumer_tag)
        super()._on_basic_cancel(consumer_tag)

    def basic_cancel(self, consumer_tag: str, *args: Any, **kwargs: Any) -> Any:
        """Cancel a consumer and forget it: a channel may have any number, one after the other."""
        result = super().basic_cancel(consumer_tag, *args, **kwargs)
        self._forget_consumer(consumer_tag)
        return result

    def _forget_consumer(self, consumer_tag: str) -> None:
        queue = self._consumed.get(consumer_tag, "")
        self._consumed = {tag: name for tag, name in self._consumed.items() if tag != consumer_tag}
        _leave(self.connection, [queue])

    def _forget_consumers(self) -> None:
        """Forget all consumers: the broker has closed the channel, and they end with it."""
        queues, self._consumed = self._consumed.values(), {}
        _leave(self.connection, queues)

    def basic_get(self, queue: str = "", *args: Any, **kwargs: Any) -> Any:
        """Get a message. The bindings then apply as with :meth:`basic_consume`."""
        self._run(self._router.consuming())
        message = super().basic_get(queue, *args, **kwargs)
        if message is not None:
            self._last_got = queue or self._last_queue
        return message

    def _queue_of(self, delivery_info: dict[str, Any]) -> str:
        """Return the queue that a message was taken from; empty if it is not known."""
        tag = delivery_info.get("consumer_tag")
        return str(self._consumed.get(tag) or "") if tag else str(self._last_got)

    def collect(self) -> None:
        """Leave the connection; messages without acks that it has delivered can still be read."""
        connection, self._left = self.connection, mechanism_of(self.connection)
        super().collect()
        _leave(connection, self._consumed.values())

    @property
    def _router(self) -> Router:
        router: Router = self._mechanism.router
        return router

    @property
    def _mechanism(self) -> Mechanism:
        if self.connection is None:
            raise RecoverableConnectionError("the channel is closed")
        mechanism: Mechanism = self.connection.delay_mechanism
        return mechanism

    def _run(self, steps: Steps) -> None:
        self._mechanism.executor.run(steps)
        self._raise_from_callbacks()

    def _raise_from_callbacks(self) -> None:
        """Raise an error of a callback that has run meanwhile; here, no answer is waited for."""
        # It may have ended the connection.
        if self.connection is not None:
            self.connection.frame_buffer.dispatch_waiting()

    #: The mechanism of the connection that a closed channel was on.
    _left: Mechanism | None = None
    _last_queue = ""
    _last_got = ""
    #: The queues of this channel's consumers, by their tags.
    _consumed: dict[Any, str] = {}  # noqa: RUF012 - replaced, never changed
