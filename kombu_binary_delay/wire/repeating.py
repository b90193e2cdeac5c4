"""Log the same warning once an hour at most: often enough for the next outage, and no more."""

from __future__ import annotations

import logging
import time

#: After which time a warning is logged again, in seconds. A process may run for months.
_AGAIN = 3600.0


class Warnings:
    """The warnings that one part of this process has logged."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._logged: dict[str, float] = {}

    def warn(self, text: str) -> None:
        """Log a warning, unless it was logged within the last hour."""
        now = time.monotonic()
        if now - self._logged.get(text, float("-inf")) > _AGAIN:
            self._logged[text] = now
            self._logger.warning("%s", text)

    def clear(self) -> None:
        """Forget what was logged."""
        self._logged.clear()
