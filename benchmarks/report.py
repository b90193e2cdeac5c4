"""Purpose: make tables from recorded results. It measures nothing.

`python -m docs.generate` puts them into docs/explanation/performance.md, and beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from benchmarks.amendments import CASES, FIGURES
from benchmarks.connecting import TITLES as CONNECTING_TITLES
from benchmarks.delivery import TITLES as DELIVERY_TITLES
from benchmarks.herd import TITLES as HERD_TITLES
from benchmarks.kit import TITLES as KIT_TITLES
from benchmarks.periodic import TITLES as PERIODIC_TITLES
from benchmarks.publishing import PAIRS, WAYS
from benchmarks.rig import STOLEN
from benchmarks.variants import peers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.rig import Row

TITLES = {name: variant.title for name, variant in peers("quorum").items()}
WAY_TITLES = {name: title for name, (title, _) in WAYS.items()}
PAIR_TITLES = {
    name: f"{WAYS[ours][0]}, to {WAYS[theirs][0]}"
    for name, ((ours, _), (theirs, _)) in PAIRS.items()
}
SPARK_TITLES = {
    "publish: Celery": "publish, by `send_task` in a loop, a confirm each",
    "publish: Celery, batch": "the same in `producer.batch()`",
    "publish: Kombu": "publish, by Kombu in a loop, a confirm each",
    "publish: template": "publish, by the template without Spark, with receipts",
    "publish: Spark": "publish, from Spark, with receipts",
    "publish: Spark, more": "the same, a larger job",
    "plan": "plan, and its summary",
    "audit": "audit, of a receipt and three events each",
    "audit, written": "the same, with its verdicts written",
}
#: What is not on classic queues in a burst on them.
CLASSIC_TITLES = TITLES | {"nservicebus": f"{TITLES['nservicebus']} (quorum)"}


class Column(NamedTuple):
    """A column of a table: a figure's median, its ratio, or a quartile of that."""

    title: str
    figure: str
    form: str = "{:.0f}"
    of: str = "median"


_TRAVEL = (
    Column("Broker CPU", "cpu_us", "{:.2f}", of="ratio"),
    Column("p99 lateness", "p99", "{:.4f}", of="ratio"),
    Column("CPU, µs a message", "cpu_us"),
    Column("late p50, ms", "p50"),
    Column("p99, ms", "p99"),
    Column("max, ms", "max"),
    Column("published a second", "publish_rate"),
    Column("bytes of headers", "header_bytes"),
    Column("missing", "missing"),
)
_HERD = (
    Column("released a second", "rate", "{:,.0f}"),
    Column("to bare dead-lettering", "rate", "{:.2f}", of="ratio"),
    Column("last, ms", "last_ms", "{:,.0f}"),
    Column("p99, ms", "p99", "{:,.0f}"),
    Column("CPU, µs a message", "cpu_us"),
    Column("of it, the release", "release_cpu_us"),
    Column("waiting, MB", "waiting_mb"),
    Column("at most, MB", "peak_mb"),
    Column("consumer's CPU, µs", "consumer_us"),
    Column("missing", "missing"),
)
_SPARK = (
    Column("tasks", "tasks", "{:,.0f}"),
    Column("tasks a second", "rate", "{:,.0f}"),
    Column("least", "rate", "{:,.0f}", of="least"),
    Column("most", "rate", "{:,.0f}", of="most"),
)
TABLES: dict[str, tuple[Column, ...]] = {
    "burst": _TRAVEL,
    "burst-classic": _TRAVEL,
    "hour": _TRAVEL,
    "day": _TRAVEL,
    "easy": (Column("Broker CPU", "cpu_us", "{:.2f}", of="ratio"), *_TRAVEL[2:6], _TRAVEL[7]),
    "hops": (Column("CPU, µs a message", "cpu_us"), *_TRAVEL[3:5]),
    "lanes": (
        Column("CPU of all nodes", "cpu_us", "{:.2f}", of="ratio"),
        Column("p99 lateness", "p99", "{:.2f}", of="ratio"),
        Column("the busiest node's share", "busiest", "{:.2f}"),
        *_TRAVEL[2:5],
    ),
    "sustained": (
        Column("messages a second", "publish_rate"),
        Column("least", "publish_rate", of="least"),
        Column("most", "publish_rate", of="most"),
        Column("p99, ms", "p99"),
        Column("broker CPU, µs a message", "cpu_us"),
        Column("publisher's", "publisher_us"),
        Column("consumer's", "consumer_us"),
    ),
    "delivery": (
        Column("consumer's CPU", "cpu_us", "{:.2f}", of="ratio"),
        Column("lower quartile", "cpu_us", "{:.2f}", of="ratio_low"),
        Column("upper", "cpu_us", "{:.2f}", of="ratio_high"),
        Column("CPU, µs a message", "cpu_us"),
        Column("Python's instructions", "instructions", "{:,.0f}"),
    ),
    "herd": _HERD,
    "herd-100000": _HERD,
    "publishing": (
        Column("Publisher's CPU", "cpu_us", "{:.2f}", of="ratio"),
        Column("CPU, µs a message", "cpu_us"),
        Column("messages a second", "rate"),
    ),
    "pairs": (
        Column("publisher's CPU", "cpu_us", "{:.3f}", of="ratio"),
        Column("lower quartile", "cpu_us", "{:.3f}", of="ratio_low"),
        Column("upper", "cpu_us", "{:.3f}", of="ratio_high"),
        Column("messages a second", "rate", "{:.2f}", of="ratio"),
        Column("lower quartile", "rate", "{:.2f}", of="ratio_low"),
        Column("upper", "rate", "{:.2f}", of="ratio_high"),
    ),
    "first": (
        Column("nothing exists, ms", "cold_ms"),
        Column("all exists, ms", "warm_ms", "{:.1f}"),
    ),
    "connecting": (
        Column("time", "ms", "{:.2f}", of="ratio"),
        Column("broker CPU", "cpu_ms", "{:.2f}", of="ratio"),
        Column("the whole program", "program_ms", "{:.2f}", of="ratio"),
        Column("time of a task, ms", "ms", "{:.1f}"),
        Column("broker CPU, ms", "cpu_ms", "{:.1f}"),
        Column("frames sent", "frames"),
        Column("round trips", "trips"),
    ),
    "prefetch": (
        Column("Broker CPU", "cpu_us", "{:.2f}", of="ratio"),
        Column("last arrival", "last_ms", "{:.2f}", of="ratio"),
        *_HERD[2:8],
        Column("at most with 64 KiB, MB", "large_peak_mb"),
        Column("twice", "twice"),
        Column("missing", "missing"),
    ),
    "wal": (
        Column("Broker CPU", "cpu_us", "{:.2f}", of="ratio"),
        Column("CPU, µs a message", "cpu_us"),
        Column("published a second", "rate", "{:,.0f}"),
        Column("memory, bytes", "memory", "{:,.0f}"),
    ),
    "periodic": (
        Column("one is killed: missed", "killed_missed"),
        Column("doubled", "killed_more"),
        Column("two are started: missed", "two_missed"),
        Column("doubled", "two_more"),
        Column("the broker restarts: missed", "restart_missed"),
        Column("doubled", "restart_more"),
        Column("1,000 at once, p50, ms", "p50"),
        Column("p99, ms", "p99"),
    ),
    "tick": (
        Column("Waits per message", "waits", "{:.1f}"),
        Column("Late, p50, ms", "p50"),
        Column("Late, p99, ms", "p99"),
        Column("Broker CPU per message", "cpu_us", "{:.2f}", of="ratio"),
    ),
    "testing": (
        Column("CPU, ms", "cpu_ms", "{:.1f}"),
        Column("a year of them, s", "year_s"),
        Column("missing", "missing"),
    ),
    "spark": (
        *_SPARK,
        Column("of Spark, while it publishes", "publishing", "{:,.0f}"),
        Column("Python's CPU, µs a task", "python_us"),
    ),
    "spark-tables": _SPARK,
}


def table(name: str, result: Row) -> str:
    """Write a result as a table, and below it what it was measured on.

    :param name: the section, or the section and a release, such as ``pairs-on-4.3``.
    """
    section = section_of(name)
    text = _table(section, result) if section in TABLES else _list(section, result)
    return f"{text}\n{_footnote(section, result)}"


def section_of(name: str) -> str:
    """Return the section of a result such as ``burst-on-4.3`` or ``second-run/burst``."""
    return name.rpartition("/")[2].partition("-on-")[0]


def titles_of(section: str) -> Mapping[str, str]:
    """Return the titles of a section's rows."""
    return {
        "publishing": WAY_TITLES,
        "pairs": PAIR_TITLES,
        "spark": SPARK_TITLES,
        "spark-tables": SPARK_TITLES,
        "amendments": CASES,
        "waiting": {},
        "worker": {},
        "connecting": CONNECTING_TITLES,
        "delivery": DELIVERY_TITLES,
        "testing": KIT_TITLES,
        "herd": HERD_TITLES,
        "periodic": PERIODIC_TITLES,
        "herd-100000": HERD_TITLES,
        "burst-classic": CLASSIC_TITLES,
    }.get(section, TITLES)


def _table(name: str, result: Row) -> str:
    # That no message is missing is said below the table, which is wide enough.
    columns = [column for column in TABLES[name] if column.figure != "missing" or _missing(result)]
    titles = titles_of(name)
    rows = [["", *(column.title for column in columns)], ["---"] + ["--:"] * len(columns)]
    for key, figures in result["found"].items():
        # After a colon, a key says of how many.
        cells = [titles.get(key) or titles.get(key.partition(":")[0], key)]
        for column in columns:
            figure = figures.get(column.figure, {})
            value = figure.get(column.of)
            cells.append("" if value is None else column.form.format(value))
        rows.append(cells)
    return _markdown(rows)


def _list(name: str, result: Row) -> str:
    """Write a row for each figure, under its own name, of each case: too many for columns."""
    ends = ("median", "least", "most", "ratio")
    rows = [["", "", *ends], ["---", "---"] + ["--:"] * len(ends)]
    titles = titles_of(name)
    figures = dict.fromkeys(figure for row in result["found"].values() for figure in row)
    for figure in figures:
        for case, row in result["found"].items():
            if figure in row:
                cells = [_number(row[figure][end]) if end in row[figure] else "" for end in ends]
                rows.append([FIGURES.get(figure, figure), titles.get(case, case), *cells])
    return _markdown(rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _markdown(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows) + "\n"


def _footnote(section: str, result: Row) -> str:
    on = result["machine"]
    spark = f", PySpark {on['pyspark']}" if section.startswith("spark") else ""
    return (
        f"RabbitMQ {on['rabbitmq']}, Erlang {on['erlang']}, Python {on['python']}, "
        f"Celery {on['celery']}, Kombu {on['kombu']}, py-amqp {on['amqp']}"
        f"{spark}; {on['processor']}, "
        f"{on['cores']} cores; rounds: {result['rounds']}; commit {on['commit']}, {on['date']}."
        f"{_stolen(result)}"
        f"{' No message is missing.' if _missing(result) == 0 else ''}"
    )


def _stolen(result: Row) -> str:
    """Say what the host took of the CPU in a measurement, if that was more than it should."""
    rows = [row["stolen"] for row in result["found"].values() if "stolen" in row]
    shares = [row.get("most", row["median"]) for row in rows] or [result.get("stolen", 0)]
    worst = max(shares)
    return f" The host took up to {worst:.0%} of the CPU meanwhile." if worst > STOLEN else ""


def _missing(result: Row) -> float | None:
    """Return how many messages did not arrive; None where that was not counted."""
    counts = [row["missing"]["most"] for row in result["found"].values() if "missing" in row]
    return sum(counts) if counts else None
