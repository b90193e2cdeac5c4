"""The page of a plan: what the brokers will have to carry, and what to set. It imports no Spark."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from kombu_binary_delay.export.broker_config import PREFETCH
from kombu_binary_delay.ladder.ladder import Ladder
from kombu_binary_delay.settings import MAX_LANES

from . import svg
from .measured import DISK_MORE, FURTHER_WAIT, ONE_QUEUE, ONE_WAIT, cpu
from .parts import BAD, GOOD, SO_SO, TimeAxis, clock, document, moment, section, table, tile

#: So late, in seconds, is late.
_LATE = 1.0
_WORST = 12
_RADICES = (2, 4, 8, 16)
#: A line does not end in the middle of it.
_OPTION = '<span class="option">--limit hops_per_second=NUMBER</span>'
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))

Figures = dict[str, Any]


def plan_page(figures: Figures) -> str:
    """Write the report of a plan.

    :param figures: what :func:`~kombu_binary_delay.spark.report.planned.plan_figures` gave.
    """
    name = figures["name"]
    title = f"Plan of {name}" if name else "Plan of delayed tasks"
    parts = [
        _head(figures, title),
        _tiles(figures),
        _settings(figures),
        _ladders(figures),
        _coming(figures),
        _destinations(figures),
        _carried(figures),
        _late(figures),
        _assumed(),
    ]
    return document(title, parts)


def settings(figures: Figures) -> list[tuple[str, str]]:
    """Return the settings that the figures ask for, each with its reason."""
    if not figures["ladders"]:
        return []
    chosen, best = _chosen(figures), figures["ladders"][0]
    work, found = figures["work"][chosen["ladder"]], []
    peak, least = chosen["hops_per_second"], best["hops_per_second"]
    setting = _setting(best["ladder"])
    if peak > figures["carries"] and best is not chosen and least < 0.9 * peak and setting:
        found.append(
            (
                setting,
                (
                    f"The ladder {best['ladder']} has {_rate(least)} hops a second at its peak, "
                    f"and {chosen['ladder']} {_rate(peak)}, more than the "
                    f"{_rate(figures['carries'])} that the broker carries."
                ),
            )
        )
    busiest = figures["busiest"].get(chosen["ladder"])
    if busiest and busiest["rate"] > ONE_QUEUE:
        lanes = min(MAX_LANES, math.ceil(busiest["rate"] / ONE_QUEUE))
        found.append(
            (
                f"lanes: {lanes}",
                (
                    f"The queue {busiest['queue']} passes on {_rate(busiest['rate'])} messages a "
                    f"second at {moment(busiest['at'])}, and one queue was measured to pass on "
                    f"{_rate(ONE_QUEUE)}; with lanes, several queues share it."
                ),
            )
        )
    count, at = max(figures["herd"], default=(0, 0.0))
    if count / ONE_QUEUE - 1 > _LATE:
        found.append(
            (
                f"{PREFETCH.name}: {PREFETCH.value}",
                (
                    f"{count:,} tasks are due in one second, {moment(at)}. RabbitMQ releases "
                    f"them sooner with this setting of its own, which 'kombu-binary-delay export "
                    f"broker-config' writes. If they may come some seconds later, the setting "
                    f"jitter spreads them."
                ),
            )
        )
    if work["behind"] > 0 or work["overloaded"] > 0:
        found.append(
            (
                "a longer time, or more brokers",
                (
                    f"At its peak, the load is {peak / figures['carries']:.1f} times what the "
                    f"broker carries: spread the due times, or publish to several brokers."
                ),
            )
        )
    return found


def _chosen(figures: Figures) -> Figures:
    """Return the ladder that the report is about: the first that was given."""
    first: Figures = next(
        (each for each in figures["ladders"] if each["ladder"] == figures.get("chosen")),
        figures["ladders"][0],
    )
    return first


def _setting(ladder: str) -> str | None:
    named = {Ladder.uniform(each).name: f"radix: {each}" for each in _RADICES}
    return (named | {Ladder.default().name: "no radix, for the default ladder"}).get(ladder)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _exceeded(figures: Figures) -> list[str]:
    return [
        f"{name} of {each['ladder']}"
        for each in figures["ladders"]
        for name, allowed in figures["limits"].items()
        if each[name] > allowed
    ]


def _head(figures: Figures, title: str) -> str:
    exceeded = _exceeded(figures)
    badges = [("exceeds the limits", BAD) if exceeded else ("within the limits", GOOD)]
    worst = max(_work(figures)["late"], default=0.0)
    if worst >= _LATE:
        badges.append((f"up to {svg.seconds(worst)} late", SO_SO))
    shown = "".join(f'<span class="verdict {tone}">{escape(text)}</span>' for text, tone in badges)
    lead = f"Exceeds: {', '.join(exceeded)}." if exceeded else _kept(figures)
    span = f"{moment(figures['start'])} to {moment(figures['end'])} UTC"
    return (
        f'<h1>{escape(title)}</h1><div class="verdicts">{shown}</div>'
        f'<p class="lead">{escape(lead)}</p><p class="lead">{_messages(figures)}, {span}</p>'
    )


def _kept(figures: Figures) -> str:
    limits = ", ".join(f"{name} {allowed:,.15g}" for name, allowed in figures["limits"].items())
    return f"Keeps the limits of: {limits}." if limits else "No limits were set."


def _messages(figures: Figures) -> str:
    if not figures["ladders"]:
        return "No tasks"
    each = _chosen(figures)
    text = f"{each['messages']:,} delayed tasks on the ladder {escape(each['ladder'])}"
    for name, words in (
        ("at_once", "due at once"),
        ("beyond", "beyond the ladder"),
        ("undated", "without a due time"),
    ):
        if each[name]:
            text += f", {each[name]:,} {words}"
    return text


def _work(figures: Figures) -> Figures:
    none = {"rate": [], "late": [], "overloaded": 0, "behind": 0.0}
    found: Figures = figures["work"][_chosen(figures)["ladder"]] if figures["ladders"] else none
    return found


def _tiles(figures: Figures) -> str:
    if not figures["ladders"]:
        return ""
    each, work = _chosen(figures), _work(figures)
    worst, over = max(work["late"], default=0.0), each["hops_per_second"] > figures["carries"]
    cores = cpu(each["published_per_second"], each["hops_per_second"])
    tiles = [
        tile(svg.number(each["messages"]), "delayed tasks", ""),
        tile(f"{each['hops_per_message']:.1f}", "waits a task", ""),
        tile(svg.number(each["waiting"]), "wait at most", ""),
        tile(_rate(each["hops_per_second"]), "hops a second at most", BAD if over else GOOD),
        tile(_rate(figures["carries"]), "the broker carries", ""),
        tile(f"{cores:.2g}", "cores of the broker", ""),
        tile(svg.seconds(worst), "late, worst", SO_SO if worst >= _LATE else GOOD),
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _settings(figures: Figures) -> str:
    found = settings(figures)
    if not found:
        return section(
            "Recommended settings", "The figures ask for none: the defaults carry this load.", ""
        )
    body = "".join(
        f"<h3><code>{escape(what)}</code></h3><div>{escape(why)}</div>" for what, why in found
    )
    return section("Recommended settings", "What the figures below ask for, and why.", body)


def _ladders(figures: Figures) -> str:
    columns = (
        "waits a task",
        "hops/s, peak",
        "waiting",
        "in one queue",
        "queues",
        "size",
        "disk",
        "CPU",
    )
    head = "".join(f"<th class=n>{each}</th>" for each in columns)
    rows = ""
    for each in figures["ladders"]:
        used = cpu(each["messages"], each["hops"])
        cells = (
            f"{each['hops_per_message']:.2f}",
            _rate(each["hops_per_second"]),
            f"{each['waiting']:,}",
            f"{each['queue_waiting']:,}",
            f"{each['queues']:,}",
            _bytes(each["bytes"]),
            _bytes(each["bytes"] + each["waiting"] * DISK_MORE),
            svg.seconds(used),
        )
        numbers = "".join(f"<td class=n>{cell}</td>" for cell in cells)
        rows += f"<tr><td class=whole>{escape(each['ladder'])}</td>{numbers}</tr>"
    note = (
        f"For all tasks. Size is the most that wait at once; disk is what they take on each node "
        f"with a copy of them, by a measured {DISK_MORE:.0f} B more for each: have that free above "
        f"RabbitMQ's limit, or it blocks all publishers. CPU is the broker's: a measured "
        f"{ONE_WAIT * 1e6:.0f} µs for a task with one wait, and {FURTHER_WAIT * 1e6:.0f} µs for "
        "each further wait; in a cluster of three, some three times as much."
    )
    return section(
        "What each ladder costs", note, table(f"<tr class=head><th>ladder</th>{head}</tr>{rows}")
    )


def _bytes(value: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def _axis(figures: Figures) -> tuple[TimeAxis, svg.Label]:
    start, end = figures["start"], figures["end"]
    return TimeAxis(start, end, svg.LEFT, svg.WIDTH - svg.RIGHT), clock(end - start)


def _points(figures: Figures, values: list[float]) -> list[svg.Point]:
    start, width = figures["start"], figures["width"]
    return [(start + index * width, value) for index, value in enumerate(values)]


def _coming(figures: Figures) -> str:
    totals = [sum(each) for each in zip(*figures["due"].values(), figures["others"], strict=True)]
    if not any(totals):
        return ""
    x, label = _axis(figures)
    seconds = [count for count, _ in figures["herd"]]
    series = [
        ("due", _points(figures, totals)),
        ("due in the largest second of it", _points(figures, seconds)),
    ]
    return section(
        "When the load comes",
        f"Tasks that are due in each {svg.seconds(figures['width'])}.",
        svg.lines(series, x, svg.number, label, steps=True),
    )


def _destinations(figures: Figures) -> str:
    rows = list(figures["due"].items())
    if not rows:
        return ""
    if any(figures["others"]):
        # Apart from them, because a destination may have this name.
        rows.append(("others", figures["others"]))
    x, label = _axis(figures)
    totals = "".join(
        f"<tr><td class=n>{place}</td><td class=whole>{escape(name)}</td>"
        f"<td class=n>{sum(counts):,}</td><td class=n>{_rate(max(counts) / figures['width'])}</td>"
        f"</tr>"
        for place, (name, counts) in enumerate(rows, 1)
    )
    # Names have no room beside a chart.
    numbered = [(str(place), counts) for place, (_, counts) in enumerate(rows, 1)]
    head = (
        "<tr><th class=n><th>destination<th class=n>tasks"
        f"<th class=n>a second, mean of the busiest {svg.seconds(figures['width'])}</tr>"
    )
    return section(
        "Where it goes",
        f"A row a destination, the largest first; tasks that are due in each "
        f"{svg.seconds(figures['width'])}.",
        f"{svg.heat(numbered, x, label, 'due by destination')}"
        f'<div class="scroll"><table class="small">{head}{totals}</table></div>',
    )


def _carried(figures: Figures) -> str:
    if not figures["ladders"]:
        return ""
    x, label = _axis(figures)
    carries = figures["carries"]
    series = [("the broker carries", [(figures["start"], carries), (figures["end"], carries)])]
    series += [(name, _points(figures, each["rate"])) for name, each in figures["work"].items()]
    if figures["measured"]:
        note = (
            f"No limit was given with {_OPTION}. So this is what was measured on two cores, which "
            f"the programs shared: {_rate(carries)} messages a second that wait once."
        )
    else:
        note = f"The limit, {_rate(carries)} hops a second, was given with --limit."
    return section(
        "What the broker can carry",
        f"Hops a second: messages that level queues pass on, in the busiest minute. {note}",
        svg.lines(series, x, svg.number, label, steps=True),
    )


def _late(figures: Figures) -> str:
    work = _work(figures)
    times = _times(figures, work)
    if not times:
        return section("Where it would be late", "Nowhere, by these figures.", "")
    x, label = _axis(figures)
    size, unit = next(each for each in _UNITS if max(work["late"]) >= 2 * each[0] or each[0] == 1)
    late = _points(figures, [value / size for value in work["late"]])
    chart = svg.lines([("late", late)], x, lambda value: f"{value:g} {unit}", label, steps=True)
    rows = "".join(
        f"<tr><td class=whole>{moment(begin)}</td><td class=whole>{moment(end)}</td>"
        f"<td class=n>{svg.seconds(worst)}</td><td class=n>{_rate(rate)}</td>"
        f"<td class=n>{second:,}</td></tr>"
        for begin, end, worst, rate, second in times
    )
    note = (
        "An estimate. What is more than the broker carries is done afterwards; and of a second in "
        f"which more is due than one queue passes on, {_rate(ONE_QUEUE)}, the last is late by "
        "itself."
    )
    if work["overloaded"]:
        note += f" The broker is behind for {svg.seconds(work['overloaded'])} in all."
    if work["behind"]:
        note += f" At the end, it is still {svg.seconds(work['behind'])} behind."
    head = (
        "<tr><th>from, UTC<th>to<th class=n>late, worst<th class=n>hops/s, peak"
        "<th class=n>largest second</tr>"
    )
    return section(
        "Where it would be late",
        note,
        f'{chart}<div class="scroll"><table class="small">{head}{rows}</table></div>',
    )


def _times(figures: Figures, work: Figures) -> list[tuple[float, float, float, float, int]]:
    """Return the worst times in which tasks are late.

    :returns: from and to, the lateness, the hops a second and the tasks of the largest second.
    """
    found: list[list[int]] = []
    for place, value in enumerate(work["late"]):
        if value > 0:
            if not found or found[-1][-1] != place - 1:
                found.append([])
            found[-1].append(place)
    start, width = figures["start"], figures["width"]
    times = [
        (
            start + places[0] * width,
            start + (places[-1] + 1) * width,
            max(work["late"][place] for place in places),
            max(work["rate"][place] for place in places),
            max(figures["herd"][place][0] for place in places),
        )
        for places in found
    ]
    return sorted(sorted(times, key=lambda each: -each[2])[:_WORST])


def _assumed() -> str:
    rows = (
        (
            "destinations",
            (
                "by the columns queue, exchange and routing_key; other rows go where the "
                "application routes their task"
            ),
        ),
        ("size", "one copy of each message; disk adds what RabbitMQ keeps of it"),
        ("due", "the plan has no processing time: a message leaves a queue when it is due"),
        (
            "measured",
            (
                "RabbitMQ 3.10.8, for disk 4.3.6, on two cores of an AMD EPYC, shared with "
                f"publisher and consumer: measure your own, and give what it carries as {_OPTION}"
            ),
        ),
    )
    body = "".join(f"<tr><td class=whole>{name}</td><td>{text}</td></tr>" for name, text in rows)
    return section(
        "What is assumed",
        "For who reads this alone.",
        f'<table class="small meaning">{body}</table>',
    )
