"""The errors that this package raises. Every message names the value, the limit and the remedy.

The root is a :class:`kombu.exceptions.KombuError`, so that code which already catches Kombu's
errors catches ours. Errors caused by a bad value are also a :class:`ValueError`.
"""

from __future__ import annotations

from typing import Any

from kombu.exceptions import KombuError

try:
    from kombu.exceptions import BatchPublishError
except ImportError:  # before Kombu 5.7

    class BatchPublishError(KombuError):  # type: ignore[no-redef]
        """Stands in for Kombu's error of the same name, which Kombu 5.7 introduced."""


#: The most characters of a value in an error's text.
_MOST_SHOWN = 100
#: The remedy for properties and headers that do not fit into one frame, as AMQP wants them.
SMALLER = "put large values into the body, or raise frame_max in rabbitmq.conf"


def shown(value: object) -> str:
    """Return a value for the text of an error: at most a hundred characters of it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # Python writes no number of more than some thousand digits, and nothing nested too deep.
        return f"a {type(value).__name__} that is too large to be shown"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


class BinaryDelayError(KombuError):
    """The root of every error that this package raises."""


class LadderError(BinaryDelayError, ValueError):
    """The ladder is invalid: a bad radix or tick, no level, too many queues, or a TTL too long."""


class DelayError(BinaryDelayError, ValueError):
    """The delay is invalid or out of range: a wrong type, NaN, negative, longer than the ladder."""


class AddressError(BinaryDelayError, ValueError):
    """The destination is invalid or does not fit into a routing key; or a key is no address."""


class SettingsError(BinaryDelayError, ValueError):
    """An unknown key or a bad value in ``broker_transport_options["binary_delay"]``."""


class TopologyError(BinaryDelayError):
    """A message has no way to its destination, or the broker refuses to declare what that takes."""


class AmendmentError(BinaryDelayError, ValueError):
    """An amendment is invalid or not possible: a bad id, key or time, no streams, no permission."""


class ScheduleError(BinaryDelayError, ValueError):
    """A schedule is invalid, unknown or cannot be kept as data, or another program changes them."""


class UnconfirmedError(BinaryDelayError, BatchPublishError):
    """The broker did not confirm all messages of a batch; ``outcomes`` has the details.

    :param outcomes: the :class:`~kombu_binary_delay.Outcome` of each message it did not confirm.
    """

    def __init__(self, message: str, outcomes: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.outcomes = outcomes
