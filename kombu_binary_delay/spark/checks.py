"""Numbers that a caller gives, refused by their names where they cannot be. It knows no Spark."""

from __future__ import annotations

import math

#: Beyond all that a pipeline asks for in seconds or per second, and within what integers of 64 bits
#: hold in microseconds.
MOST = 1e12


def check_number(name: str, value: float, *, above: float = 0.0, most: float = MOST) -> None:
    """Refuse what is no finite number above a bound.

    :raises ValueError: names the parameter, its value and the bounds.
    """
    if not _is_number(value) or not above < value <= most:
        raise ValueError(f"{name} must be above {above:g}, and at most {most:g}, got {value!r}")


def check_not_negative(name: str, value: float, *, most: float = MOST) -> None:
    """Refuse what is no finite number from 0 on.

    :raises ValueError: names the parameter, its value and the bounds.
    """
    if not _is_number(value) or not 0 <= value <= most:
        raise ValueError(
            f"{name} must be a number of seconds >= 0, and at most {most:g}, got {value!r}"
        )


def check_whole(name: str, value: int, *, least: int = 1, unit: str = "") -> None:
    """Refuse what is no whole number from the least on.

    :raises ValueError: names the parameter, its value and the bound.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise ValueError(f"{name} must be a whole number of at least {least}{unit}, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
