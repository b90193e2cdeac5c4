"""Purpose: measure everything, on private brokers, and write what was found.

    python -m benchmarks [--quick] [--rounds N] [--only NAME,...] [--into FOLDER]

Each section is written as soon as it is measured, to FOLDER/results/NAME.json, and its table is
printed. Without --into, the folder is that of the documentation, whose tables, charts and figures
are then written anew. RABBITMQ_ROOT chooses another broker, whose release is then in the name:
NAME-on-4.3.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import (
    amendments,
    cluster,
    connecting,
    delivery,
    herd,
    periodic,
    prefetch,
    publishing,
    report,
    spark_pipeline,
    tick,
    travel,
    waiting,
    wal,
)
from benchmarks.rig import Scale, machine, say, stolen_since, ticks
from dev.broker import Broker

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.rig import Row

DOCS = Path(__file__).parents[1] / "docs" / "explanation" / "performance"
#: The release of RabbitMQ that the names of its results do not name.
USUAL = "3.10"

SECTIONS: dict[str, Callable[[Broker, Scale], Any]] = {
    "publishing": publishing.cost,
    "pairs": publishing.pairs,
    "first": publishing.first,
    "connecting": connecting.connecting,
    "burst": travel.burst,
    "burst-classic": partial(travel.burst, queue_type="classic"),
    "easy": travel.easy,
    "hour": partial(travel.long, most=3600, what="hour"),
    "day": partial(travel.long, most=86_400, what="day"),
    "hops": travel.hops,
    "sustained": travel.sustained,
    "lanes": travel.lanes,
    "herd": partial(herd.measured, count=20_000, ways=herd.WAYS),
    "herd-100000": partial(herd.measured, count=100_000, ways=herd.FEW),
    "waiting": waiting.broker,
    "worker": waiting.worker,
    "cluster": cluster.lose_a_node,
    "delivery": delivery.delivery,
    "amendments": amendments.everything,
    "tick": tick.ticks,
    "prefetch": prefetch.prefetch,
    "periodic": periodic.periodic,
    "wal": wal.wal,
    # The last, since what runs Spark stays in memory until we end.
    "spark": spark_pipeline.pipeline,
}


#: Measured once, however many rounds are asked for.
ONCE = ("waiting",)


def record(name: str, broker: Broker, scale: Scale, into: Path) -> Row:
    """Measure a section, and write its result as a file: each figure of each row, with its median.

    :returns: the whole result: what was found, the machine, and the minutes that it took.
    """
    start, before = time.monotonic(), ticks()
    figures = SECTIONS[name](broker, scale)
    release = ".".join(map(str, broker.release))
    result = {
        "machine": machine(broker),
        "rounds": 1 if name in ONCE else scale.rounds,
        "found": figures,
        "stolen": stolen_since(before),
        "minutes": round((time.monotonic() - start) / 60, 1),
    }
    (into / "results").mkdir(parents=True, exist_ok=True)
    file = name if release == USUAL else f"{name}-on-{release}"
    (into / "results" / f"{file}.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--quick", action="store_true", help="only see that it all runs")
    parser.add_argument("--rounds", type=int, default=1, help="how often each is measured")
    parser.add_argument("--only", default="", help=f"some of {', '.join(SECTIONS)}")
    parser.add_argument("--into", type=Path, help="the folder to write to")
    given = parser.parse_args(arguments)
    only = given.only.split(",") if given.only else list(SECTIONS)
    if unknown := [name for name in only if name not in SECTIONS]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    into = given.into or (Path(tempfile.mkdtemp(prefix="bench-")) if given.quick else DOCS)
    scale = Scale(given.quick, 1 if given.quick else given.rounds)
    for name in only:
        # A broker of its own for each, so that none inherits what another has left.
        with Broker(os.environ.get("RABBITMQ_ROOT")) as broker:
            print(report.table(name, record(name, broker, scale, into)))
    if into == DOCS:
        from docs.generate.__main__ import main as generate  # noqa: PLC0415 - it needs the results

        generate()
    say(f"written to {into}")


if __name__ == "__main__":
    main()
