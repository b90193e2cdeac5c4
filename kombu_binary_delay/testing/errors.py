"""What goes wrong in a test's use of the kit; each message says what to do."""

from __future__ import annotations


class KitError(Exception):
    """The kit is used in a way that cannot work."""


class StandsStillError(KitError):
    """The program waits for real time, while time stands still."""
