"""What Spark is doing: a line that changes in a terminal, and an occasional line in a log.

It goes to the error output, apart from the result. Spark does not say how many steps a phase has,
so rate and time left are those of the step that runs. Spark Connect does not say how far a step is:
there it is the phase and its time only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .shared import error_console

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Seconds between two looks, in a terminal, and between two lines in a log.
_LOOK, _LINE = 0.5, 10.0


@dataclass
class Step:
    """How far Spark's running step is, in parts of the data.

    :param seconds: since it began.
    """

    done: int
    parts: int
    seconds: float

    def __str__(self) -> str:
        text = f"{self.done:,} of {self.parts:,} part{'s' if self.parts > 1 else ''}"
        if not self.done or self.seconds <= 0:
            return text
        rate = self.done / self.seconds
        return f"{text}, {rate:,.1f}/s, {span((self.parts - self.done) / rate)} left"


def span(seconds: float) -> str:
    """Write a time as hours, minutes and seconds: ``1:02:03``, or ``02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


@contextmanager
def following(session: SparkSession) -> Iterator[Callable[..., None]]:
    """Yield a function to call with the name of each phase as it begins.

    Where the phase counts its rows, it is called again with what to show in place of Spark's steps.
    """
    watch = _Watch(session)
    watch.start()
    try:
        yield watch.begin
        watch.finish()
    finally:
        watch.stop()


class _Watch:
    def __init__(self, session: SparkSession) -> None:
        from kombu_binary_delay.spark.classic import tracker  # noqa: PLC0415 - needs PySpark

        self._tracker = tracker(session)
        self._console = error_console()
        self._status = self._console.status("") if self._console.is_terminal else None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._end = threading.Event()
        self._phase: tuple[str, float] | None = None
        self._rows = ""
        self._stages: dict[int, float] = {}
        self._last = time.monotonic()

    def start(self) -> None:
        if self._status:
            self._status.start()
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join()
        if self._status:
            self._status.stop()

    def begin(self, phase: str, rows: str = "") -> None:
        self._rows = rows
        if self._phase is None or self._phase[0] != phase:
            self.finish()
            self._phase = phase, time.monotonic()
            if self._status:
                # What it shows is of the phase before.
                self._status.update(phase)

    def finish(self) -> None:
        """Say how long the phase took; not called if it failed."""
        phase, self._phase = self._phase, None
        if phase is not None:
            name, begun = phase
            self._console.print(f"{name}: {span(time.monotonic() - begun)}", style="dim")

    def _run(self) -> None:
        while not self._end.wait(_LOOK):
            phase = self._phase
            is_time = self._status is not None or time.monotonic() - self._last >= _LINE
            if phase is None or not is_time:
                continue
            name, begun = phase
            step = self._rows or self._step()
            text = f"{name}: {span(time.monotonic() - begun)}{f', {step}' if step else ''}"
            if self._status:
                self._status.update(text)
            else:
                self._console.print(text)
            self._last = time.monotonic()

    def _step(self) -> Step | None:
        """Return the step that has run for longest; None if none runs, or Spark does not say."""
        now = time.monotonic()
        try:
            running = list(self._tracker.getActiveStageIds()) if self._tracker else []
            self._stages = {each: self._stages.get(each, now) for each in running}
            for each in sorted(running, key=lambda stage: (self._stages[stage], stage)):
                info = self._tracker.getStageInfo(each)
                if info is not None:
                    return Step(info.numCompletedTasks, info.numTasks, now - self._stages[each])
        # The session may be ending, or its Java process: the subcommand itself says so.
        except Exception:  # noqa: BLE001
            self._tracker = None
        return None
