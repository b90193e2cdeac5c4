"""Rewrite the broker's names for formats that allow fewer characters. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


def shorten(text: str, name: str, longest: int) -> str:
    """Return a text cut to at most ``longest`` characters, ending in a digest of the whole name."""
    end = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{text[: longest - 9]}-{end}"


def number(names: Iterable[str]) -> dict[str, str]:
    """Return a short identifier for each name, in the order of the names: ``n0``, ``n1``."""
    return {name: f"n{count}" for count, name in enumerate(dict.fromkeys(names))}
