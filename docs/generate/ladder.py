"""Purpose: the figures of a ladder, and of the route of one message down it."""

from __future__ import annotations

from html import escape

from kombu_binary_delay import Ladder, Topology
from kombu_binary_delay.export import svg
from kombu_binary_delay.ladder.durations import human

TEN_SECONDS, FORTY_FIVE, AN_HOUR, QUEUE = 10_000, 45_000, 3_600_000, "mail"  # ms

_STYLE = """
text{font:13px sans-serif;fill:#222;text-anchor:middle}.title{font-weight:600}
.note{font-size:12px;fill:#666}.code{font:12px monospace;fill:#0a4bff}
.box{fill:#f6f6f6;stroke:#0a4bff;stroke-width:2}.ground{fill:#fff}
.broker{fill:none;stroke:#aaa;stroke-width:1.5;stroke-dasharray:4 4}
.end{stroke:#ccc}.way{fill:none;stroke:#0a4bff;stroke-width:2}.head{fill:#0a4bff}
@media (prefers-color-scheme:dark){
text{fill:#ddd}.note{fill:#a4a9b0}.code{fill:#6ea8ff}.box{fill:#262a30;stroke:#6ea8ff}
.ground{fill:#1b1e22}.broker{stroke:#6b727b}.end{stroke:#4a5058}.way{stroke:#6ea8ff}
.head{fill:#6ea8ff}}
"""
_WIDTH, _HEIGHT = 760, 168
_BOX, _GAP, _TOP, _TALL = 114, 40, 62, 54


def ten_seconds() -> str:
    """Return the figure of ten seconds on a ladder of four levels, with all its parts."""
    return svg(Topology(Ladder.uniform(4, 4)), TEN_SECONDS, QUEUE) + "\n"


def an_hour() -> str:
    """Return the figure of an hour on the default ladder, with unused levels folded."""
    return svg(Topology(), AN_HOUR, QUEUE) + "\n"


def in_short() -> str:
    """Return the figure of forty-five seconds, with only the queues in which the message waits."""
    topology = Topology(Ladder.default(3))
    ladder = topology.ladder
    waits = [
        int(digit, 2) * weight
        for digit, weight in zip(ladder.digits(FORTY_FIVE), ladder.weights, strict=True)
        if int(digit, 2)
    ]
    bits = " ".join(ladder.digits(FORTY_FIVE))
    boxes = [
        ("your program", f"countdown={FORTY_FIVE // 1000}", "end"),
        *((f"waits {human(wait)}", "a TTL queue", "") for wait in waits),
        (QUEUE, "the task's queue", ""),
        ("a worker", f"at {human(FORTY_FIVE)}", "end"),
    ]
    left = (_WIDTH - len(boxes) * _BOX - (len(boxes) - 1) * _GAP) / 2
    drawn, middle = [], _TOP + _TALL / 2
    for number, (title, note, kind) in enumerate(boxes):
        x = left + number * (_BOX + _GAP)
        drawn += [
            f'<rect class="box {kind}" x="{x}" y="{_TOP}" width="{_BOX}" height="{_TALL}" rx="6"/>',
            _text(x + _BOX / 2, _TOP + 23, title, "title"),
            _text(x + _BOX / 2, _TOP + 41, note, "note"),
        ]
        if number:
            drawn.append(f'<path class="way" d="M{x - _GAP + 2} {middle}H{x - 9}"/>')
            drawn.append(f'<path class="head" d="M{x - 10} {middle - 5}L{x - 1} {middle}l-9 5z"/>')
    first, last = left + _BOX + _GAP / 2, left + (len(boxes) - 1) * (_BOX + _GAP) - _GAP / 2
    inside = f'x="{first}" y="16" width="{last - first}" height="{_HEIGHT - 32}" rx="8"'
    ticks = FORTY_FIVE // ladder.tick
    said = f"{human(FORTY_FIVE)} = {ticks} ticks of {ladder.tick} ms = {bits} in binary"
    drawn += [
        f'<rect class="broker" {inside}/>',
        _text((first + last) / 2, 38, "RabbitMQ", "title"),
        _text((first + last) / 2, _HEIGHT - 28, said, "code"),
    ]
    size = f'width="{_WIDTH}" height="{_HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" {size}>'
    ground = f'<rect class="ground" {size} rx="6"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>{ground}", *drawn, "</svg>\n"])


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'
