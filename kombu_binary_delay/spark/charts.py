"""Charts of a few hundred numbers, by Vega-Altair: SVG with the colours of the page around it.

It must not import Spark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import altair as alt
import vl_convert

#: Colours that differ for colour-blind eyes too (Okabe and Ito's), by the page's names of them.
COLOURS = {
    "--blue": "#0072b2",
    "--orange": "#e69f00",
    "--green": "#009e73",
    "--red": "#d55e00",
    "--ink": "#1b1f24",
    "--dim": "#57606a",
    "--rule": "#e4e8ec",
}
_SERIES = [COLOURS[name] for name in ("--blue", "--orange", "--green", "--red")]
_DASHES = [[1, 0], [6, 3], [2, 2], [8, 2, 2, 2]]
_WIDTH, _HEIGHT = 880, 220
#: Times are drawn in UTC: Vega's own marks are in that of the machine.
_CLOCK = "%d %b %H:%M"
#: Vega's words for seconds on an axis: with the unit that suits them.
_SECONDS = (
    "datum.value < 1 ? format(datum.value * 1000, '~g') + ' ms' : "
    "datum.value < 120 ? format(datum.value, '~g') + ' s' : "
    "datum.value < 7200 ? format(datum.value / 60, '~r') + ' min' : "
    "datum.value < 172800 ? format(datum.value / 3600, '~r') + ' h' : "
    "format(datum.value / 86400, '~r') + ' d'"
)


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    log: bool = False,
    steps: bool = False,
) -> str:
    """Draw lines over time, each with its name.

    :param series: points by name: seconds since the epoch, and a value.
    :param log: whether the values are seconds on a logarithmic axis.
    """
    rows = [
        {"at": datetime.fromtimestamp(at, UTC).isoformat(), "value": value, "series": name}
        for name, points in series.items()
        for at, value in points
    ]
    if log:
        scale, axis = alt.Scale(type="log", nice=True), alt.Axis(labelExpr=_SECONDS, tickCount=5)
    else:
        scale, axis = alt.Scale(zero=True, nice=True), _count_axis()
    names = list(series)
    legend = alt.Legend(orient="top", title=None) if len(names) > 1 else None
    chart = (
        alt.Chart({"values": rows})
        .mark_line(interpolate="step-after" if steps else "linear", strokeWidth=1.8)
        .encode(
            x=alt.X(
                "at:T",
                title=None,
                scale=alt.Scale(type="utc"),
                axis=alt.Axis(tickCount=6, labelExpr=f"utcFormat(datum.value, '{_CLOCK}')"),
            ),
            y=alt.Y("value:Q", title=None, scale=scale, axis=axis),
            color=alt.Color(
                "series:N", scale=alt.Scale(domain=names, range=_SERIES), legend=legend
            ),
            strokeDash=alt.StrokeDash(
                "series:N", scale=alt.Scale(domain=names, range=_DASHES), legend=legend
            ),
        )
    )
    return _svg(chart)


def bars(counts: Sequence[tuple[float, float, int]]) -> str:
    """Draw counts by ranges of seconds, on a logarithmic axis: from, to, how many."""
    rows = [{"from": low, "to": high, "count": count} for low, high, count in counts]
    powers = [10.0**power for power in range(-3, 7)]
    axis = alt.Axis(labelExpr=_SECONDS, values=powers, grid=False)
    chart = (
        alt.Chart({"values": rows})
        .mark_bar(color=COLOURS["--green"])
        .encode(
            x=alt.X("from:Q", title=None, scale=alt.Scale(type="log", nice=True), axis=axis),
            x2="to:Q",
            y=alt.Y("count:Q", title=None, axis=_count_axis()),
            y2=alt.datum(0),
        )
    )
    return _svg(chart)


def _count_axis() -> alt.Axis:
    return alt.Axis(labelExpr="datum.value ? format(datum.value, '~s') : '0'", tickCount=5)


def _svg(chart: alt.Chart) -> str:
    made = chart.properties(width=_WIDTH, height=_HEIGHT).configure(
        background="transparent",
        font="system-ui, sans-serif",
        padding=4,
        view=alt.ViewConfig(stroke=None),
        axis=alt.AxisConfig(
            labelColor=COLOURS["--dim"],
            labelFontSize=12,
            gridColor=COLOURS["--rule"],
            domainColor=COLOURS["--rule"],
            tickColor=COLOURS["--rule"],
        ),
        legend=alt.LegendConfig(
            labelColor=COLOURS["--dim"], labelFontSize=12, symbolSize=200, columnPadding=36
        ),
    )
    svg: str = vl_convert.vegalite_to_svg(made.to_dict())
    # The page's own colours, which are others in the dark.
    for name, colour in COLOURS.items():
        svg = svg.replace(colour, f"var({name})")
    return svg
