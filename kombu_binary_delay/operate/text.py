"""Untrusted text for people to read, on a terminal, a page or in a log. Pure."""

from __future__ import annotations


def plain(value: object) -> str:
    """Return a text on one line, without what controls a terminal, hides or turns other text."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "replace").decode()
        for each in str(value)
    )
