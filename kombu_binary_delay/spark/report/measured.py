"""What a broker was measured to carry: RabbitMQ on two cores, which its clients shared.

It is 3.10 where nothing else is said.

The figures are those of docs/explanation/performance.md.
"""

from __future__ import annotations

#: The broker's CPU for a message with one wait, and for each further wait, in seconds.
ONE_WAIT, FURTHER_WAIT = 819e-6, 212e-6
#: Messages a second that wait once: two cores over the CPU of broker, publisher and consumer. This
#: and the next are of the slower of two machines.
SUSTAINED = 1893.1
#: Messages a second that one level queue passes on.
ONE_QUEUE = 6987.5
#: Bytes of a node's disk for a message that waits, more than its body: RabbitMQ 4.3, ten million.
DISK_MORE = 384.8


def cpu(messages: float, hops: float) -> float:
    """Return the CPU that the broker takes for delayed messages, in seconds."""
    return messages * (ONE_WAIT - FURTHER_WAIT) + hops * FURTHER_WAIT
