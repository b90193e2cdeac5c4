"""The channel that publishes records."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import RecoverableConnectionError

from kombu_binary_delay.errors import AmendmentError
from kombu_binary_delay.publishing.confirm import ConfirmChannel
from kombu_binary_delay.publishing.way_out import encoded
from kombu_binary_delay.wire import alarms
from kombu_binary_delay.wire.draining import drain

#: How long to wait for the broker's next frame, in seconds.
PATIENCE = 30.0
_JSON = {"content_type": "application/json", "content_encoding": "utf-8", "delivery_mode": 2}
PLAIN: Mapping[str, Any] = {}


class UnansweredError(AmendmentError):
    """The broker has not answered in time."""


class RecordChannel(ConfirmChannel):
    """A channel that publishes records, and waits for their confirms."""

    runs_no_user_code = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sent = 0
        #: The numbers of the unconfirmed messages, ascending.
        self._unconfirmed: dict[int, None] = {}
        #: The routing keys and bodies of the messages that no queue took.
        self._returned: set[tuple[str, str]] = set()
        self._nacked = 0
        self.on_ack = self._confirmed
        self.events["basic_nack"].add(self._on_nack)
        self.events["basic_return"].add(self._on_return)

    def send(
        self, line: str, exchange: str, routing_key: str, properties: Mapping[str, Any] = PLAIN
    ) -> None:
        """Publish a line without waiting."""
        message = amqp.Message(line, **_JSON, **properties)
        self.send_message(message, exchange, routing_key, mandatory=True)

    def send_message(
        self, message: Any, exchange: str, routing_key: str, *, mandatory: bool
    ) -> None:
        """Publish a message without waiting.

        :raises DelayError: if it cannot be written; nothing of it is sent.
        """
        if self.refusal is not None:
            raise self.refusal
        message = encoded(self.connection, message.body, message.properties)
        # Not by basic_publish, which reads from the broker first: that may close the channel.
        arguments = (0, exchange, routing_key, mandatory, False)
        self.send_method(spec.Basic.Publish, "Bssbb", arguments, message)
        self._sent += 1
        self._unconfirmed[self._sent] = None

    def wait_for_confirms(self, *, or_blocked: bool = False) -> set[tuple[str, str]]:
        """Wait for all confirms; return the keys and lines of the messages that no queue took.

        :param or_blocked: whether to end the connection if the broker blocks publishers.
        :raises AmendmentError: if the broker refuses a message, or does not answer.
        """
        while self._unconfirmed:
            self.wait_for_next()
            if or_blocked and self.connection.is_blocked:
                alarms.end(self.connection)
        returned, self._returned = self._returned, set()
        nacked, self._nacked = self._nacked, 0
        if nacked:
            raise AmendmentError(f"RabbitMQ refused {nacked} messages")
        return returned

    def wait_for_next(self, patience: float = PATIENCE) -> None:
        """Handle the next frame of the connection.

        :param patience: in seconds.
        :raises AmendmentError: if none comes.
        """
        try:
            if self.connection is not None:
                drain(self.connection, patience)
        except TimeoutError as exc:
            self._unconfirmed.clear()
            raise UnansweredError(f"RabbitMQ did not answer within {patience:g} s") from exc
        if self.refusal is not None:
            raise self.refusal
        if self.connection is None:
            raise RecoverableConnectionError("the channel is closed")

    def _confirmed(self, number: int, multiple: bool) -> int:  # noqa: FBT001 - amqp's own
        """Remove what an ack or nack is for; return the number of messages."""
        unconfirmed = self._unconfirmed
        answered = [number] if number in unconfirmed else []
        if multiple:
            answered = list(takewhile(lambda tag: tag <= number, unconfirmed))
        for tag in answered:
            del unconfirmed[tag]
        return len(answered)

    def _on_nack(self, number: int, multiple: bool) -> None:  # noqa: FBT001 - amqp's own
        self._nacked += self._confirmed(number, multiple)

    def _on_return(self, _: Any, __: str, routing_key: str, message: Any) -> None:
        body = message.body
        self._returned.add((routing_key, body if isinstance(body, str) else bytes(body).decode()))
