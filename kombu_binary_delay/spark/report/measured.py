"""What a broker was measured to carry: RabbitMQ 3.10 on two cores, which its clients shared.

The figures are those of docs/explanation/performance.md; a test compares them with its records.
"""

from __future__ import annotations

#: The broker's CPU for a message with one wait, and for each further wait, in seconds.
ONE_WAIT, FURTHER_WAIT = 986e-6, 255e-6
#: Messages a second, of delays of 1 to 8 s, of which 99 in 100 were less than a second late; and
#: the waits of such a message.
SUSTAINED, SUSTAINED_WAITS = 1500.0, 11 / 8
#: Messages a second that one level queue passes on.
ONE_QUEUE = 2213.0


def cpu(messages: float, hops: float) -> float:
    """Return the CPU that the broker takes for delayed messages, in seconds."""
    return messages * (ONE_WAIT - FURTHER_WAIT) + hops * FURTHER_WAIT
