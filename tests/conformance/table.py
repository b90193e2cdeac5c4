"""What a case of the conformance suite is: a sentence and a few steps.

A case runs on the broker in memory, with every ladder, and on every RabbitMQ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

Steps = Callable[..., None]

#: The ladders to try, the default first: the settings of each, by a name that a reader knows.
LADDERS: dict[str, dict[str, Any]] = {
    "default": {},
    "binary": {"radix": 2},
    "skip": {"layout": "skip"},
    "queue per delay": {"queue_per_delay": True},
    "three lanes": {"lanes": 3},
}


@dataclass(frozen=True)
class Case:
    """One line of the table.

    broker:   whether only a broker can show it.
    levels:   whether it is about the levels, and so takes its time on a broker with every ladder;
              what is behind the levels is the same for all.
    restarts: whether it restarts the broker, which one has to be allowed to.
    """

    name: str
    steps: Steps
    broker: bool = False
    levels: bool = False
    restarts: bool = False


class Table(list[Case]):
    """The cases of one subject, written down by decorators.

    broker: whether only a broker can show them.
    """

    def __init__(self, *, broker: bool = False) -> None:
        super().__init__()
        self._broker = broker

    def case(self, name: str, **options: bool) -> Callable[[Steps], Steps]:
        """Add a case."""

        def add(steps: Steps) -> Steps:
            self.append(Case(name, steps, broker=self._broker, **options))
            return steps

        return add

    def cases(self, name: str, values: dict[str, Any], **options: bool) -> Callable[[Steps], None]:
        """Add one case for each value; the name has what it is called in place of {}."""

        def add(steps: Steps) -> None:
            for called, value in values.items():
                self.case(name.format(called), **options)(partial(steps, value=value))

        return add
