"""The errors of operators' functions, in addition to the errors of the package."""

from __future__ import annotations

from kombu_binary_delay.errors import BinaryDelayError


class OperationError(BinaryDelayError):
    """The broker does not allow an operation, or it is not possible with these arguments."""


class RefusedError(OperationError):
    """The operation was refused, since it would lose or misplace messages."""


class UnreachableError(OperationError):
    """A broker, or its management API, does not answer or refuses the login."""


class UnlistedError(UnreachableError):
    """The management API has no such object."""
