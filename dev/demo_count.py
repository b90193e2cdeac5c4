"""Purpose: the accounts of the demo: what was sent, what has arrived, how late. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kombu_binary_delay.ladder.durations import human

if TYPE_CHECKING:
    from collections.abc import Collection


@dataclass(frozen=True)
class Spread:
    """The lateness of some tasks, in seconds."""

    lateness: tuple[float, ...]

    def quantile(self, share: float) -> float:
        """Return the lateness that this share of the tasks does not exceed, in seconds."""
        ordered = sorted(self.lateness)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def __str__(self) -> str:
        if not self.lateness:
            return "none"
        parts = [self.quantile(0.5), self.quantile(0.99), max(self.lateness)]
        return " / ".join(human(round(lateness * 1000)) for lateness in parts)


@dataclass
class Accounts:
    """Due times by task id, as published, and every arrival, as the tasks recorded it."""

    due: dict[str, float] = field(default_factory=dict)
    far: set[str] = field(default_factory=set)
    arrivals: dict[str, list[float]] = field(default_factory=dict)

    def read(self, text: str) -> None:
        """Read the arrivals from the tasks' records: one line with id and time each."""
        arrivals: dict[str, list[float]] = {}
        # A last line without its end is still being written.
        for line in text[: text.rfind("\n") + 1].splitlines():
            task, when = line.split()
            arrivals.setdefault(task, []).append(float(when))
        self.arrivals = arrivals

    @property
    def missing(self) -> int:
        """The number of tasks due during the demo that have not arrived."""
        return len(self.due.keys() - self.far - self.arrivals.keys())

    @property
    def duplicated(self) -> int:
        """The number of arrivals beyond each task's first."""
        return sum(len(times) - 1 for times in self.arrivals.values())

    @property
    def early(self) -> int:
        """The number of tasks that arrived before they were due."""
        return sum(min(times) < self.due[task] for task, times in self.arrivals.items())

    def lateness(self, tasks: Collection[str] | None = None) -> Spread:
        """Return the lateness of these tasks, or of all that have arrived."""
        return Spread(
            tuple(
                min(times) - self.due[task]
                for task, times in self.arrivals.items()
                if tasks is None or task in tasks
            )
        )
