"""Draw a ladder, and the way of one message down it, from the table that brokers are given. Pure.

Nothing here knows how levels, keys or waits come about: it reads a topology, and asks which of its
bindings match. A change of the topology changes the figure, or is an error.
"""

from __future__ import annotations

from dataclasses import replace
from html import escape

from kombu_binary_delay.model.address import Destination
from kombu_binary_delay.model.parts import Binding, Part
from kombu_binary_delay.model.simulate import matches_topic, walk
from kombu_binary_delay.model.topology import Topology

from .graph import human

WIDTH = 760
ADDRESS_X, EXCHANGE_X, QUEUE_X, TIME_X = 14, 186, 470, 636
BOX_WIDTH, BOX_HEIGHT = 150, 46
TOP, ROW, NEXT = 24, 104, 58
ENTRY = 60  # pixels above the level where the message enters, for what is said of it

#: Literal colours, since not everything that draws SVG knows variables; a dark page has its own.
STYLE = """
.ladder { font: 13px sans-serif; fill: #222; }
.ladder .title { font-weight: 600; }
.ladder .note, .ladder .key { font-size: 12px; fill: #666; }
.ladder .key, .ladder .address { font-family: monospace; }
.ladder .address .read { fill: #0a4bff; font-weight: 700; }
.ladder .address .done { opacity: .4; }
.ladder rect { fill: #f6f6f6; stroke: #ccc; stroke-width: 1.5; }
.ladder .ground { fill: #fff; stroke: none; }
.ladder path { fill: none; stroke: #888; stroke-width: 1.25; opacity: .55; }
.ladder path.dashed { stroke-dasharray: 4 4; }
.ladder marker path { fill: #888; stroke: none; opacity: 1; }
.ladder .hot rect, .ladder .hot path { stroke: #0a4bff; stroke-width: 2.25; opacity: 1; }
.ladder .hot .key, .ladder #ladder-head-hot path { fill: #0a4bff; }
@media (prefers-color-scheme: dark) {
.ladder { fill: #ddd; }
.ladder .note, .ladder .key { fill: #a4a9b0; }
.ladder .address .read { fill: #6ea8ff; }
.ladder rect { fill: #262a30; stroke: #4a5058; }
.ladder .ground { fill: #1b1e22; }
.ladder .hot rect, .ladder .hot path { stroke: #6ea8ff; }
.ladder .hot .key, .ladder #ladder-head-hot path { fill: #6ea8ff; }
}
"""


def svg(topology: Topology, delay: int, queue: str) -> str:
    """Draw a ladder, and a message to ``queue`` delayed by ``delay`` ms, rounded up to ticks.

    :raises DelayError: where the delay is out of the ladder's range.
    """
    return _Figure(topology, delay, queue).svg()


class _Figure:
    """One level, or the delivery exchange, per row: address, exchange, queue and times."""

    def __init__(self, topology: Topology, delay: int, queue: str) -> None:
        self.topology, self.queue = topology, queue
        # The exchange that leads straight to queues is the alternate of the delivery exchange: to
        # the eye, they are one.
        straight = topology.to_queue(queue).bindings
        last = (replace(each, source=topology.delivery) for each in straight)
        self.part = topology.whole + Part(bindings=tuple(last))
        self.below = {
            each.name: (each.wait, str(dict(each.arguments)["x-dead-letter-exchange"]))
            for each in self.part.queues
            if each.wait is not None
        }
        levels = range(topology.ladder.levels - 1, -2, -1)
        self.level = {topology.level_name(level): level for level in levels}
        self.hot: list[str] = []
        self.cool: list[str] = []

        digits = topology.ladder.digits(delay)
        self.delay = topology.ladder.delay(digits)
        self.key = topology.address(digits, Destination("", queue))
        self.entry_exchange = topology.entry_exchange(digits)
        self.highest = topology.level_of(digits)
        self.near: dict[str, set[str]] = {}
        self.y, self.queue_y = self._places()
        self.taken, self.times = self._follow()

    def _places(self) -> tuple[dict[str, int], dict[str, int]]:
        """Give each level a row, and each of its queues a place in it, one below the other."""
        exchanges: dict[str, int] = {}
        queues: dict[str, int] = {}
        y = TOP
        for exchange in self.level:
            # With skip bindings, a queue is reached from every level above it as well.
            waiting = [
                each.destination
                for each in self.part.bindings
                if each.to_queue
                and each.source == exchange
                and (
                    each.destination not in self.below
                    or self.below[each.destination][1] == self._under(exchange)
                )
            ]
            if exchange == (
                self.entry_exchange if self.entry_exchange in self.level else self.highest
            ):
                y += ENTRY
            exchanges[exchange] = y
            queues |= {name: y + NEXT * place for place, name in enumerate(waiting)}
            self.near[exchange] = {*waiting, self._under(exchange)}
            y += ROW + NEXT * max(len(waiting) - 1, 0)
        return exchanges, queues

    def _under(self, exchange: str) -> str:
        level = self.level[exchange]
        return self.topology.level_name(level - 1) if level >= 0 else ""

    def _follow(self) -> tuple[dict[str, Binding], dict[str, tuple[int, int]]]:
        """Return the binding taken at each exchange, and from when to when a queue is waited in."""
        taken: dict[str, Binding] = {}
        times: dict[str, tuple[int, int]] = {}
        now, exchange = 0, self.entry_exchange
        while exchange in self.y or exchange == self.entry_exchange:
            (binding,) = (
                each
                for each in self.part.bindings
                if each.source == exchange
                and (exchange not in self.y or matches_topic(each.key, self.key))
            )
            if exchange in self.y:
                taken[exchange] = binding
            exchange = binding.destination
            if binding.to_queue and exchange in self.below:
                wait, below = self.below[exchange]
                times[exchange] = (now, now + wait)
                now, exchange = now + wait, below
            elif binding.to_queue:
                break
        way = walk(self.part, self.entry_exchange, self.key)
        if not now == way.total == self.delay or way.arrived != {self.queue}:
            raise ValueError(f"{self.key} waits {way.total} ms, arrives in {sorted(way.arrived)}")
        return taken, times

    def svg(self) -> str:
        for exchange, y in self.y.items():
            self._draw_exchange(exchange, y)
        for queue in self.queue_y:
            if queue in self.below:
                self._draw_waiting(queue)
        for binding in self.part.bindings:
            if binding.source in self.y:
                self._draw_binding(binding)
        self._draw_entry()
        height = self._draw_parking()
        size = f'width="{WIDTH}" height="{height}"'
        place = f'viewBox="0 0 {WIDTH} {height}" {size} role="img"'
        lines = [
            f'<svg class="ladder" {place} xmlns="http://www.w3.org/2000/svg">',
            f"<title>The way of a message with the routing key {escape(self.key)}</title>",
            f"<style>{STYLE}</style><defs>{_head('cool')}{_head('hot')}</defs>",
            # With a ground of its own, the figure can be read on any page.
            f'<rect class="ground" {size} rx="6"/>',
            f'<g class="cool">{"".join(self.cool)}</g>',
            # What is on the way lies above all else.
            f'<g class="hot">{"".join(self.hot)}</g></svg>',
        ]
        return "\n".join(lines)

    def _draw_entry(self) -> None:
        said = f"publish, delayed by {human(self.delay)}"
        if self.entry_exchange in self.y:
            x, y = EXCHANGE_X + BOX_WIDTH / 2, self.y[self.entry_exchange]
            way = f"V{y - 3}"
        else:
            # By an exchange of its own, which is not drawn, into the queue of its first digit.
            first = min(self.times, key=lambda queue: self.times[queue])
            x, y = QUEUE_X + BOX_WIDTH / 2, self.y[self.highest]
            middle = self.queue_y[first] + BOX_HEIGHT / 2
            way = f"H{QUEUE_X - 16} V{middle} H{QUEUE_X - 3}"
        self._text(x, y - 58, said, "title", "middle")
        self._text(x, y - 40, self.key, "key", "middle", hot=True)
        self._arrow(f"M{x} {y - 34} {way}", hot=True)

    def _draw_exchange(self, exchange: str, y: int) -> None:
        hot = exchange in self.taken
        self._box(EXCHANGE_X, y, self._short(exchange), "exchange", hot=hot, round_=BOX_HEIGHT // 2)
        if hot:
            self._draw_address(exchange, y)

    def _draw_address(self, exchange: str, y: int) -> None:
        words = self.key.split(".")
        done = {at for each in self.taken if self.y[each] < y for at in self._read(each)}
        spans = []
        for position, word in enumerate(words):
            is_read = position in self._read(exchange)
            kind = "read" if is_read else "done" if position in done else ""
            spans.append(f'<tspan class="{kind}">{escape(word)}</tspan>')
        text = f'<text class="address" x="{ADDRESS_X}" y="{y + BOX_HEIGHT / 2 + 4}">'
        self.cool.append(f"{text}{'.'.join(spans)}</text>")

    def _read(self, exchange: str) -> set[int]:
        """Return the words of the key that the message's binding at an exchange looks at."""
        words, pattern = self.key.split("."), self.taken[exchange].key.split(".")
        if pattern[0] == "#":
            return set(range(len(words) - len(pattern) + 1, len(words)))
        return {at for at, word in enumerate(pattern) if word not in ("*", "#")}

    def _draw_binding(self, binding: Binding) -> None:
        hot = self.taken.get(binding.source) == binding
        y = self.y[binding.source]
        near = self.near[binding.source]
        if not hot and binding.destination not in near:
            # On a ladder with skip bindings, they would hide each other.
            return
        if not binding.to_queue:
            x, low = EXCHANGE_X + 42, y + BOX_HEIGHT
            self._arrow(f"M{x} {low} V{self.y[binding.destination] - 3}", hot=hot)
            self._text(x - 8, low + 31, binding.key, "key", "end", hot=hot)
            return
        x, middle, to_y = (
            EXCHANGE_X + BOX_WIDTH,
            y + BOX_HEIGHT / 2,
            self.queue_y[binding.destination],
        )
        to_middle = to_y + BOX_HEIGHT / 2
        bend = "" if to_y == y else f"H{x + 22} V{to_middle} "
        self._arrow(f"M{x} {middle} {bend}H{QUEUE_X - 3}", hot=hot)
        label_y = to_middle + (-7 if binding.destination in near else 16)
        self._text((x + QUEUE_X) / 2, label_y, binding.key, "key", "middle", hot=hot)
        if binding.destination not in self.below:
            self._box(QUEUE_X, to_y, binding.destination, "the destination", hot=hot)
            self._text(TIME_X, to_middle + 4, f"at {human(self.delay)}", "title")

    def _draw_waiting(self, queue: str) -> None:
        hot = queue in self.times
        y = self.queue_y[queue]
        wait, below = self.below[queue]
        self._box(QUEUE_X, y, human(wait), self._short(queue), hot=hot)
        if hot:
            begin, end = map(human, self.times[queue])
            self._text(TIME_X, y + BOX_HEIGHT / 2 + 4, f"{begin} to {end}", "title")
        x, to_x, to_y = QUEUE_X + BOX_WIDTH / 2, EXCHANGE_X + BOX_WIDTH - 18, self.y[below]
        low = y + BOX_HEIGHT
        last = max(place for name, place in self.queue_y.items() if place < to_y)
        if y == last:
            self._arrow(f"M{x} {low} C{x} {low + 42} {to_x} {to_y - 48} {to_x} {to_y - 3}", hot=hot)
            self._text(x + 8, low + 18, "expires", "note")
            return
        # Around the queues below it.
        x, middle = QUEUE_X + BOX_WIDTH, y + BOX_HEIGHT / 2
        self._arrow(f"M{x} {middle} h8 V{to_y - 26} H{to_x} V{to_y - 3}", hot=hot)

    def _draw_parking(self) -> int:
        last = self.y[self.topology.delivery]
        if not self.topology.parking:
            return last + ROW
        x, y = EXCHANGE_X + BOX_WIDTH / 2, last + ROW - 22
        middle = y + BOX_HEIGHT / 2
        self._arrow(f"M{x} {last + BOX_HEIGHT} V{middle} H{QUEUE_X - 3}", kind="dashed")
        self._text((x + BOX_WIDTH / 2 + QUEUE_X) / 2, middle - 7, "no binding", "note", "middle")
        self._box(QUEUE_X, y, self._short(self.topology.parking), "what finds no way")
        return y + BOX_HEIGHT + 10

    def _short(self, name: str) -> str:
        for prefix in (f"{self.topology.prefix}.", f"{self.topology.delivery_prefix}."):
            name = name.removeprefix(prefix)
        return name

    # -- shapes ----------------------------------------------------------------------------

    def _add(self, svg: str, *, hot: bool) -> None:
        (self.hot if hot else self.cool).append(svg)

    def _arrow(self, path: str, *, hot: bool = False, kind: str = "") -> None:
        head = "hot" if hot else "cool"
        svg = f'<path class="{kind}" d="{path}" marker-end="url(#ladder-head-{head})"/>'
        self._add(svg, hot=hot)

    def _text(  # noqa: PLR0913 - as many as a text in SVG has
        self, x: float, y: float, text: str, kind: str, anchor: str = "start", *, hot: bool = False
    ) -> None:
        svg = f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
        self._add(svg, hot=hot)

    def _box(  # noqa: PLR0913 - as many as a box has
        self, x: int, y: int, title: str, note: str, *, hot: bool = False, round_: int = 5
    ) -> None:
        size = f'width="{BOX_WIDTH}" height="{BOX_HEIGHT}"'
        self._add(f'<rect x="{x}" y="{y}" {size} rx="{round_}"/>', hot=hot)
        self._text(x + BOX_WIDTH / 2, y + 20, title, "title", "middle", hot=hot)
        self._text(x + BOX_WIDTH / 2, y + 37, note, "note", "middle", hot=hot)


def _head(kind: str) -> str:
    size = 'viewBox="0 0 8 8" refX="6" refY="4" markerWidth="9" markerHeight="9"'
    place = 'markerUnits="userSpaceOnUse" orient="auto"'
    return f'<marker id="ladder-head-{kind}" {size} {place}><path d="M0 0 8 4 0 8z"/></marker>'
