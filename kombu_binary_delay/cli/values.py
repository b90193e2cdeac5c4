"""Parse delays, times and destinations of a command line."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import click

from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.operate.when import duration, moment_of, time_of, valid_time

#: An id as Celery makes it.
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


#: Generic only in newer releases of Click.
_Type: Any = click.ParamType
_Range: Any = click.FloatRange


class Moment(_Type):
    """A time: as long from now as a delay says, or an absolute one; in ms since the epoch."""

    name = "when"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Return a time in milliseconds since the epoch."""
        if not isinstance(value, str):
            return int(value)
        try:
            return moment_of(value, time.time() * 1000)
        except ValueError as exc:
            self.fail(str(exc), param, ctx)
            raise


class Seconds(_Range):
    """A number of seconds to wait."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return a number that the operating system can wait."""
        seconds: float = super().convert(value, param, ctx)
        # Not a number is neither below nor above it.
        if not seconds <= threading.TIMEOUT_MAX:
            self.fail(f"{value!r} is no number of seconds that anything can wait", param, ctx)
        return seconds


class Countdown(_Range):
    """A number of seconds from now, above 0; in milliseconds since the epoch."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Return a time in milliseconds since the epoch."""
        seconds = super().convert(value, param, ctx)
        try:
            return valid_time((time.time() + seconds) * 1000, str(value))
        except ValueError as exc:
            self.fail(str(exc), param, ctx)
            raise


class Delay(_Type):
    """A delay: ``10s``, ``1h30m``, ``500ms``, ``2d``, or a time, ``2030-01-31T12:00``; in ms."""

    name = "delay"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return a delay in milliseconds."""
        if not isinstance(value, str):
            return float(value)
        ahead = duration(value)
        if ahead is not None:
            return ahead
        left = _time(self, value, param, ctx) - time.time()
        if left < 0:
            self.fail(f"{value!r} is in the past", param, ctx)
        return left * 1000


class DelayOrId(Delay):
    """A delay, or the id of a task: a UUID."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return a delay in milliseconds, or an id unchanged."""
        if isinstance(value, str) and UUID.fullmatch(value):
            return value
        return super().convert(value, param, ctx)


def _time(kind: Any, value: str, param: Any, ctx: Any) -> float:
    """Return a time in seconds since the epoch."""
    try:
        return time_of(value)
    except ValueError as exc:
        by_id = f"; for a task's id that is no UUID: explain --task {value}"
        kind.fail(f"{exc}{by_id if isinstance(kind, DelayOrId) else ''}", param, ctx)
        raise


class Place(_Type):
    """A destination: a queue's name, or ``exchange:routing key``, up to the first colon."""

    name = "destination"

    def convert(self, value: Any, param: Any, ctx: Any) -> Destination:
        """Return a destination."""
        del param, ctx
        return value if isinstance(value, Destination) else readings(str(value))[0]


class Places(_Type):
    """The destinations that a text may mean, since names may have colons; see :func:`readings`."""

    name = "destination"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Destination, ...]:
        """Return them, the likeliest first."""
        del param, ctx
        return readings(value) if isinstance(value, str) else tuple(value)


def readings(text: str) -> tuple[Destination, ...]:
    """Return the destinations that a text may mean, the likeliest first.

    ``a:b:c`` is the exchange ``a``, the exchange ``a:b``, or a queue; ``:a:b`` is the queue only.
    """
    words = text.split(":")
    if not words[0]:
        return (Destination("", text[1:]),)
    by_exchange = (
        Destination(":".join(words[:count]), ":".join(words[count:]))
        for count in range(1, len(words))
    )
    return (*by_exchange, Destination("", text))
