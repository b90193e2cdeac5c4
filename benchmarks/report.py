"""Purpose: write tables and charts from the results that lie in a folder.

`tables/NAME.md` for each section that was measured, included by docs/explanation/performance.md,
and `NAME.svg` for those that are best seen. It measures nothing.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks.publishing import PAIRS, WAYS
from benchmarks.variants import peers

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.rig import Row

TITLES = {name: variant.title for name, variant in peers("quorum").items()}
WAY_TITLES = {name: title for name, (title, _) in WAYS.items()}
PAIR_TITLES = {
    name: f"{WAYS[ours][0]}, to {WAYS[theirs][0]}"
    for name, ((ours, _), (theirs, _)) in PAIRS.items()
}
#: The same file for the same figures.
SVG: Any = {"svg.hashsalt": "kombu-binary-delay", "svg.fonttype": "none", "font.size": 9}


class Column(NamedTuple):
    """A column of a table: a figure's median, its ratio, or a quartile of that."""

    title: str
    figure: str
    form: str = "{:.0f}"
    of: str = "median"


_TRAVEL = (
    Column("Broker CPU", "cpu_us", "{:.2f}", of="ratio"),
    Column("p99 lateness", "p99", "{:.3f}", of="ratio"),
    Column("CPU, µs a message", "cpu_us"),
    Column("late p50, ms", "p50"),
    Column("p99, ms", "p99"),
    Column("max, ms", "max"),
    Column("published a second", "publish_rate"),
    Column("bytes of headers", "header_bytes"),
    Column("missing", "missing"),
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
    "sustained": (Column("messages a second", "rate"), Column("p99, ms", "p99")),
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
        Column("nothing stands, ms", "cold_ms"),
        Column("all stands, ms", "warm_ms", "{:.1f}"),
    ),
    "size": (Column("bytes sent", "bytes"),),
}


def write(into: Path) -> None:
    """Write all tables and charts that the results allow."""
    tables = into / "tables"
    tables.mkdir(parents=True, exist_ok=True)
    for path in sorted((into / "results").glob("*.json")):
        result = json.loads(path.read_text())
        name = path.stem
        # A copy of results from another release lies beside them as, say, `pairs-on-4.3.json`.
        section = name.partition("-on-")[0]
        text = _plain(result) if section in ("waiting", "worker") else _table(section, result)
        (tables / f"{name}.md").write_text(f"{text}\n{_footnote(result)}\n")
        if name in ("burst", "burst-classic", "hour", "day"):
            _bars(into / f"{name}.svg", result["found"])
        elif name == "hops":
            _lines(into / "hops.svg", result["found"])


def _table(name: str, result: Row) -> str:
    columns = TABLES[name]
    titles = {"publishing": WAY_TITLES, "size": WAY_TITLES, "pairs": PAIR_TITLES}.get(name, TITLES)
    rows = [["", *(column.title for column in columns)], ["---"] + ["--:"] * len(columns)]
    for key, figures in result["found"].items():
        cells = [titles.get(key, key)]
        for column in columns:
            figure = figures.get(column.figure, {})
            value = figure.get(column.of)
            cells.append("" if value is None else column.form.format(value))
        rows.append(cells)
    return _markdown(rows)


def _plain(result: Row) -> str:
    """Turn a table round: figures are rows, cases are columns."""
    found = result["found"]
    figures = list(dict.fromkeys(figure for row in found.values() for figure in row))
    rows = [["", *found], ["---"] + ["--:"] * len(found)]
    for figure in figures:
        cells = [figure.replace("_", " ")]
        cells += [_number(row[figure]) if figure in row else "" for row in found.values()]
        rows.append(cells)
    return _markdown(rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _markdown(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows) + "\n"


def _footnote(result: Row) -> str:
    on = result["machine"]
    return (
        f"RabbitMQ {on['rabbitmq']}, Erlang {on['erlang']}, Python {on['python']}, "
        f"Celery {on['celery']}, Kombu {on['kombu']}, py-amqp {on['amqp']}; {on['processor']}, "
        f"{on['cores']} cores; rounds: {result['rounds']}; {on['date']}."
    )


def _bars(path: Path, found: dict[str, Any]) -> None:
    names = list(found)[::-1]
    with mpl.rc_context(SVG):
        figure, sides = plt.subplots(1, 2, figsize=(8, 0.35 * len(names) + 1), sharey=True)
        for side, key, title in zip(
            sides,
            ("cpu_us", "p99"),
            ("broker CPU, µs a message", "p99 lateness, ms (logarithmic)"),
            strict=True,
        ):
            values = [found[name][key] for name in names]
            medians = [max(value["median"], 0.1) for value in values]
            spread = [
                [max(m - v["least"], 0) for m, v in zip(medians, values, strict=True)],
                [max(v["most"] - m, 0) for m, v in zip(medians, values, strict=True)],
            ]
            colors = [
                "#2a6f97" if TITLES.get(name, name).startswith("ours") else "#a0a0a0"
                for name in names
            ]
            side.barh(
                [TITLES.get(name, name) for name in names], medians, xerr=spread, color=colors
            )
            side.set_xlabel(title)
        sides[1].set_xscale("log")
        _save(figure, path)


def _lines(path: Path, found: dict[str, Any]) -> None:
    with mpl.rc_context(SVG):
        figure, axes = plt.subplots(figsize=(6, 3.2))
        for kind, title in (("ours", "ours"), ("bare", "bare dead-letters")):
            points = {
                int(name.rpartition("-")[2]): row["cpu_us"]["median"]
                for name, row in found.items()
                if name.startswith(f"{kind}-")
            }
            points[0] = found["floor"]["cpu_us"]["median"]
            waits = sorted(points)
            axes.plot(waits, [points[each] for each in waits], "o-", label=title)
        axes.set(xlabel="waits", ylabel="broker CPU, µs a message", ylim=(0, None))
        axes.legend()
        _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
