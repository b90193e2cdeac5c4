"""The types of exchanges that one connection knows, and how it asks for the others. Pure."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kombu_binary_delay.errors import TopologyError
from kombu_binary_delay.ladder.address import length
from kombu_binary_delay.ladder.versions import can_be_denied, can_have_type_told

from .commands import Answer, AskType, Look

#: The types of the exchanges that exist in every virtual host.
_BUILT_IN: dict[str, str | None] = {
    "amq.direct": "direct",
    "amq.fanout": "fanout",
    "amq.headers": "headers",
    "amq.match": "headers",
    "amq.topic": "topic",
}


class ExchangeTypes:
    """The types of exchanges, as far as one connection knows them."""

    def __init__(self, vhost: str) -> None:
        self._vhost = vhost
        #: By the exchange's name; None for an exchange that delayed messages cannot reach.
        self.types = dict(_BUILT_IN)
        #: The exchanges whose types may have changed since, so they are asked for again.
        self._distrusted: set[str] = set()

    def is_certain(self, exchange: str) -> bool:
        """Whether the type is known, and nothing speaks against it."""
        return exchange in self.types and exchange not in self._distrusted

    def can_be_asked_again(self, exchange: str) -> bool:
        """Whether the broker can be asked again for the type of an exchange."""
        return exchange not in _BUILT_IN and can_have_type_told(exchange, self._vhost)

    def remember(self, exchange: str, exchange_type: str) -> None:
        """Remember the type with which the program has declared an exchange."""
        self.types[exchange] = exchange_type
        self._distrusted.discard(exchange)

    def forget(self, exchange: str) -> None:
        """Forget the type of an exchange, if it is known."""
        self.types.pop(exchange, None)

    def distrust(self) -> None:
        """Ask again for each type, when it is next needed."""
        self._distrusted.update(filter(self.can_be_asked_again, self.types))

    def ask(self, exchange: str) -> Any:
        """Ask for the type of an exchange, unless it is certain.

        :returns: the answer of :class:`~.commands.AskType`.
        :raises TopologyError: if RabbitMQ could not report the type.
        """
        if self.is_certain(exchange):
            return self.types[exchange]
        if not can_have_type_told(exchange, self._vhost):
            raise TopologyError(
                f"the exchange {exchange!r} has a name of {length(exchange)} bytes that "
                f"is not ASCII, too long for RabbitMQ to report its type; declare the exchange "
                f"on this connection before you bind or delay to it"
            )
        answer = yield AskType(exchange)
        self._distrusted.discard(exchange)
        if answer is Answer.MISSING:
            self.forget(exchange)
        else:
            self.types[exchange] = answer
        return answer

    def is_gone(self, exchange: str) -> Any:
        """Ask whether an exchange does not exist, and forget its type then; or learn its type."""
        answer: Any = Answer.DONE
        # RabbitMQ refuses one or the other to some users. They may still publish.
        with suppress(TopologyError):
            if not self.is_certain(exchange) and can_have_type_told(exchange, self._vhost):
                answer = yield from self.ask(exchange)
            elif can_be_denied(exchange, self._vhost):
                # If another one does not exist, the question could end the connection.
                answer = yield Look((exchange,))
        if answer is Answer.MISSING:
            self.forget(exchange)
        return answer is Answer.MISSING
