"""Untrusted text for people to read, on a terminal, a page or in a log. Pure."""

from __future__ import annotations


def plural(number: int, word: str) -> str:
    """Return a number with its word: ``1 message``, ``1,204 messages``."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def plain(value: object) -> str:
    """Return a text on one line, without what controls a terminal, hides or turns other text."""
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape", "replace").decode()
        for sign in str(value)
    )
