"""How delays and destinations are written on a command line."""

from __future__ import annotations

import re
import time
from datetime import datetime, timezone
from typing import Any

import click

from kombu_binary_delay.model.address import Destination

_UNITS = {
    "ms": 1,
    "s": 1000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 604_800_000,
}
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|min|s|m|h|d|w)")


#: Generic in newer releases of Click only.
_Type: Any = click.ParamType


def _duration(value: str) -> float | None:
    """Read a delay such as ``1h30m``, in milliseconds; None for what is not one."""
    parts = _PART.findall(value)
    if not parts or _PART.sub("", value).strip():
        return None
    return float(sum(float(number) * _UNITS[unit] for number, unit in parts))


class Moment(_Type):
    """A time: as long from now as a delay says, or an absolute one; in ms since the epoch."""

    name = "when"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Read a time in milliseconds since the epoch."""
        if not isinstance(value, str):
            return int(value)
        ahead = _duration(value)
        if ahead is not None:
            return int(time.time() * 1000 + ahead)
        return int(_time(self, value, param, ctx) * 1000)


class Delay(_Type):
    """A delay: ``10s``, ``1h30m``, ``500ms``, ``2d``, or a time, ``2030-01-31T12:00``; in ms."""

    name = "delay"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Read a delay in milliseconds."""
        if not isinstance(value, str):
            return float(value)
        ahead = _duration(value)
        if ahead is not None:
            return ahead
        left = _time(self, value, param, ctx) - time.time()
        if left < 0:
            self.fail(f"{value!r} is in the past", param, ctx)
        return left * 1000


class DelayOrId(Delay):
    """A delay, or the id of a task: a UUID."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Read a delay in milliseconds, or leave an id as it is."""
        if isinstance(value, str) and _UUID.fullmatch(value):
            return value
        return super().convert(value, param, ctx)


def _time(kind: Any, value: str, param: Any, ctx: Any) -> float:
    """Read a time in seconds since the epoch."""
    try:
        at = datetime.fromisoformat(value.replace("Z", "+00:00"))
    except ValueError:
        by_id = f"; for a task's id that is no UUID: explain --task {value}"
        kind.fail(
            f"{value!r} is no delay, such as 10s, 1h30m or 500ms, and no time, such as "
            f"2030-01-31T12:00+00:00{by_id if isinstance(kind, DelayOrId) else ''}",
            param,
            ctx,
        )
    if at.tzinfo is None:
        at = at.replace(tzinfo=timezone.utc)
    return at.timestamp()


class Place(_Type):
    """A destination: a queue's name, or ``exchange:routing key``."""

    name = "destination"

    def convert(self, value: Any, param: Any, ctx: Any) -> Destination:
        """Read a destination."""
        del param, ctx
        if isinstance(value, Destination):
            return value
        exchange, colon, key = str(value).partition(":")
        return Destination(exchange, key) if colon else Destination("", str(value))
