"""Check what a caller passes; errors name the parameter. Does not import Spark."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

#: More than any pipeline needs, in seconds or per second. In microseconds, it fits 64-bit integers.
MOST = 1e12


def read_settings(text: str) -> dict[str, Any]:
    """Read the settings of the transport.

    :raises ValueError: if the text is not a JSON object.
    """
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"settings must be a JSON object such as '{{\"radix\": 4}}', got {text!r}")
    return settings


def check_number(name: str, value: float, *, most: float = MOST) -> None:
    """Check that a number is finite, greater than 0 and at most ``most``.

    :raises ValueError: names the parameter, its value and the bounds.
    """
    if not _is_number(value) or not 0 < value <= most:
        raise ValueError(f"{name} must be above 0, and at most {most:g}, got {value!r}")


def check_not_negative(name: str, value: float, *, most: float = MOST) -> None:
    """Check that a number is finite, at least 0 and at most ``most``.

    :raises ValueError: names the parameter, its value and the bounds.
    """
    if not _is_number(value) or not 0 <= value <= most:
        raise ValueError(
            f"{name} must be a number of seconds >= 0, and at most {most:g}, got {value!r}"
        )


def check_limits(limits: Mapping[str, float | None], *, above_0: Collection[str] = ()) -> None:
    """Check that each limit is a finite number >= 0, or None, which sets no limit.

    :param above_0: the limits that cannot be 0.
    :raises ValueError: names the limit, its value, the bound and the remedy.
    """
    for name, value in limits.items():
        if value is None:
            continue
        if not _is_number(value) or value < 0 or (value == 0 and name in above_0):
            bound = "above 0" if name in above_0 else ">= 0"
            raise ValueError(
                f"{name} must be a finite number {bound}, got {value!r}; leave it out for no limit"
            )


def check_whole(name: str, value: int, *, least: int = 1, unit: str = "") -> None:
    """Check that a number is whole and at least ``least``.

    :raises ValueError: names the parameter, its value and the bound.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise ValueError(f"{name} must be a whole number of at least {least}{unit}, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
