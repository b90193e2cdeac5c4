"""What a program declares, binds, deletes and consumes, passed on to the router.

Each method does what it overrides first, and raises nothing of ours after that: the program's own
call has succeeded, so what the ladder cannot do is a warning in the log.
"""

from __future__ import annotations

from typing import Any

from amqp.exceptions import RecoverableConnectionError

from .commands import Steps
from .mechanism import Mechanism
from .model.delay import PLUGIN_TYPE, plain_exchange
from .router import Router

#: The class that a mixin is mixed in before; it has all that they call.
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

        One of the delayed-message plugin's type becomes a plain exchange of the type that it was
        to route like: the delay is ours, the plugin is not needed.

        :raises DelayError: if it does not say which type that is.
        """
        if type == PLUGIN_TYPE and not passive:
            type, arguments = plain_exchange(arguments)  # noqa: A001 - amqp's own name for it
        result = super().exchange_declare(
            exchange, type, passive, durable, auto_delete, nowait, arguments, **kwargs
        )
        if not passive:
            # A passive declaration proves that the exchange exists, and nothing of its type.
            self._router.declared_exchange(exchange, type)
        return result

    def exchange_delete(self, exchange: str, *args: Any, **kwargs: Any) -> Any:
        """Delete an exchange, and the way that delayed messages take to it."""
        result = super().exchange_delete(exchange, *args, **kwargs)
        self._run(self._router.deleted_exchange(exchange))
        return result

    def exchange_bind(
        self, destination: str, source: str = "", routing_key: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        """Bind an exchange to another, for delayed messages too."""
        result = super().exchange_bind(destination, source, routing_key, *args, **kwargs)
        self._run(self._router.bound(source, destination, routing_key, to_queue=False))
        return result

    def exchange_unbind(
        self, destination: str, source: str = "", routing_key: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        """Unbind an exchange from another, for delayed messages too."""
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
        """Declare a queue, and lead delayed messages to it by its name."""
        result = super().queue_declare(
            queue, passive, durable, exclusive, auto_delete, nowait, arguments, **kwargs
        )
        self._last_queue = result.queue if result is not None else queue
        # A queue that is exclusive, or that the broker named, is a mailbox of this connection.
        mailbox = exclusive or not queue
        self._run(
            self._router.declared_queue(
                self._last_queue, arguments, passive=passive, mailbox=mailbox
            )
        )
        return result

    def queue_delete(self, queue: str = "", *args: Any, **kwargs: Any) -> Any:
        """Delete a queue; its bindings go with it."""
        result = super().queue_delete(queue, *args, **kwargs)
        self._run(self._router.deleted_queue(queue or self._last_queue))
        return result

    def queue_bind(
        self, queue: str, exchange: str = "", routing_key: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        """Bind a queue, for delayed messages too."""
        result = super().queue_bind(queue, exchange, routing_key, *args, **kwargs)
        # To AMQP, an empty name is the queue that this channel declared last.
        queue = queue or self._last_queue
        self._run(self._router.bound(exchange, queue, routing_key, to_queue=True))
        return result

    def queue_unbind(
        self, queue: str, exchange: str, routing_key: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        """Unbind a queue, for delayed messages too."""
        result = super().queue_unbind(queue, exchange, routing_key, *args, **kwargs)
        queue = queue or self._last_queue
        self._run(self._router.unbound(exchange, queue, routing_key, to_queue=True))
        return result

    def basic_consume(
        self, queue: str = "", consumer_tag: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        """Consume: from here on, what this connection bound takes delayed messages too."""
        self._run(self._router.consuming())
        name = queue or self._last_queue
        # Deliveries may come before the answer that names the tag.
        self._consumed = {**self._consumed, consumer_tag: name}
        tag = super().basic_consume(queue, consumer_tag, *args, **kwargs)
        self._consumed = {**self._consumed, tag: name}
        return tag

    def basic_cancel(self, consumer_tag: str, *args: Any, **kwargs: Any) -> Any:
        """Cancel a consumer, and forget it: a channel may have one after the other, for ever."""
        result = super().basic_cancel(consumer_tag, *args, **kwargs)
        self._consumed = {tag: name for tag, name in self._consumed.items() if tag != consumer_tag}
        return result

    def basic_get(self, queue: str = "", *args: Any, **kwargs: Any) -> Any:
        """Get a message: from here on as with :meth:`basic_consume`."""
        self._run(self._router.consuming())
        message = super().basic_get(queue, *args, **kwargs)
        if message is not None:
            self._last_got = queue or self._last_queue
        return message

    def _queue_of(self, delivery_info: dict[str, Any]) -> str:
        """Return the queue that a message was taken from, so far as that is known."""
        tag = delivery_info.get("consumer_tag")
        return str(self._consumed.get(tag) or "") if tag else str(self._last_got)

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

    _last_queue = ""
    _last_got = ""
    #: The queues of this channel's consumers, by their tags.
    _consumed: dict[Any, str] = {}  # noqa: RUF012 - replaced, never changed
