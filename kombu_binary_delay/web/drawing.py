"""Format values for pages: times, durations, counts, names, and a ladder's levels. Pure."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from kombu_binary_delay import operate
from kombu_binary_delay.ladder.durations import ahead, human
from kombu_binary_delay.operate.text import plain

_WIDEST = 100.0  # of a bar, in the units of its drawing


def moment(milliseconds: float | None) -> Markup | str:
    """Return a time in UTC; the page's script shows it in the reader's zone, with UTC beside."""
    if milliseconds is None:
        return "not known"
    try:
        at = datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{milliseconds} ms since 1970"
    written = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return Markup('<time datetime="{}">{} UTC</time>').format(written, f"{at:%Y-%m-%d %H:%M:%S}")


def sentence(text: str) -> str:
    """Return a text as a sentence: with a capital letter, and one full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def effect(causes: str) -> str:
    """Return what a difference causes as a sentence."""
    nothing, _, why = causes.partition("nothing: ")
    return sentence(why if why and not nothing else causes)


@dataclass(frozen=True)
class Rung:
    """One level of a ladder: the waits of its queues in ms, and how full it is.

    ``bar`` is its share of the fullest level, from 0 to 100.
    """

    name: str
    shortest: int
    longest: int
    messages: int
    leaving: int
    bar: float


def rungs(ladder: operate.LadderStatus) -> list[Rung]:
    """Return the queues of a ladder grouped by level, the longest waits first."""
    levels: dict[str, list[operate.Waiting]] = {}
    for queue in ladder.queues:
        name = "others" if queue.level is None else f"level {queue.level}"
        levels.setdefault(name, []).append(queue)
    fullest = max(
        (sum(queue.messages for queue in queues) for queues in levels.values()), default=0
    )
    drawn = []
    for name, queues in levels.items():
        messages = sum(queue.messages for queue in queues)
        bar = max(_WIDEST * messages / fullest, 2.0) if messages else 0.0
        waits = [queue.wait for queue in queues]
        leaving = sum(queue.leaving for queue in queues)
        drawn.append(Rung(name, min(waits), max(waits), messages, leaving, round(bar, 1)))
    return sorted(drawn, key=lambda rung: -rung.longest)


def environment() -> Environment:
    """Return the template environment, which escapes all values."""
    made = Environment(
        loader=PackageLoader("kombu_binary_delay.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    filters: dict[str, Any] = {
        "moment": moment,
        "human": human,
        "ahead": lambda due: ahead(due - time.time() * 1000),
        "visible": plain,
        "exactly": lambda name: f'"{name}"',
        "sentence": sentence,
        "effect": effect,
        "count": lambda number: f"{number:,}",
        "rungs": rungs,
    }
    made.filters.update(filters)
    return made


def _finalize(value: Any) -> Any:
    """Return a value with :func:`plain` applied, in case the template does not."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else escape(value)
