"""Purpose: what every measurement needs: the broker's CPU, runs in turns, medians and ratios.

Nothing here knows what is measured.
"""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dev.processes import resident
from dev.provenance import provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dev.broker import Broker

Row = dict[str, Any]
#: The share of the CPU that a host may take from its virtual machine in a measurement that counts,
#: and how often it is measured at most.
STOLEN, ATTEMPTS = 0.05, 4
#: Most seconds before it is measured again.
PAUSE = 20


@dataclass(frozen=True)
class Scale:
    """How much is measured: all of it, or just enough to see that it runs."""

    quick: bool = False
    rounds: int = 1

    def pick(self, full: Any, quick: Any) -> Any:
        return quick if self.quick else full

    @property
    def idle(self) -> float:
        """How long to watch an idle broker, in seconds: its queues do something every five."""
        return float(self.pick(5, 0.1))


def broker_cpu(broker: Broker) -> float:
    """Return the seconds of CPU that the node has used so far."""
    return sum(map(own_cpu, broker.pids[:1]))


def cpu_of(pid: int) -> float:
    """Return the seconds of CPU that a process and its living children have used so far."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own_cpu(pid) + sum(cpu_of(int(child)) for child in children)


def idle_cpu(nodes: Sequence[Broker], seconds: float) -> list[float]:
    """Return the CPU that each idle node uses, in seconds a second."""
    start, before = time.monotonic(), [broker_cpu(node) for node in nodes]
    time.sleep(seconds)
    took = time.monotonic() - start
    return [(broker_cpu(node) - used) / took for node, used in zip(nodes, before, strict=True)]


def let_rest(broker: Broker, most: float = 10.0) -> None:
    """Wait until a broker has done what it was given, for no more than ``most`` seconds."""
    end = time.monotonic() + most
    while idle_cpu([broker], 0.2)[0] > 0.1 and time.monotonic() < end:
        pass


def broker_memory(broker: Broker) -> int:
    """Return the resident memory of the node, in bytes."""
    return resident(broker.pids[0])


class Peak:
    """The greatest memory of a broker, looked at five times a second, in bytes."""

    def __init__(self, broker: Broker) -> None:
        self.most = 0
        self._broker, self._over = broker, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            self.most = max(self.most, broker_memory(self._broker))
            if self._over.wait(0.2):
                return


def disk(folder: Path) -> int:
    """Return the bytes of disk that a folder takes."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def in_turns(
    names: Sequence[str], scale: Scale, measure: Callable[[str], Row], what: str, times: int = 1
) -> dict[str, list[Row]]:
    """Measure each name once a turn, every second turn backwards, and each of them `undisturbed`.

    So whatever else the machine does is spread evenly over them.

    :param times: how many turns a round has; a quick run has one turn.
    """
    runs: dict[str, list[Row]] = {name: [] for name in names}
    turns = scale.pick(scale.rounds * times, 1)
    for number in range(turns):
        for name in list(names) if number % 2 == 0 else list(names)[::-1]:
            row = measure(name) if scale.quick else undisturbed(partial(measure, name))
            runs[name].append(row)
            say(f"{what} {number + 1}/{turns} {name}: {brief(row)}")
    return runs


def undisturbed(measure: Callable[[], Row]) -> Row:
    """Measure, and again if the host of this virtual machine has taken much of its CPU meanwhile.

    It pauses as long as an attempt takes: in a short one, a single tick of the kernel's clock is
    a large share, and says little of the seconds to come.

    :returns: the row of the least disturbed attempt, and in it that share as ``stolen``.
    """
    best: Row | None = None
    pause = 0.0
    for _ in range(ATTEMPTS):
        time.sleep(pause)
        start, before = time.monotonic(), ticks()
        row = measure()
        row["stolen"] = stolen_since(before)
        pause = min(time.monotonic() - start, PAUSE)
        if best is None or row["stolen"] < best["stolen"]:
            best = row
        if row["stolen"] <= STOLEN:
            break
        say(f"disturbed: the host took {row['stolen']:.0%} of the CPU: {brief(row)}")
    assert best is not None  # noqa: S101 - there is an attempt
    return best


def ticks() -> tuple[int, int]:
    """Return the CPU that this machine wanted so far, and how much of that its host took."""
    user, nice, system, _, _, irq, soft, stolen, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return user + nice + system + irq + soft + stolen, stolen


def stolen_since(before: tuple[int, int]) -> float:
    """Return the share of the CPU that the host took since the `ticks` before."""
    wanted, stolen = (now - then for now, then in zip(ticks(), before, strict=True))
    return stolen / max(wanted, 1)


def summary(runs: dict[str, list[Row]], base: str | None = None) -> dict[str, Row]:
    """Take medians with their spread and, per figure, the median ratio to ``base`` of each round.

    A ratio is taken round by round: what slowed one down slowed both.
    """
    return {
        name: {
            figure: _figure([row[figure] for row in rows], _base(runs, base, figure))
            for figure in rows[0]
            if isinstance(rows[0][figure], (int, float))
        }
        for name, rows in runs.items()
    }


def _base(runs: dict[str, list[Row]], base: str | None, figure: str) -> list[float] | None:
    return [row[figure] for row in runs[base]] if base and figure in runs[base][0] else None


def _figure(values: list[float], bases: list[float] | None) -> Row:
    figure: Row = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    if bases and all(bases):
        ratios = [value / other for value, other in zip(values, bases, strict=True)]
        # Of few values, the other method has quartiles outside of them.
        quarters = (
            statistics.quantiles(ratios, n=4, method="inclusive") if ratios[1:] else ratios * 3
        )
        figure["ratio_low"], figure["ratio"], figure["ratio_high"] = quarters
    return figure


def percentiles(values: Iterable[float]) -> Row:
    """Return p50, p99 and the greatest of some values."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "p50": ordered[last // 2],
        "p99": ordered[round(last * 0.99)],
        "max": ordered[-1],
    }


def machine(broker: Broker) -> Row:
    """Describe the machine and the software that all this ran on."""
    return {
        **provenance(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "rabbitmq": broker.version,
        "erlang": broker.api("GET", "overview")["erlang_version"],
        "python": platform.python_version(),
        **{name: version(name) for name in ("kombu", "amqp", "celery", "pyspark")},
        # Of the last fifteen minutes: what was measured here is a part of it.
        "load": round(os.getloadavg()[2], 1),
    }


def brief(row: Row) -> str:
    return " ".join(
        f"{name}={value:.4g}" for name, value in row.items() if isinstance(value, (int, float))
    )


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S", time.gmtime()), text, file=sys.stderr, flush=True)


def own_cpu(pid: int) -> float:
    """Return the seconds of CPU that a process has used so far."""
    # What /proc says counts in hundredths of a second: too few for a broker that is idle.
    clock = ctypes.c_int()
    if error := ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise ProcessLookupError(error, os.strerror(error), pid)
    return time.clock_gettime(clock.value)
