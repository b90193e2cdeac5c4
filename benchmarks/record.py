"""Purpose: keep what was measured: results as files, with the time they took."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.rig import Row, stolen_since, ticks

DOCS = Path(__file__).parents[1] / "docs" / "explanation" / "performance"
#: The release of RabbitMQ that the names of its results do not name.
USUAL = "3.10"


class Recording:
    """The result of one section, from its first measurement until it is written.

    :param name: of the section; the result becomes ``into/results/NAME.json``, or
        ``NAME-on-4.3.json`` for another release than the usual one.
    :param rounds: how often each is measured.
    """

    def __init__(self, name: str, rounds: int, into: Path = DOCS) -> None:
        self._name, self._folder = name, into / "results"
        self._rounds = rounds
        self._start, self._before = time.monotonic(), ticks()

    def write(self, machine: Row, found: Any) -> Row:
        """Write what was found so far, on which machine, and return the whole result."""
        release = ".".join(machine["rabbitmq"].split(".")[:2])
        name = self._name if release == USUAL else f"{self._name}-on-{release}"
        result = {
            "machine": machine,
            "rounds": self._rounds,
            "found": found,
            "stolen": stolen_since(self._before),
            "minutes": round((time.monotonic() - self._start) / 60, 1),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        return result
