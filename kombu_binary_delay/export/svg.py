"""Draw a ladder, and the route of one message down it, from the topology. Pure.

Nothing here computes levels, keys or waits: it reads a topology, and asks which of its bindings
match. A change of the topology changes the figure, or raises an error.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, replace

from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.durations import human
from kombu_binary_delay.ladder.parts import Binding, Part
from kombu_binary_delay.ladder.simulate import matches_topic, walk
from kombu_binary_delay.ladder.topology import Topology

from .brief import cut, range_of, shorten_key, shorten_words
from .names import shown

WIDTH = 760
#: The greatest height of the figure: one printed page, of A4 or letter paper. Levels that do not
#: fit are folded.
PAGE = 1005
ADDRESS_X, EXCHANGE_X, QUEUE_X, TIME_X = 14, 186, 470, 636
BOX_WIDTH, BOX_HEIGHT, FOLD_WIDTH = 150, 42, 220
TOP, ROW, FOLD_ROW, NEXT = 30, 90, 88, 50
#: Pixels for the box of the publisher: its row, and what is below a level that has queues.
ENTRY, BELOW_QUEUES = 88, 26
#: From a box's left side, where a way comes from the level above: past it, and by expiry.
PASS, EXPIRE = 42, BOX_WIDTH - 18
#: How many characters of the fixed-width font fit: an address, and keys at bindings and above all.
ADDRESS, KEY, PASS_KEY, WHOLE_KEY = 19, 13, 10, 56

#: Literal colours, because not every SVG renderer knows variables; a dark page has other colours.
STYLE = """
.ladder { font: 13px sans-serif; fill: #222; }
.ladder .title { font-weight: 600; }
.ladder .note, .ladder .key { font-size: 12px; fill: #5c5c5c; }
.ladder .key, .ladder .address { font-family: monospace; }
.ladder .address .read { fill: #0a4bff; font-weight: 700; }
.ladder .address .done { fill: #999; }
.ladder rect { fill: #f6f6f6; stroke: #ccc; stroke-width: 1.5; }
.ladder .ground { fill: #fff; stroke: none; }
.ladder path { fill: none; stroke: #888; stroke-width: 1.25; opacity: .55; }
.ladder path.dashed { stroke-dasharray: 4 4; }
.ladder marker path { fill: #888; stroke: none; opacity: 1; }
.ladder .hot rect, .ladder .hot path { stroke: #0a4bff; stroke-width: 2.25; opacity: 1; }
.ladder .hot .key, .ladder #ladder-head-hot path { fill: #0a4bff; }
@media print { .ladder:root { width: 100vw; height: 100vh; } }
@media screen and (prefers-color-scheme: dark) {
.ladder { fill: #ddd; }
.ladder .note, .ladder .key { fill: #a4a9b0; }
.ladder .address .read { fill: #6ea8ff; }
.ladder .address .done { fill: #757c86; }
.ladder rect { fill: #262a30; stroke: #59616b; }
.ladder path { stroke: #b4bac2; }
.ladder marker path { fill: #b4bac2; }
.ladder .ground { fill: #1b1e22; }
.ladder .hot rect, .ladder .hot path { stroke: #6ea8ff; }
.ladder .hot .key, .ladder #ladder-head-hot path { fill: #6ea8ff; }
}
"""


def svg(topology: Topology, delay: int, queue: str) -> str:
    """Return a figure of a ladder, and of a message to ``queue`` with a delay, as SVG.

    If the whole ladder does not fit on a page, neighbouring levels in which the message does not
    wait become one box; if that is not enough, other levels show only the queue in which it waits.

    :param delay: in milliseconds; rounded up to ticks.
    :raises DelayError: if the delay is out of the ladder's range.
    """
    figures = (_Figure(topology, delay, queue, detail=detail) for detail in _DETAILS)
    fits = next((figure for figure in figures if figure.height <= PAGE), None)
    return (fits or _Figure(topology, delay, queue, detail=_DETAILS[-1])).svg()


#: All of the ladder, folded levels, and folded levels with one queue each.
_DETAILS = (0, 1, 2)


@dataclass(frozen=True)
class _Row:
    """A level and those of its queues that are drawn, or several levels folded into a box.

    :param exchanges: of the levels, highest first.
    :param hidden: the names of queues that are not drawn.
    """

    exchanges: tuple[str, ...]
    queues: tuple[str, ...]
    hidden: tuple[str, ...]

    @property
    def is_fold(self) -> bool:
        return bool(self.hidden) and not self.queues


class _Figure:
    """One level, several folded ones, or the delivery exchange, per row."""

    def __init__(self, topology: Topology, delay: int, queue: str, *, detail: int) -> None:
        self.topology, self.queue, self.detail = topology, queue, detail
        # The exchange that leads directly to queues is the alternate of the delivery exchange: the
        # figure shows both as one.
        straight = topology.to_queue(queue).bindings
        last = (replace(binding, source=topology.delivery) for binding in straight)
        self.part = topology.whole + Part(bindings=tuple(last))
        self.below = {
            queue.name: (queue.wait, str(dict(queue.arguments)["x-dead-letter-exchange"]))
            for queue in self.part.queues
            if queue.wait is not None
        }
        levels = range(topology.ladder.levels - 1, -2, -1)
        self.level = {topology.level_name(level): level for level in levels}
        self.hot: list[str] = []
        self.cool: list[str] = []

        digits = topology.ladder.digits(delay)
        self.delay = topology.ladder.delay(digits)
        self.key = topology.address(digits, Destination("", queue))
        self.entry_exchange = topology.entry_exchange(digits)
        # An entry exchange is not drawn: the message enters by the queue behind it.
        self.enters_queue = self.entry_exchange not in self.level
        self.highest = topology.level_of(digits) if self.enters_queue else self.entry_exchange
        self.taken, self.times = self._follow()
        self.rows = self._rows()
        self.row = {name: row for row in self.rows for name in row.exchanges}
        self.y: dict[str, int] = {}
        self.queue_y: dict[str, int] = {}
        self.height = self._place()

    # -- what is drawn, and where ------------------------------------------------------------

    def _follow(self) -> tuple[dict[str, Binding], dict[str, tuple[int, int]]]:
        """Return the binding taken at each exchange, and when the message is in each queue."""
        taken: dict[str, Binding] = {}
        times: dict[str, tuple[int, int]] = {}
        now, exchange = 0, self.entry_exchange
        while exchange in self.level or exchange == self.entry_exchange:
            (binding,) = (
                way
                for way in self.part.bindings
                if way.source == exchange
                and (exchange not in self.level or matches_topic(way.key, self.key))
            )
            if exchange in self.level:
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

    def _rows(self) -> list[_Row]:
        rows: list[_Row] = []
        folded: list[str] = []
        for exchange in self.level:
            queues = self._queues_of(exchange)
            last = exchange == self.topology.delivery
            is_waited_in = last or not self.times.keys().isdisjoint(queues)
            # The levels above the message's entry are separate from those that it passes.
            if is_waited_in or exchange == self.highest or not self.detail:
                rows += self._fold(folded)
                folded = []
            if not is_waited_in and self.detail:
                folded.append(exchange)
                continue
            drawn = [queue for queue in queues if self.detail < 2 or last or queue in self.times]
            hidden = tuple(queue for queue in queues if queue not in drawn)
            rows.append(_Row((exchange,), tuple(drawn), hidden))
        return rows

    def _fold(self, exchanges: list[str]) -> list[_Row]:
        queues = [queue for exchange in exchanges for queue in self._queues_of(exchange)]
        if not exchanges:
            return []
        if len(exchanges) == 1 and self.detail < 2:
            return [_Row(tuple(exchanges), tuple(queues), ())]
        return [_Row(tuple(exchanges), (), tuple(queues))]

    def _queues_of(self, exchange: str) -> list[str]:
        """Return the queues of a level; with skip bindings, other levels also lead to them."""
        return [
            binding.destination
            for binding in self.part.bindings
            if binding.to_queue
            and binding.source == exchange
            and (
                binding.destination not in self.below
                or self.below[binding.destination][1] == self._under(exchange)
            )
        ]

    def _under(self, exchange: str) -> str:
        level = self.level[exchange]
        return self.topology.level_name(level - 1) if level >= 0 else ""

    def _place(self) -> int:
        """Place each row and each of its queues; return the height of the figure in pixels."""
        y, above = TOP, None
        for row in self.rows:
            if self.highest in row.exchanges:
                # The publisher stands beside the levels above, where these have no queues there.
                if above is None:
                    y += ENTRY
                elif above.queues:
                    y += ENTRY + BELOW_QUEUES
            self.y |= dict.fromkeys(row.exchanges, y)
            self.queue_y |= {name: y + NEXT * place for place, name in enumerate(row.queues)}
            y += FOLD_ROW if row.is_fold else ROW + NEXT * max(len(row.queues) - 1, 0)
            above = row
        last = self.y[self.topology.delivery] + (ROW - 22 if self.topology.parking else 0)
        return last + BOX_HEIGHT + 14

    # -- the parts of the figure -------------------------------------------------------------

    def svg(self) -> str:
        """Write the figure."""
        for row in self.rows:
            if row.is_fold:
                self._draw_fold(row)
            else:
                self._draw_exchange(row.exchanges[0])
        for queue in self.queue_y:
            if queue in self.below:
                self._draw_waiting(queue)
        for binding in self.part.bindings:
            if binding.source in self.row:
                self._draw_binding(binding)
        self._draw_entry()
        self._draw_parking()
        size = f'width="{WIDTH}" height="{self.height}"'
        view = f'viewBox="0 0 {WIDTH} {self.height}" {size} role="img"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="ladder" {view}>',
            f"<title>A message with the routing key {_xml(self.key)}</title>",
            f"<style>{STYLE}</style><defs>{_head('cool')}{_head('hot')}</defs>",
            # With a background, the figure can be read on any page.
            f'<rect class="ground" {size} rx="6"/>',
            f'<g class="cool">{"".join(self.cool)}</g>',
            # The message's route is drawn above all else.
            f'<g class="hot">{"".join(self.hot)}</g></svg>',
        ]
        return "\n".join(lines)

    def _draw_entry(self) -> None:
        y = self.y[self.highest] - ENTRY
        if self.enters_queue:
            # By an entry exchange, which is not drawn, into the queue of its first digit.
            first = min(self.times, key=lambda queue: self.times[queue])
            x = QUEUE_X
            way = f"M{x + BOX_WIDTH / 2} {y + BOX_HEIGHT} V{self.queue_y[first] - 3}"
            if self.queue_y[first] != self.y[self.highest]:
                # Past the queues that are before it in its level.
                side, middle = x - 10, self.queue_y[first] + BOX_HEIGHT / 2
                way = f"M{x} {y + BOX_HEIGHT / 2} H{side} V{middle} H{x - 3}"
        elif self.row[self.highest] == self.rows[0]:
            x = EXCHANGE_X
            way = f"M{x + PASS} {y + BOX_HEIGHT} V{self.y[self.highest] - 3}"
        else:
            x, to_y = ADDRESS_X, self.y[self.highest]
            way = f"M{x + 75} {y + BOX_HEIGHT} V{to_y - 24} H{EXCHANGE_X + 18} V{to_y - 3}"
        self._box(x, y, "publish", f"delayed by {human(self.delay)}", hot=True)
        anchor, at = ("middle", x + BOX_WIDTH / 2) if self.enters_queue else ("start", x)
        key = shorten_key(self.key, WHOLE_KEY)
        self._text(at, y - 9, key, "key", anchor, hot=True)
        self._arrow(way, hot=True)

    def _draw_exchange(self, exchange: str) -> None:
        y, hot = self.y[exchange], exchange in self.taken
        self._box(EXCHANGE_X, y, self._short(exchange), "exchange", hot=hot, round_=BOX_HEIGHT // 2)
        if hot:
            self._draw_address((exchange,), y)

    def _draw_fold(self, row: _Row) -> None:
        y, hot = self.y[row.exchanges[0]], self._is_hot(row)
        waits = [self.below[queue][0] for queue in row.hidden if queue in self.below]
        count, [first, *_] = len(row.exchanges), row.exchanges
        title = f"{count} more levels" if count > 1 else self._short(first)
        note = f"waits {range_of(waits)}"
        for depth in (6, 3) if count > 1 else ():
            size = f'width="{FOLD_WIDTH}" height="{BOX_HEIGHT}" rx="{BOX_HEIGHT // 2}"'
            self._add(f'<rect x="{EXCHANGE_X + depth}" y="{y + depth}" {size}/>', hot=hot)
        self._box(EXCHANGE_X, y, title, note, hot=hot, round_=BOX_HEIGHT // 2, width=FOLD_WIDTH)
        if hot:
            self._draw_address(row.exchanges, y)
            return
        # Those of the queues in the box.
        x, low = EXCHANGE_X + EXPIRE, y + BOX_HEIGHT + 6
        self._arrow(f"M{x} {low} V{self.y[self._under(row.exchanges[-1])] - 3}")
        self._text(x + 8, low + 20, "expires", "note")

    def _is_hot(self, row: _Row) -> bool:
        return any(exchange in self.taken for exchange in row.exchanges)

    def _draw_address(self, exchanges: tuple[str, ...], y: int) -> None:
        words = self.key.split(".")
        read = {
            at for exchange in exchanges if exchange in self.taken for at in self._read(exchange)
        }
        done = {
            at for exchange in self.taken if self.y[exchange] < y for at in self._read(exchange)
        }
        if self.enters_queue:
            # The publisher has read the first digit, which is the last of the key's.
            done.add(len(self.topology.ladder.digits(self.delay)) - 1)
        kinds = ["read" if at in read else "done" if at in done else "" for at in range(len(words))]
        spans = [
            f'<tspan class="{kind}">{_xml(text)}</tspan>' if kind else _xml(text)
            for text, kind in shorten_words(words, kinds, ADDRESS)
        ]
        place = f'x="{ADDRESS_X}" y="{y + BOX_HEIGHT / 2 + 4:g}"'
        self._add(f'<text class="address" {place}>{"".join(spans)}</text>', hot=False)

    def _read(self, exchange: str) -> set[int]:
        """Return the words of the key that the message's binding at an exchange looks at."""
        words, pattern = self.key.split("."), self.taken[exchange].key.split(".")
        if pattern[0] == "#":
            return set(range(len(words) - len(pattern) + 1, len(words)))
        return {at for at, word in enumerate(pattern) if word not in ("*", "#")}

    def _draw_binding(self, binding: Binding) -> None:
        hot = self.taken.get(binding.source) == binding
        here, under = self.row[binding.source], self._under(binding.source)
        if binding.to_queue:
            near = binding.destination in here.queues
            # On a ladder with skip bindings, they would hide each other.
            if binding.destination in self.queue_y and (hot or near):
                self._draw_to_queue(binding, hot=hot, near=near)
        elif self.row[binding.destination] != here and (
            hot or (binding.destination == under and not (here.is_fold and self._is_hot(here)))
        ):
            self._draw_pass(binding, hot=hot)

    def _draw_pass(self, binding: Binding, *, hot: bool) -> None:
        y, to_y = self.y[binding.source], self.y[binding.destination]
        here = self.row[binding.source]
        low = y + BOX_HEIGHT + (6 if here.is_fold else 0)
        key = shorten_key(binding.key, PASS_KEY)
        places = [self.y[row.exchanges[0]] for row in self.rows]
        if places.index(to_y) - places.index(y) > 1:
            # Past the boxes of the levels between.
            x, from_x = EXCHANGE_X - 12, EXCHANGE_X + 20
            way = f"M{from_x} {low} v12 H{x} V{to_y - 16} H{from_x} V{to_y - 3}"
            self._arrow(way, hot=hot)
            self._text(x - 8, low + 31, key, "key", "end", hot=hot)
            return
        x = EXCHANGE_X + PASS
        self._arrow(f"M{x} {low} V{to_y - 3}", hot=hot)
        self._text(x + 8, low + 20, key, "key", hot=hot)

    def _draw_to_queue(self, binding: Binding, *, hot: bool, near: bool) -> None:
        y, to_y = self.y[binding.source], self.queue_y[binding.destination]
        x, middle, to_middle = EXCHANGE_X + BOX_WIDTH, y + BOX_HEIGHT / 2, to_y + BOX_HEIGHT / 2
        bend = "" if to_y == y else f"H{x + 22} V{to_middle} "
        if self.row[binding.source].is_fold:
            middle, bend = y + BOX_HEIGHT + 6, f"V{to_middle} "
            x += 22
        self._arrow(f"M{x} {middle:g} {bend}H{QUEUE_X - 3}", hot=hot)
        key = shorten_key(binding.key, KEY)
        # Beside the line that leads to the level's other queues.
        centre = (EXCHANGE_X + BOX_WIDTH + 26 + QUEUE_X - 14) / 2
        self._text(centre, to_middle + (-7 if near else 16), key, "key", "middle", hot=hot)
        if binding.destination not in self.below:
            self._box(QUEUE_X, to_y, binding.destination, "the destination", hot=hot)
            self._text(TIME_X, to_middle + 4, f"at {human(self.delay)}", "title")

    def _draw_waiting(self, queue: str) -> None:
        hot = queue in self.times
        y = self.queue_y[queue]
        wait, below = self.below[queue]
        self._box(QUEUE_X, y, human(wait), self._short(queue), hot=hot)
        if hot:
            self._draw_times(queue)
        x, to_x, to_y = QUEUE_X + BOX_WIDTH / 2, EXCHANGE_X + EXPIRE, self.y[below]
        low = y + BOX_HEIGHT
        last = max(place for place in self.queue_y.values() if place < to_y)
        # As close to the queues as it can be: the publisher may stand below them.
        turn = last + BOX_HEIGHT + 28
        if y == last:
            self._arrow(f"M{x} {low} Q{x} {turn} {x - 60} {turn} H{to_x} V{to_y - 3}", hot=hot)
            self._text(x + 8, low + 17, "expires", "note")
            return
        # Around the queues below it.
        x, middle = QUEUE_X + BOX_WIDTH, y + BOX_HEIGHT / 2
        self._arrow(f"M{x} {middle} h8 V{turn} H{to_x} V{to_y - 3}", hot=hot)

    def _draw_times(self, queue: str) -> None:
        y = self.queue_y[queue] + BOX_HEIGHT / 2 + 4
        begin, end = map(human, self.times[queue])
        # A short wait at the end of a long one does not show.
        said = [f"{begin} to {end}" if begin != end else f"at {end}"]
        if len(said[0]) > 14:
            said, y = [begin, f"to {end}"], y - 9
        hidden = next(row.hidden for row in self.rows if queue in row.queues)
        for line in said:
            self._text(TIME_X, y, line, "title")
            y += 17
        if hidden:
            more = "1 more queue" if len(hidden) == 1 else f"{len(hidden)} more queues"
            self._text(TIME_X, y, more, "note")

    def _draw_parking(self) -> None:
        if not self.topology.parking:
            return
        last = self.y[self.topology.delivery]
        x, y = EXCHANGE_X + BOX_WIDTH / 2, last + ROW - 22
        middle = y + BOX_HEIGHT / 2
        self._arrow(f"M{x} {last + BOX_HEIGHT} V{middle} H{QUEUE_X - 3}", kind="dashed")
        self._text((x + BOX_WIDTH / 2 + QUEUE_X) / 2, middle - 7, "no binding", "note", "middle")
        self._box(QUEUE_X, y, self._short(self.topology.parking), "what finds no way")

    def _short(self, name: str) -> str:
        for prefix in (f"{self.topology.prefix}.", f"{self.topology.delivery_prefix}."):
            name = name.removeprefix(prefix)
        # A foreign ladder has other prefixes.
        first = next(iter(self.level))
        return name.removeprefix(first[: first.rfind(".") + 1])

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
        svg = f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{_xml(text)}</text>'
        self._add(svg, hot=hot)

    def _box(  # noqa: PLR0913 - as many as a box has
        self,
        x: int,
        y: int,
        title: str,
        note: str,
        *,
        hot: bool = False,
        round_: int = 5,
        width: int = BOX_WIDTH,
    ) -> None:
        size = f'width="{width}" height="{BOX_HEIGHT}"'
        full = f"<title>{_xml(title)}</title>" if title != cut(title, 17) else ""
        self._add(f'<rect x="{x}" y="{y}" {size} rx="{round_}">{full}</rect>', hot=hot)
        self._text(x + width / 2, y + 18, cut(title, 17), "title", "middle", hot=hot)
        self._text(x + width / 2, y + 34, cut(note, width // 7), "note", "middle", hot=hot)


def _xml(text: str) -> str:
    return html.escape(shown(text))


def _head(kind: str) -> str:
    size = 'viewBox="0 0 8 8" refX="6" refY="4" markerWidth="9" markerHeight="9"'
    place = 'markerUnits="userSpaceOnUse" orient="auto"'
    return f'<marker id="ladder-head-{kind}" {size} {place}><path d="M0 0 8 4 0 8z"/></marker>'
