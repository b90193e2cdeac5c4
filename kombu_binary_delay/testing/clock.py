"""The one clock of a test: Python's own, held still and moved.

Where a test moves time already, by ``time-machine`` or ``freezegun``, that clock is used, and the
test may move it by either. Otherwise the kit holds time still by time-machine.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from .errors import KitError, StandsStillError

#: In microseconds. Whole, so that a due time and the clock are equal when the time has come.
_MILLISECOND = 1000
EPOCH = datetime.fromtimestamp(0, UTC)


def now() -> int:
    """Return the time in microseconds since the epoch."""
    # What holds time still rounds it down to what a float can be.
    return (time.time_ns() + 500) // 1000


class Clock:
    """Holds Python's clock still from :meth:`start` to :meth:`stop`.

    :param is_real: whether a program may wait for real time: what it waits for can come.
    """

    def __init__(self, *, is_real: bool = False) -> None:
        self._is_real = is_real
        self._travel: Any = None
        self._monotonic = time.monotonic
        self._sleep = time.sleep
        self._shift = 0.0
        self._thread = 0

    now = staticmethod(now)

    def real(self) -> float:
        """Return seconds that pass, also while time is held still."""
        freezegun = sys.modules.get("freezegun.api")
        return float((freezegun.real_monotonic if freezegun else time.monotonic)())

    def start(self) -> None:
        """Hold time still, unless somebody does already.

        :raises KitError: if neither time-machine nor freezegun is there.
        """
        if _mover() is None:
            try:
                import time_machine  # noqa: PLC0415 - an extra
            except ImportError:
                raise KitError(
                    "nothing holds time still: install `kombu-binary-delay[testing]`, or begin "
                    "within freezegun's freeze_time"
                ) from None
            now = -(-self.now() // _MILLISECOND) * _MILLISECOND
            self._travel = time_machine.travel(as_datetime(now), tick=False)
            self._travel.start()
        self._monotonic, self._sleep = time.monotonic, time.sleep
        self._thread = threading.get_ident()
        if self._is_real:
            return
        real = self._monotonic
        time.monotonic = lambda: real() + self._shift
        time.sleep = self._refuse_to_sleep  # type: ignore[assignment]

    def stop(self) -> None:
        """Release the clock."""
        time.monotonic, time.sleep = self._monotonic, self._sleep
        if self._travel is not None:
            self._travel.stop()
            self._travel = None

    def move_to(self, moment: int) -> None:
        """Move time forward; earlier moments have no effect.

        :param moment: microseconds since the epoch.
        """
        ahead = moment - self.now()
        if ahead <= 0:
            return
        mover = _mover()
        if mover is None:
            raise KitError("time is not held still any more: who has stopped it?")
        self._shift += ahead / 1e6
        mover(moment, ahead)

    def _refuse_to_sleep(self, seconds: float) -> None:
        if seconds > 0 and threading.get_ident() == self._thread:
            raise StandsStillError(
                f"the program sleeps {seconds:g} s, but time stands still: let it wait by a "
                f"countdown, or replace time.sleep in this test"
            )
        self._sleep(seconds)


def _mover() -> Any:
    """Return a function that moves the clock that is held still now; None if none is.

    It takes the moment, in microseconds since the epoch, and how far ahead that is.
    """
    freezegun = sys.modules.get("freezegun.api")
    if freezegun is not None and freezegun.freeze_factories:
        factory = freezegun.freeze_factories[-1]
        return lambda moment, _: factory.move_to(as_datetime(moment).replace(tzinfo=None))
    machine = sys.modules.get("time_machine")
    if machine is not None:
        for name in ("traveller_stack", "coordinates_stack"):
            with suppress(AttributeError, IndexError):
                traveller = getattr(machine, name)[-1]
                # `move_to` would set the time zone of the process again.
                return lambda _, ahead: traveller.shift(timedelta(microseconds=ahead))
    return None


def as_datetime(moment: int) -> datetime:
    """Return a moment, in microseconds since the epoch, in UTC."""
    return EPOCH + timedelta(microseconds=moment)
