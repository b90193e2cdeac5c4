"""Pass on to the router what a program declares, binds, deletes and consumes.

Each method is called after the program's own call has succeeded. So an error of the ladder is
logged as a warning and not raised.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kombu_binary_delay.routing.commands import Steps
from kombu_binary_delay.routing.knowledge import UserBinding
from kombu_binary_delay.routing.router import Router

from .mechanism import mechanism_of


def is_consuming(connection: Any) -> bool:
    """Return whether a py-amqp connection has a program's consumers, or had them at its end."""
    if not isinstance(getattr(connection, "channels", None), dict):
        # It has ended, or is of another kind of broker.
        return bool(getattr(connection, "was_consuming", False))
    return any(following.consumed for following in _of_channels(connection))


def _of_channels(connection: Any) -> list[Following]:
    channels = list((connection.channels or {}).values())
    maybe = (getattr(channel, "following", None) for channel in channels)
    return [following for following in maybe if following is not None]


def _leave(connection: Any, queues: Iterable[str]) -> None:
    """Forget queues that a channel was the last to consume, if the broker deletes them then."""
    mechanism = mechanism_of(connection)
    if mechanism is None:
        return
    consumed = {
        queue for following in _of_channels(connection) for queue in following.consumed.values()
    }
    for queue in set(queues) - consumed:
        mechanism.router.left(queue)


class Following:
    """What a program has done with one channel, as far as its delayed messages depend on it.

    :param channel: a :class:`.ChannelMixin`.
    """

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        #: The queue that the channel declared last, which is meant where AMQP leaves a name out.
        self.last_queue = ""
        self._last_got = ""
        #: The queues of the channel's consumers, by their tags.
        self.consumed: dict[Any, str] = {}

    def declared_exchange(self, exchange: str, kind: str) -> None:
        """Remember the type of an exchange."""
        self._router.declared_exchange(exchange, kind)

    def deleted_exchange(self, exchange: str) -> None:
        """Delete the route of delayed messages to an exchange."""
        self.run(self._router.deleted_exchange(exchange))

    def declared_queue(
        self, result: Any, arguments: dict[str, Any] | None, *, mailbox: bool, auto_delete: bool
    ) -> None:
        """Route delayed messages to a queue by its name.

        :param result: the broker's answer.
        :param mailbox: whether the queue belongs to this connection alone.
        """
        self.run(
            self._router.declared_queue(
                result.queue,
                arguments,
                mailbox=mailbox,
                auto_delete=auto_delete,
                is_in_use=bool(result.message_count or result.consumer_count),
            )
        )

    def deleted_queue(self, queue: str) -> None:
        """Delete a queue's bindings for delayed messages."""
        self.run(self._router.deleted_queue(queue or self.last_queue))

    def bound(self, binding: UserBinding, arguments: dict[str, Any] | None) -> None:
        """Apply a binding to delayed messages, too."""
        self.run(self._router.bound(self._named(binding), arguments))

    def unbound(self, binding: UserBinding, arguments: dict[str, Any] | None) -> None:
        """Remove a binding for delayed messages, too."""
        self.run(self._router.unbound(self._named(binding), arguments))

    def consuming(self) -> None:
        """From now on, the bindings of this connection also apply to delayed messages."""
        self.run(self._router.consuming())

    def consumes(self, queue: str, tag: str) -> None:
        """Remember a consumer, before the broker's answer: deliveries may come before it."""
        self.consumed = {**self.consumed, tag: queue or self.last_queue}

    def got(self, queue: str) -> None:
        """Remember from which queue a message was got."""
        self._last_got = queue or self.last_queue

    def forget_consumer(self, tag: str) -> None:
        """Forget a consumer: a channel may have any number, one after the other."""
        queue = self.consumed.get(tag, "")
        self.consumed = {other: name for other, name in self.consumed.items() if other != tag}
        _leave(self._channel.connection, [queue])

    def forget_consumers(self) -> None:
        """Forget all consumers: the broker has closed the channel, and they end with it."""
        queues, self.consumed = self.consumed.values(), {}
        _leave(self._channel.connection, queues)

    def left(self, connection: Any) -> None:
        """Take into account that the channel has left its connection; its consumers are known on.

        Messages without acks that it has delivered can still be read.
        """
        _leave(connection, self.consumed.values())

    def queue_of(self, delivery_info: dict[str, Any]) -> str:
        """Return the queue that a message was taken from; empty if it is not known."""
        tag = delivery_info.get("consumer_tag")
        return str(self.consumed.get(tag) or "") if tag else self._last_got

    def raise_from_callbacks(self) -> None:
        """Raise an error of a callback that has run meanwhile; here, no answer is waited for."""
        # It may have ended the connection.
        if self._channel.connection is not None:
            self._channel.connection.frame_buffer.dispatch_waiting()

    def run(self, steps: Steps) -> None:
        """Do what the router asks for."""
        self._channel.mechanism.executor.run(steps)
        self.raise_from_callbacks()

    def _named(self, binding: UserBinding) -> UserBinding:
        """Return a binding with its queue and key: in AMQP, both can be left out.

        An empty name is the queue that this channel declared last, and, together with that, an
        empty key is its name.
        """
        if binding.destination or not binding.to_queue:
            return binding
        key = binding.key or self.last_queue
        return binding._replace(destination=self.last_queue, key=key)

    @property
    def _router(self) -> Router:
        router: Router = self._channel.mechanism.router
        return router
