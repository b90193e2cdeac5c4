"""Publish a received message again, with the very bytes that came.

py-amqp decodes a received body by its ``content_encoding``, and encodes text that it publishes. The
bytes may then be others: those of an encoding with a byte order mark, or that writes a character in
several ways. An empty body is empty text to it, which it gives an encoding that it did not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import amqp


def keep_body(message: Any) -> None:
    """Keep the body of a received message as it is now, before py-amqp decodes it."""
    message.received = message.body


def copy_of(message: Any, properties: Mapping[str, Any]) -> Any:
    """Return a message to publish, with the body of a received one.

    :param message: of a channel of this transport, or of one with ``auto_decode=False``.
    """
    return amqp.Message(getattr(message, "received", message.body) or b"", **properties)
