"""Shorten texts that are too long for their place in a figure. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kombu_binary_delay.ladder.durations import human

_GAP = "\N{HORIZONTAL ELLIPSIS}"


def cut(text: str, most: int) -> str:
    """Return a text, without its end if it has more than ``most`` characters."""
    return text if len(text) <= most else text[: most - 1] + _GAP


def shorten_key(key: str, most: int) -> str:
    """Return a key without words after the first: ``*.*.*.*.*.01.#`` becomes ``*…*.01.#``."""
    if len(key) <= most:
        return key
    first, *rest = key.split(".")
    tail: list[str] = []
    while rest and len(first + _GAP + ".".join([rest[-1], *tail])) <= most:
        tail.insert(0, rest.pop())
    return first + _GAP + ".".join(tail) if tail else cut(key, most)


def shorten_words(words: Sequence[str], kinds: Sequence[str], most: int) -> list[tuple[str, str]]:
    """Return the words that fit: words that are not of the kind "read" are left out first.

    :param kinds: one for each word.
    :returns: texts with their kinds, with dots and gaps, together no longer than ``most``.
    """
    # The words of the kind "read", the last first; then those close to them.
    read = [at for at in reversed(range(len(words))) if kinds[at] == "read"]
    others = sorted(
        (at for at in range(len(words)) if kinds[at] != "read"),
        key=lambda at: min((abs(at - place) for place in read), default=-at),
    )
    kept: set[int] = set()
    for at in (*read, *others):
        if _length(_joined(words, kinds, kept | {at})) <= most:
            kept.add(at)
        elif kinds[at] != "read":
            break
    # Between gaps, an empty word is only a dot.
    kept -= {at for at in kept if not words[at] and not {at - 1, at + 1} <= kept}
    # A queue's name may be of any length.
    return _joined(words, kinds, kept) if kept else [(cut(words[-1], most), kinds[-1])]


def _joined(words: Sequence[str], kinds: Sequence[str], kept: set[int]) -> list[tuple[str, str]]:
    joined: list[tuple[str, str]] = []
    for at, (word, kind) in enumerate(zip(words, kinds, strict=True)):
        if at in kept:
            dot = "." if at - 1 in kept else ""
            joined += [(dot, ""), (word, kind)]
        elif at - 1 in kept or not joined:
            joined.append((_GAP, kind))
        elif kind == "read":
            # A gap that contains a word of the kind "read" has that style.
            joined[-1] = (_GAP, kind)
    return [text for text in joined if text[0]]


def _length(joined: Sequence[tuple[str, str]]) -> int:
    return sum(len(text) for text, _ in joined)


def range_of(milliseconds: Sequence[int]) -> str:
    """Return the smallest and the greatest of some times as text."""
    least, most = human(min(milliseconds)), human(max(milliseconds))
    return least if least == most else f"{least} to {most}"
