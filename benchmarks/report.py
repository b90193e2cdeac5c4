"""Purpose: write tables and charts from the results that lie in a folder.

`tables/NAME.md` for each section that was measured, included by docs/explanation/performance.md,
and `NAME.svg` for those that are best seen. It measures nothing.
"""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.amendments import CASES, FIGURES
from benchmarks.publishing import PAIRS, WAYS
from benchmarks.variants import peers
from kombu_binary_delay.spark.report.svg import Axis, number

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.rig import Row

TITLES = {name: variant.title for name, variant in peers("quorum").items()}
WAY_TITLES = {name: title for name, (title, _) in WAYS.items()}
PAIR_TITLES = {
    name: f"{WAYS[ours][0]}, to {WAYS[theirs][0]}"
    for name, ((ours, _), (theirs, _)) in PAIRS.items()
}
OURS, THEIRS = "#2a6f97", "#a0a0a0"
STYLE = "text{font:12px sans-serif;fill:#222}.grid{stroke:#ddd}.spread{stroke:#222}"


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
        Column("nothing exists, ms", "cold_ms"),
        Column("all exists, ms", "warm_ms", "{:.1f}"),
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
        if section in ("waiting", "worker"):
            text = _plain(result)
        elif section == "amendments":
            text = _by_figure(result)
        else:
            text = _table(section, result)
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


def _by_figure(result: Row) -> str:
    """Write a row for each case of each figure."""
    rows = [["", "", "median", "least", "most", "ratio"], ["---", "---"] + ["--:"] * 4]
    for figure, title in FIGURES.items():
        titles = [title]
        for case, value in result["found"][figure].items():
            spread = [
                _number(value[of]) if of in value else "" for of in ("median", "least", "most")
            ]
            ratio = f"{value['ratio']:.2f}" if "ratio" in value else ""
            rows.append([titles.pop() if titles else "", CASES[case], *spread, ratio])
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
    titles = {name: TITLES.get(name, name) for name in found}
    bottom = 8 + 24 * len(found)
    drawn = [_text(250, 24 + 24 * row, each, "end") for row, each in enumerate(titles.values())]
    for left, key, title, log in (
        (260, "cpu_us", "broker CPU, µs a message", False),
        (540, "p99", "p99 lateness, ms (logarithmic)", True),
    ):
        values = [row[key] for row in found.values()]
        # A lateness of nothing has no place on a logarithmic axis.
        low = max(min(each["least"] for each in values), 0.1) if log else 0
        x = Axis(low, max(each["most"] for each in values), left, left + 240, log=log)
        drawn += _grid_and_title(x, title, bottom)
        for row, (name, value) in enumerate(zip(titles.values(), values, strict=True)):
            top, end = 11 + 24 * row, x.at(value["median"])
            colour = OURS if name.startswith("ours") else THEIRS
            drawn.append(
                f'<rect x="{left}" y="{top}" width="{end - left:.1f}" height="18" fill="{colour}"/>'
                f'<path class="spread" d="M{x.at(value["least"]):.1f} {top + 9}'
                f'H{x.at(value["most"]):.1f}"/>'
            )
    _save(path, drawn, 800, bottom + 40)


def _lines(path: Path, found: dict[str, Any]) -> None:
    kinds = {"ours": ("ours", OURS), "bare": ("bare dead-letters", THEIRS)}
    points = {kind: {0: found["floor"]["cpu_us"]["median"]} for kind in kinds}
    for name, row in found.items():
        kind, _, waits = name.rpartition("-")
        if kind in kinds:
            points[kind][int(waits)] = row["cpu_us"]["median"]
    every = [value for each in points.values() for value in each.values()]
    x = Axis(0, max(waits for each in points.values() for waits in each), 60, 580)
    y = Axis(0, max(every), 270, 10)
    drawn = _grid_and_title(x, "waits", 270)
    for tick in y.ticks():
        drawn.append(f'<path class="grid" d="M60 {y.at(tick):.1f}H580"/>')
        drawn.append(_text(54, y.at(tick) + 4, number(tick), "end"))
    for place, (kind, (title, colour)) in enumerate(kinds.items()):
        pixels = [(x.at(waits), y.at(cpu)) for waits, cpu in sorted(points[kind].items())]
        way = " ".join(f"{across:.1f},{up:.1f}" for across, up in pixels)
        drawn.append(f'<polyline points="{way}" fill="none" stroke="{colour}"/>')
        drawn += [
            f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3" fill="{colour}"/>'
            for across, up in pixels
        ]
        drawn.append(f'<rect x="74" y="{16 + 20 * place}" width="12" height="12" fill="{colour}"/>')
        drawn.append(_text(92, 27 + 20 * place, f"{title}: broker CPU, µs a message"))
    _save(path, drawn, 600, 310)


def _grid_and_title(x: Axis, title: str, bottom: float) -> list[str]:
    drawn = [_text((x.start + x.end) / 2, bottom + 34, title, "middle")]
    for tick in x.ticks():
        drawn.append(f'<path class="grid" d="M{x.at(tick):.1f} 8V{bottom}"/>')
        drawn.append(_text(x.at(tick), bottom + 16, number(tick), "middle"))
    return drawn


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _save(path: Path, drawn: list[str], width: int, height: int) -> None:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    # A page may be dark, and the text is not.
    lines = [f"<style>{STYLE}</style>", f'<rect width="{width}" height="{height}" fill="#fff"/>']
    inside = "\n".join(lines + drawn)
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{inside}\n</svg>\n')
