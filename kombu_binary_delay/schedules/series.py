"""What follows from an occurrence that has arrived: what runs, and what is next. Without I/O.

An occurrence is only a wake-up: it names a schedule, a series and a due time. So whoever gets it
decides by the schedules as they are now. All times are milliseconds since the epoch.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from .definitions import Schedule

#: How much too early an occurrence may arrive, by the clock of whoever gets it.
_EARLY = 1000
#: How late an occurrence may be before it is taken for lost, and made up for.
OVERDUE = 10_000


@dataclass(frozen=True)
class Occurrence:
    """An occurrence of a schedule, as it waits."""

    schedule: str
    series: str
    due: int

    def to_line(self) -> str:
        """Write it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: Any) -> Occurrence | None:
        """Read it; None if it is none."""
        try:
            read = json.loads(line)
            occurrence = cls(read["schedule"], read["series"], read["due"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        types = [type(occurrence.schedule), type(occurrence.series), type(occurrence.due)]
        return occurrence if types == [str, str, int] else None


class Progress(NamedTuple):
    """How far a schedule has come.

    :param due: the due time of the last run, also of one that was left out.
    :param at: when that was sent.
    :param missed: how many occurrences never ran, since they were found too late.
    :param skipped: how many were left out, since the one before still ran.
    """

    due: int = 0
    at: int = 0
    missed: int = 0
    skipped: int = 0


class Step(NamedTuple):
    """What follows from an occurrence.

    :param runs: the due times of the runs to send.
    :param following: the due time of the next occurrence; None if it is not this one's to send.
    :param missed: how many occurrences are left out, since later ones are due as well.
    :param dropped: why nothing follows; empty if something does.
    """

    runs: tuple[int, ...] = ()
    following: int | None = None
    missed: int = 0
    dropped: str = ""


def step(schedule: Schedule | None, arrived: Occurrence, last: int, now: int) -> Step:
    """Return what follows from an occurrence that has arrived.

    :param schedule: as it is now; None if there is none of that name.
    :param last: the due time of the schedule's last run.
    """
    due = arrived.due
    if schedule is None or schedule.paused:
        return Step(dropped="the schedule is paused" if schedule else "there is no such schedule")
    if due <= last:
        return Step(dropped="it has run")
    if arrived.series != schedule.series:
        # What follows is the new series' to send.
        is_left = due <= schedule.before.get(arrived.series, -1)
        return Step((due,)) if is_left else Step(dropped="the schedule has changed")
    if due > now + _EARLY:
        # A ladder that is too short for the whole delay, or a clock that is behind.
        return Step(following=due)
    runs, count = deque([due], schedule.catch_up), 1
    while (following := schedule.when.following(runs[-1])) <= now:
        runs.append(following)
        count += 1
    return Step(tuple(runs), following, count - len(runs))


def expected(schedule: Schedule, last: int) -> int | None:
    """Return the due time of a schedule's next occurrence; None if it is paused."""
    return None if schedule.paused else schedule.when.following(max(last, schedule.since))


def to_line(progress: Mapping[str, Progress]) -> str:
    """Write the progress of all schedules as JSON."""
    return json.dumps({"progress": progress}, separators=(",", ":"))


def from_line(line: str | bytes) -> dict[str, Progress] | None:
    """Read what :func:`to_line` wrote; None if it is something else."""
    try:
        read = json.loads(line)["progress"]
        return {name: Progress(*map(int, numbers)) for name, numbers in read.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
