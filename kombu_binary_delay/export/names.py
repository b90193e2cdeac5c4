"""Rewrite the broker's names for formats that allow fewer characters. Pure."""

from __future__ import annotations

import re
from hashlib import blake2b

#: Control characters, and others that XML does not allow.
_NOT_SHOWN = re.compile("[\x00-\x1f\ufffe\uffff]")


def shown(text: str) -> str:
    """Return a text with a replacement for each character that a drawing cannot have."""
    return _NOT_SHOWN.sub("\N{REPLACEMENT CHARACTER}", text)


def shorten(text: str, name: str, longest: int) -> str:
    """Return a text cut to at most ``longest`` characters, ending in a digest of the whole name."""
    end = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{text[: longest - 9]}-{end}"
