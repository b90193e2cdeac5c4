"""How late delayed messages were in the last hour, as the journal has it."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import amqp

from kombu_binary_delay.journal import events, stream_name
from kombu_binary_delay.wire.streams import StreamError, pages

#: In seconds.
HOUR = 3600
#: How long one look may read, in seconds.
_LIMIT = 10.0
#: Latenesses of one bucket differ by a fiftieth at most, and those below this, in milliseconds,
#: count as this.
_STEP, _LEAST = math.log(1.02), 1.0


@dataclass(frozen=True)
class Arrivals:
    """How late messages came to their consumers, in milliseconds; None if none came.

    :param messages: how many came.
    :param on_time: the share, from 0 to 1, that was late by a tick at most.
    :param complete: whether the whole hour was read; otherwise, its beginning.
    """

    messages: int
    p50: float | None
    p99: float | None
    on_time: float | None
    complete: bool


class LastHour:
    """Reads the last hour of a journal; a further look reads what was written since.

    :param tick: of the ladder, in milliseconds.
    """

    def __init__(self, namespace: str, tick: int) -> None:
        self.stream, self._tick = stream_name(namespace), tick
        #: By the minute since the epoch: how many came in each bucket, and how many on time.
        self._minutes: dict[int, Counter[int]] = {}
        self._on_time: Counter[int] = Counter()
        self._last = -1

    def read(self, connection: Any) -> Arrivals | None:
        """Read on; return None if this user may not.

        :param connection: of py-amqp.
        """
        end, complete = time.monotonic() + _LIMIT, True
        # The last record again, since a stream without anything new would answer nothing.
        begin = "1h" if self._last < 0 else self._last
        try:
            for page in pages(connection, self.stream, begin):
                for record in page:
                    if record.offset > self._last:
                        self._last = record.offset
                        for line in events.lines(record.body):
                            self._take(events.from_line(line))
                if time.monotonic() > end:
                    complete = False
                    break
        except (amqp.AMQPError, StreamError):
            return None
        return self._counted(complete=complete)

    def _take(self, event: dict[str, Any] | None) -> None:
        # A message that was due before it was published has left no level, and was late before.
        if event is None or event["event"] != events.RELEASED or not {"due", "left"} <= set(event):
            return
        late = max((event["at"] - event["due"]) / 1000, _LEAST)
        minute = event["at"] // 60_000_000
        bucket = round(math.log(late) / _STEP)
        self._minutes.setdefault(minute, Counter())[bucket] += 1
        self._on_time[minute] += late <= self._tick

    def _counted(self, *, complete: bool) -> Arrivals:
        since = (time.time() - HOUR) // 60
        for minute in [minute for minute in self._minutes if minute < since]:
            del self._minutes[minute], self._on_time[minute]
        buckets = sum(self._minutes.values(), Counter())
        messages = buckets.total()
        if not messages:
            return Arrivals(0, None, None, None, complete)
        on_time = sum(self._on_time[minute] for minute in self._minutes) / messages
        p50, p99 = (_quantile(buckets, share * messages) for share in (0.5, 0.99))
        return Arrivals(messages, p50, p99, on_time, complete)


def _quantile(buckets: Counter[int], rank: float) -> float:
    for bucket in sorted(buckets):
        rank -= buckets[bucket]
        if rank <= 0:
            return round(math.exp(bucket * _STEP), 1)
    return 0.0
