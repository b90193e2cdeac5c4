"""What a broker was measured to carry: RabbitMQ 3.10 on two cores, which its clients shared.

The figures are those of docs/explanation/performance.md.
"""

from __future__ import annotations

#: Messages a second that wait once: two cores over the CPU of broker, publisher and consumer, on
#: the slower of two machines.
SUSTAINED = 1893.1
#: Messages a second that one level queue passes on.
ONE_QUEUE = 6987.5
