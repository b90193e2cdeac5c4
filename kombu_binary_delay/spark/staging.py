"""A job's own place beside its receipts: the rows that it publishes, and who publishes them.

Two runs of a job must not publish at once. A run signs a *lease* before it begins and after each
slice. Another run that finds it waits: if the lease is signed again meanwhile, the other run is at
work, and this one ends; if it is not, the other run has died, and this one goes on. This module
must not touch a broker.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pyarrow as pa
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from . import schema as s
from .tables import Place, append, delete, existing

logger = logging.getLogger(__name__)

#: A lease is valid for so long beyond the longest slice, in seconds.
_VALID = 60.0
#: How often to look whether another run is at work, in seconds.
_LOOK = 3.0
#: A lease that has been signed so short a time ago is not signed again, in seconds.
_FRESH = 30.0
_LEASES = "run string, owner string, state string, signed double, until double"
_ASKS, _RUNS, _ENDED = "asks", "runs", "ended"


@dataclass
class Staging:
    """What a run of a job keeps beside the receipts.

    :param receipts: the place of the receipts.
    :param job: the UUID of the job.
    :param longest: how long a slice may take, in seconds.
    """

    session: SparkSession
    receipts: Place
    job: UUID
    longest: float
    _run: str = field(default_factory=lambda: uuid4().hex)
    _signed: float = 0.0
    #: How many rows were stored as files, if that is known.
    _written: int | None = None
    _owner: str = field(default_factory=lambda: f"{_machine()}/{os.getpid()}")

    def claim(self) -> None:
        """Take the lease. It waits where another run has it and may have died.

        :raises RuntimeError: if another run of the job is at work.
        """
        self._wait()
        self._sign(_ASKS)
        try:
            while others := self._others():
                for other in others:
                    # Of those that ask at the same time, the first by name goes on.
                    if other["state"] == _RUNS or other["run"] < self._run:
                        self._lose(other)
                # It gives way, unless it has looked before we signed: then it runs.
                time.sleep(_LOOK)
        except BaseException:
            self.end()
            raise
        self._sign(_RUNS)

    def renew(self) -> None:
        """Sign the lease again, from time to time.

        :raises RuntimeError: if another run has taken it, since this one was suspended for long.
        """
        if time.time() > self._signed + _FRESH:
            self._sign(_RUNS)
            self.check()

    def check(self) -> None:
        """Check that no other run is at work.

        :raises RuntimeError: if one is.
        """
        for other in self._others():
            if other["state"] == _RUNS:
                self._lose(other)

    def end(self) -> None:
        """Return the lease, where the run has failed."""
        self._sign(_ENDED)

    def store(self, df: DataFrame) -> DataFrame:
        """Store the job's rows, and return them as they are stored; see :meth:`check_stored`."""
        place = self._place("rows")
        if place.is_table:
            delete(self.session, place)
            append(df, place)
            return self.session.table(place.where)
        seen = Observation()
        df = df.observe(seen, F.count("*").alias("rows"))
        df.write.mode("overwrite").parquet(place.where)
        # Over Spark Connect, a server that is busy ends the command without what was observed.
        self._written = seen.get.get("rows")
        return self.session.read.schema(df.schema).parquet(place.where)

    def check_stored(self, there: int) -> None:
        """Check that as many rows are there as were written.

        :raises ValueError: if not.
        """
        if self._written not in (there, None):
            raise ValueError(
                f"of {self._written:,} rows that Spark has written to {self._place('rows').where}, "
                f"{there:,} are there: name a place that the driver and all executors see as one, "
                f"such as one of HDFS or S3"
            )

    def drop(self) -> None:
        """Delete all that the job's runs have kept here."""
        if self.receipts.is_table:
            for what in ("rows", "lease"):
                delete(self.session, self._place(what))
        else:
            delete(self.session, self._place(""))

    def _place(self, what: str) -> Place:
        if self.receipts.is_table:
            return self.receipts.beside(f"{what}_{self.job.hex}")
        return Place("parquet", f"{self.receipts.beside('staged').where}/{self.job}/{what}")

    def _sign(self, state: str) -> None:
        self._signed = now = time.time()
        values = (self._run, self._owner, state, now, now + _VALID + self.longest)
        # As a table of Arrow, it takes less than half of the time to write.
        row = pa.table([[value] for value in values], [*s.columns_of(_LEASES)])
        append(self.session.createDataFrame(row, _LEASES), self._place("lease"))

    def _others(self) -> list[dict[str, Any]]:
        """Return the last signature of each other run that may be alive, by name."""
        table = existing(self.session, self._place("lease"), _LEASES)
        if table is None:
            return []
        last: dict[str, dict[str, Any]] = {}
        for row in sorted(table.collect(), key=itemgetter("signed")):
            last[row["run"]] = row.asDict()
        now = time.time()
        return [
            lease
            for run, lease in sorted(last.items())
            if run != self._run
            and lease["state"] != _ENDED
            and lease["until"] > now
            and not _has_died(lease["owner"])
        ]

    def _wait(self) -> None:
        others = self._others()
        if not others:
            return
        first = max(others, key=lambda other: other["until"])
        logger.warning(
            "the job is published by another run, %s; waiting until %s to see whether it has died",
            first["owner"],
            _clock(first["until"]),
        )
        while others:
            for other in others:
                if other["signed"] > first["signed"]:
                    self._lose(other)
            time.sleep(_LOOK)
            others = self._others()

    def _lose(self, other: dict[str, Any]) -> None:
        raise RuntimeError(
            f"another run of this job is at work, {other['owner']}, and has said so at "
            f"{_clock(other['signed'])}: run a job once at a time"
        )


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S} UTC"


def _machine() -> str:
    """Return the name of this machine, or of this container, whose processes have other numbers."""
    host = socket.gethostname()
    with suppress(OSError):
        # Containers may share the name of their machine.
        return f"{host}/{Path('/proc/self/ns/pid').stat().st_ino}"
    return host


def _has_died(owner: str) -> bool:
    """Return whether a process of this machine has ended."""
    machine, _, process = owner.rpartition("/")
    if machine != _machine():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    with suppress(OSError):
        # A parent that has not waited for it yet keeps its number.
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2]
        return state.split()[0] == "Z"
    return False
