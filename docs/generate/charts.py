"""Purpose: the charts of the page on performance, of the newest release."""

from __future__ import annotations

from typing import Any, NamedTuple

import altair as alt
import vl_convert

from benchmarks import report

from .benchmarks import RELEASES, RESULTS

PEERS = ("ours", "celery-native", "nservicebus", "symfony")
CELERY = ("celery", "celery-ours", "celery-native", "celery-ours-delayed")
WAITING = {
    "0": "ours, nothing waits",
    "1000000": "ours, a million wait",
    "3000000": "ours, three million wait",
    "10000000": "ours, ten million wait",
}
OURS, THEIRS = "#2a6f97", "#a0a0a0"
#: It is among those that the renderer brings, so that a chart is the same wherever it is drawn.
FONT = "Liberation Sans, Arial, sans-serif"


class Bars(NamedTuple):
    """A bar for each of some rows: their medians, and a line from the least to the most."""

    section: str
    figure: str
    rows: tuple[str, ...]
    axis: str
    unit: float = 1  # the figure is divided by it
    is_log: bool = False


CHARTS = {
    "cost": Bars("burst", "cpu_us", ("floor", *PEERS), "broker CPU, µs a message"),
    "lateness": Bars("burst", "p99", PEERS, "p99 lateness, ms (logarithmic)", is_log=True),
    "rate": Bars("sustained", "publish_rate", PEERS[:3], "messages a second, on two cores"),
    "waiting": Bars("waiting", "memory", (*WAITING,), "the broker's memory, MB", 1e6),
    "program": Bars("publishing", "cpu_us", CELERY, "the publisher's CPU, µs a message"),
}


def charts() -> dict[str, str]:
    """Return the SVG text of each chart, by its file's name."""
    return {f"{name}.svg": _drawn(bars) for name, bars in CHARTS.items()}


def _drawn(bars: Bars) -> str:
    figures = RESULTS[bars.section + next(iter(RELEASES.values()))]["found"]
    titles = {**report.titles_of(bars.section), **WAITING}
    rows = [_row(titles[row], figures[row][bars.figure], bars.unit) for row in bars.rows]
    scale = alt.Scale(type="log" if bars.is_log else "linear")
    chart = alt.Chart(alt.InlineData(values=rows)).encode(
        alt.Y("title:N", sort=None, title=None, axis=alt.Axis(labelLimit=300)),
    )
    drawn = chart.mark_bar().encode(
        alt.X("median:Q", stack=None, title=bars.axis, scale=scale),
        color=alt.condition("test(/ours/, datum.title)", alt.value(OURS), alt.value(THEIRS)),
    )
    spread = chart.mark_rule().encode(alt.X("least:Q"), alt.X2("most:Q"))
    layers = alt.layer(drawn, spread).properties(width=480, height={"step": 24})
    # A viewer without that font takes another one, which may be wider.
    padding = {"left": 40, "top": 5, "right": 10, "bottom": 5}
    shown = layers.configure(font=FONT, background="white", padding=padding)
    return vl_convert.vegalite_to_svg(shown.to_dict()) + "\n"


def _row(title: str, measured: dict[str, float], unit: float) -> dict[str, Any]:
    median = measured["median"]
    ends = {end: measured.get(end, median) / unit for end in ("least", "most")}
    return {"title": title, "median": median / unit, **ends}
