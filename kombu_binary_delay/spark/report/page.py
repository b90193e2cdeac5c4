"""The page around the charts: one file, no script, nothing fetched. It must not import Spark."""

from __future__ import annotations

from html import escape
from typing import Any

from kombu_binary_delay.spark import schema as s

from . import svg
from .parts import BAD, GOOD, SO_SO, TimeAxis, clock, document, moment, section, table, tile

_TONE = {
    s.OK: GOOD,
    s.EARLY: BAD,
    s.LOST_IN_THE_LADDER: BAD,
    s.LOST_AFTER_RELEASE: BAD,
    s.NOT_PUBLISHED: BAD,
    s.LATE: SO_SO,
    s.DUPLICATE: SO_SO,
    s.UNDECIDED: SO_SO,
    s.STILL_WAITING: "",
    s.TAKEN_BACK: "",
    s.RAN_AFTER_CANCEL: SO_SO,
    s.PUT_OFF: GOOD,
    s.REPLACED: GOOD,
}
#: What a verdict means, for who reads the report and no documentation.
_MEANING = {
    s.OK: "arrived once, and in time",
    s.EARLY: "arrived before it was due",
    s.LATE: "arrived later after its due time than the audit allows a task that is ok",
    s.DUPLICATE: "arrived more than once",
    s.LOST_IN_THE_LADDER: "published, and never came out of the ladder",
    s.LOST_AFTER_RELEASE: "came out of the ladder, and was not executed",
    s.STILL_WAITING: "not due yet, or so short a time ago that it may still come",
    s.NOT_PUBLISHED: "refused by the broker, so it was never delayed",
    s.TAKEN_BACK: "cancelled, and not executed",
    s.RAN_AFTER_CANCEL: "arrived after the receipt of its cancellation, and ran",
    s.PUT_OFF: "postponed while it waited, and arrived once, in time by its last due time",
    s.REPLACED: "another took its place, and arrived once, in time by its own due time",
    s.UNDECIDED: "the journal does not go far enough to say",
}
#: The limits of an audit: the verdicts that each counts.
_COUNTED = {
    "early": (s.EARLY,),
    "lost": (s.LOST_IN_THE_LADDER, s.LOST_AFTER_RELEASE),
    "duplicates": (s.DUPLICATE,),
    "late": (s.LATE,),
    "unpublished": (s.NOT_PUBLISHED,),
    "unknown": (s.UNDECIDED,),
}
#: From such a share of the tasks on, what has no limit is worth a warning.
_MANY = 0.01


def page(figures: dict[str, Any]) -> str:
    """Write the report."""
    jobs = ", ".join(figures["jobs"])
    title = f"Delayed tasks of {jobs}" if jobs else "Delayed tasks: what really happened"
    parts = [
        _head(figures, title),
        _tiles(figures),
        _limits(figures),
        _lateness(figures),
        _arrivals(figures),
        _waiting(figures),
        _levels(figures),
        _histogram(figures),
        _groups(figures),
        _offenders(figures),
        _meanings(),
    ]
    return document(title, parts)


def _head(figures: dict[str, Any], title: str) -> str:
    summary = figures["summary"]
    badges = [("passed", GOOD) if summary["passed"] else ("failed", BAD)]
    badges += [(text, SO_SO) for text in _warnings(summary)]
    postponed = f", {summary['postponed']:,} of them postponed" if summary["postponed"] else ""
    shown = "".join(f'<span class="verdict {tone}">{text}</span>' for text, tone in badges)
    start, end = moment(figures["start"]), moment(figures["end"])
    return (
        f'<h1>{escape(title)}</h1><div class="verdicts">{shown}</div>'
        f'<p class="lead">{_judgement(summary)}</p>'
        f'<p class="lead">{summary["tasks"]:,} tasks{postponed}, {start} to {end} UTC</p>'
    )


def _warnings(summary: dict[str, Any]) -> list[str]:
    """Say what was frequent, and has no limit that would let the audit fail; and whose clocks."""
    misdated = summary["misdated"]
    clocks = [f"{misdated:,} with an event of a wrong clock"] if misdated else []
    return clocks + [
        f"{count:,} of {summary['tasks']:,} {' or '.join(verdicts)}"
        for name, verdicts in _COUNTED.items()
        if name not in summary["thresholds"]
        and (count := sum(summary["verdicts"][each] for each in verdicts))
        and count >= _MANY * summary["tasks"]
    ]


def _judgement(summary: dict[str, Any]) -> str:
    """Say against what the audit has passed or failed."""
    limits = summary["thresholds"]
    if not limits:
        return "No limits were set."
    exceeded = [name for name, each in limits.items() if not each["passed"]]
    if exceeded:
        return f"Exceeds the limits of: {', '.join(exceeded)}."
    free = [name for name in (*_COUNTED, "p99") if name not in limits]
    kept = f"Keeps the limits of: {', '.join(limits)}."
    return f"{kept} Without a limit: {', '.join(free)}." if free else kept


def _tiles(figures: dict[str, Any]) -> str:
    summary = figures["summary"]
    tiles = [
        tile(f"{count:,}", name, _TONE[name] if count else "none", _MEANING[name])
        for name, count in summary["verdicts"].items()
    ]
    for name, label in (("p50", "late, p50"), ("p99", "late, p99"), ("worst", "late, worst")):
        value = summary["lateness"][name]
        tiles.append(tile("none" if value is None else svg.seconds(value), label, ""))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _axis(figures: dict[str, Any]) -> TimeAxis:
    return TimeAxis(figures["start"], figures["end"], svg.LEFT, svg.WIDTH - svg.RIGHT)


def _clock(figures: dict[str, Any]) -> svg.Label:
    return clock(figures["end"] - figures["start"])


def _lateness(figures: dict[str, Any]) -> str:
    if not figures["late"]:
        return ""
    start, width = figures["start"], figures["width"]
    series = []
    for index, name in ((3, "worst"), (2, "p99"), (1, "p50")):
        points = [
            (start + (row[0] + 0.5) * width, max(row[index], 0.001)) for row in figures["late"]
        ]
        series.append((name, points))
    chart = svg.lines(series, _axis(figures), svg.seconds, _clock(figures), log=True)
    return section(
        "Lateness over time",
        f"From due to arrival, of the tasks that arrived in each {svg.seconds(width)}; "
        "logarithmic, with all below 1 ms at 1 ms. A task that was postponed is due at its last "
        "time.",
        chart,
    )


def _arrivals(figures: dict[str, Any]) -> str:
    start, width = figures["start"], figures["width"]
    x, clock = _axis(figures), _clock(figures)
    series = [
        (name, [(start + index * width, value) for index, value in enumerate(figures[key])])
        for name, key in (("arrived", "arrived"), ("due", "due"), ("published", "published"))
        if any(figures[key])
    ]
    if not series:
        return ""
    chart = svg.lines(series, x, svg.number, clock, steps=True)
    return section(
        "Arrivals against plan",
        f"Tasks in each {svg.seconds(width)}: where the lines of due and arrived part, something "
        "was held up.",
        chart,
    )


def _waiting(figures: dict[str, Any]) -> str:
    start, width = figures["start"], figures["width"]
    ends = [start + (index + 1) * width for index in range(len(figures["waiting"]))]
    series = [("published and not arrived", list(zip(ends, figures["waiting"], strict=True)))]
    planned = (figures["planned"] or {}).get("")
    if planned:
        series.append(("planned on the ladder", list(zip(ends, planned["waiting"], strict=True))))
    note = "Tasks that the broker has and that have not arrived yet, at each moment."
    unknown = figures["without_publish_time"]
    if unknown:
        note += f" Not counted, since nothing says when they were published: {unknown:,}."
    if not any(figures["waiting"]) and unknown:
        del series[0]
    chart = svg.lines(series, _axis(figures), svg.number, _clock(figures)) if series else ""
    return section("Waiting in all", note, chart)


def _levels(figures: dict[str, Any]) -> str:
    planned = {name: each for name, each in (figures["planned"] or {}).items() if name}
    if not planned:
        return ""
    x, clock = _axis(figures), _clock(figures)
    named = {name: svg.seconds(each["wait"] / 1000) for name, each in planned.items()}
    rows = [(named[name], each["waiting"]) for name, each in planned.items()]
    charts = f"<h3>Planned</h3>{svg.heat(rows, x, clock, 'planned depth')}"
    if figures["seen"]:
        seen = [(named[name], figures["seen"].get(name, [0] * len(rows[0][1]))) for name in planned]
        charts += f"<h3>Seen</h3>{svg.heat(seen, x, clock, 'seen depth')}"
    return section(
        "Depth of each level",
        "One row a level queue, named by its time to live; the stronger the colour, the more "
        "messages.",
        charts,
    )


def _histogram(figures: dict[str, Any]) -> str:
    counts = [(low, high, count) for low, high, count in figures["histogram"]]
    if not counts:
        return ""
    x = svg.Axis(counts[0][0], counts[-1][1], svg.LEFT, svg.WIDTH - svg.RIGHT, log=True)
    chart = svg.bars(counts, x, svg.seconds, 2, "tasks")
    return section("How late", "Tasks by their lateness, on a logarithmic scale.", chart)


def _groups(figures: dict[str, Any]) -> str:
    tables = []
    for grouping in ("queue", "task", "hops", "hour"):
        # The largest first; what has an order of its own is shown in that.
        rows = [each for each in figures["groups"] if each["grouping"] == grouping]
        if grouping in ("hops", "hour"):
            rows.sort(key=lambda each: (len(str(each["value"])), str(each["value"])))
        body = "".join(
            f"<tr><td>{escape(str(each['value']))}</td><td class=n>{each['tasks']:,}</td>"
            + "".join(
                f"<td class=n>{svg.seconds(each[name])}</td>"
                for name in ("p50", "p90", "p99", "p999", "worst")
            )
            + "</tr>"
            for each in rows
        )
        if body:
            tables.append(
                f"<tr class=head><th>{grouping}</th><th class=n>tasks</th><th class=n>p50</th>"
                "<th class=n>p90</th><th class=n>p99</th><th class=n>p99.9</th>"
                f"<th class=n>worst</th></tr>{body}"
            )
    return section(
        "Lateness by queue, task, hops and hour",
        "The largest groups; the data has them all.",
        table("".join(tables)),
    )


def _offenders(figures: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td class=whole>{escape(each['verdict'])}</td>"
        f"<td class=n>{'' if each['lateness'] is None else svg.seconds(each['lateness'])}</td>"
        f"<td class=whole><code>{escape(each['task_id'] or '')}</code></td>"
        f"<td>{escape(each['key'] or '')}</td>"
        f"<td>{escape(each['task'] or '')}</td><td>{escape(each['queue'] or '')}</td>"
        f"<td class=whole>{'' if each['due'] is None else moment(each['due'])}</td></tr>"
        for each in figures["offenders"]
    )
    # A head of its own is repeated on each printed page.
    head = (
        "<thead><tr><th>verdict<th class=n>late<th>task id<th>key<th>task<th>queue<th>due, UTC"
        "</tr></thead>"
    )
    return section(
        "Worst offenders",
        "Lost, early and doubled tasks first, then the latest.",
        table(head + rows),
    )


def _limits(figures: dict[str, Any]) -> str:
    summary = figures["summary"]
    rows = ""
    for name in (*_COUNTED, "p99"):
        write = svg.seconds if name == "p99" else "{:,.0f}".format
        limit = summary["thresholds"].get(name)
        if limit is None:
            measured = _measured(summary, name)
            allowed, outcome = "no limit", "<td></td>"
        else:
            measured, allowed = limit["measured"], write(limit["allowed"])
            text = "passed" if limit["passed"] else "failed"
            outcome = f"<td class={text}>{text}</td>"
        rows += (
            f"<tr><td>{name}</td><td class=n>{'none' if measured is None else write(measured)}</td>"
            f"<td class=n>{allowed}</td>{outcome}</tr>"
        )
    head = "<tr><th>limit<th class=n>measured<th class=n>allowed<th></tr>"
    note = "The audit has passed where nothing exceeds what is allowed."
    return section("Limits", note, f'<table class="small">{head}{rows}</table>')


def _measured(summary: dict[str, Any], name: str) -> float | None:
    if name == "p99":
        late: float | None = summary["lateness"]["p99"]
        return late
    return float(sum(summary["verdicts"][each] for each in _COUNTED[name]))


def _meanings() -> str:
    rows = "".join(
        f"<tr><td class=whole>{name}</td><td>{meaning}</td></tr>"
        for name, meaning in _MEANING.items()
    )
    table = f'<table class="small meaning">{rows}</table>'
    return section("What the verdicts mean", "Each task has one.", table)
