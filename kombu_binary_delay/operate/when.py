"""How operators write a time: from now as ``1h30m``, or absolute as ``2030-01-31T12:00``. Pure."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime, tzinfo

from kombu_binary_delay.amendments.record import MAX_TIME

_UNITS = {
    "ms": 1,
    "s": 1000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 604_800_000,
}
# Of all Pythons, only 3.14 and later read the end of a day as hour 24.
_MOMENT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ](?!24).+)?", re.ASCII)
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|min|s|m|h|d|w)")


def duration(text: str) -> float | None:
    """Read a delay such as ``1h30m``, in milliseconds; None for what is not one."""
    parts = _PART.findall(text)
    if not parts or _PART.sub("", text).strip():
        return None
    return float(sum(float(number) * _UNITS[unit] for number, unit in parts))


def moment_of(text: str, now: float, zone: tzinfo | None = UTC) -> int:
    """Read a time of either form, in milliseconds since the epoch.

    :param now: in milliseconds since the epoch.
    :param zone: as for :func:`time_of`.
    :raises ValueError: for what is not one, or is after the year 9999.
    """
    ahead = duration(text)
    return valid_time(time_of(text, zone) * 1000 if ahead is None else now + ahead, text)


def valid_time(milliseconds: float, text: str) -> int:
    """Return a time since the epoch in whole milliseconds.

    :param text: how the operator wrote it, for the error.
    :raises ValueError: if it is after the year 9999, or is not a number.
    """
    if not milliseconds <= MAX_TIME:
        raise ValueError(f"{text!r} is not a time up to the year 9999; give an earlier one")
    return int(milliseconds)


def time_of(text: str, zone: tzinfo | None = UTC) -> float:
    """Read a time of ISO 8601, in seconds since the epoch.

    :param zone: that of a time without one; None if each must name its own.
    :raises ValueError: for what is not one.
    """
    at = None
    # Python reads 20300131 as a date, and some numbers of milliseconds as one long past. It
    # also reads the zone of 2030-01-31+01:00 as the time of day.
    if _MOMENT.fullmatch(text):
        with suppress(ValueError):
            # As we write it ourselves: 2030-01-31 12:00:00 UTC.
            at = datetime.fromisoformat(re.sub(r" UTC\Z", "+00:00", text))
    if at is None:
        raise ValueError(
            f"{text!r} is no delay, such as 10s, 1h30m or 500ms, and no time, such as "
            f"2030-01-31T12:00+00:00"
        )
    if at.tzinfo is None and zone is None:
        raise ValueError(
            f"{text!r} has no time zone: write it as 2030-01-31T12:00Z, or with an offset such as "
            f"+01:00"
        )
    if at.tzinfo is None:
        at = at.replace(tzinfo=zone)
    return at.timestamp()
