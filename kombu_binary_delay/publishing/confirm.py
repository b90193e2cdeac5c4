"""A channel in confirm mode that passes each answer of the broker to its owner."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import NotFound, error_for_code

from kombu_binary_delay.wire.mechanism import mechanism_of
from kombu_binary_delay.wire.undecodable import take_undecodable

#: The fields of an ack after its class and method: the delivery tag and the flag ``multiple``.
_ACK = struct.Struct(">4xQB")


class ConfirmChannel(amqp.Channel):
    """A channel that stays closed if the broker closes it, and raises nothing in other code."""

    # An answer that arrives after we send the close still counts.
    _ALLOWED_METHODS_WHEN_CLOSING = (
        *amqp.Channel._ALLOWED_METHODS_WHEN_CLOSING,  # noqa: SLF001 - it has no other name
        spec.Basic.Ack,
        spec.Basic.Nack,
        spec.Basic.Return,
    )
    on_ack: Callable[[int, bool], object]
    #: The error by which the broker closed it.
    refusal: BaseException | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Of what others have written, or what is returned.
        take_undecodable(self)

    def dispatch_method(self, method_sig: tuple[int, int], payload: Any, content: Any) -> Any:
        """Handle an ack directly: there may be as many as messages."""
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
        # A stream that is missing has such a name, too, and says nothing of the ladder.
        if (
            reply_code == NotFound.code
            and (class_id, method_id) == spec.Basic.Publish
            and mechanism
            and mechanism.router.topology.is_named_in(reply_text)
        ):
            # The ladder is then declared again for the next delayed message.
            mechanism.router.known.lost()
        # Else our own close has crossed it, and the broker answers that, too.
        if not self.is_closing:
            self.collect()
