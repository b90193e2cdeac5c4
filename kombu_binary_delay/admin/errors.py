"""What an operator's subcommand can end with. Beside the errors of the package, not above them."""

from __future__ import annotations

from kombu_binary_delay.errors import BinaryDelayError


class OperationError(BinaryDelayError):
    """An operation that the broker does not allow, or that cannot be done as it was asked."""


class RefusedError(OperationError):
    """An operation would lose or misplace messages, and nobody asked for that."""


class UnreachableError(OperationError):
    """A broker, or its management API, that does not answer or does not let us in."""
