"""A channel in confirm mode that hands each answer of the broker to whoever waits for it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import NotFound, error_for_code

from kombu_binary_delay.mechanism import mechanism_of

#: What an ack has behind its class and method: a delivery tag, and whether it is for all up to it.
_ACK = struct.Struct(">4xQB")


class ConfirmChannel(amqp.Channel):
    """A channel that, where the broker closes it, stays closed and raises in nobody's code."""

    # An answer that crosses our close is an answer all the same.
    _ALLOWED_METHODS_WHEN_CLOSING = (
        *amqp.Channel._ALLOWED_METHODS_WHEN_CLOSING,  # noqa: SLF001 - it has no other name
        spec.Basic.Ack,
        spec.Basic.Nack,
        spec.Basic.Return,
    )
    on_ack: Callable[[int, bool], object]
    #: Why the broker closed it.
    refusal: BaseException | None = None

    def dispatch_method(self, method_sig: tuple[int, int], payload: Any, content: Any) -> Any:
        """Take an ack by the shortest way: there may be as many as messages."""
        if method_sig != spec.Basic.Ack:
            return super().dispatch_method(method_sig, payload, content)
        number, bits = _ACK.unpack_from(payload)
        return self.on_ack(number, bool(bits & 1))

    def _on_close(self, reply_code: int, reply_text: str, class_id: int, method_id: int) -> None:
        self.send_method(spec.Channel.CloseOk)
        self.refusal = error_for_code(
            reply_code, reply_text, (class_id, method_id), amqp.ChannelError
        )
        mechanism = mechanism_of(self.connection)
        if (
            reply_code == NotFound.code
            and mechanism
            and mechanism.router.topology.is_named_in(reply_text)
        ):
            # It is declared again for the next delayed message.
            mechanism.router.lost()
        self.collect()
