"""Purpose: tables and docstrings as the Markdown that code hosts and Sphinx both show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, text: int | None = None) -> str:
    """Return a table. Cells are Markdown already, except for ``|``, which ends a cell.

    :param text: how many columns are text; the others are numbers, aligned to the right. None for
        all of them.
    """
    rules = ["---" if text is None or column < text else "--:" for column in range(len(head))]
    lines = [head, rules, *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def plain(text: str) -> str:
    """Return plain text as Markdown that shows it literally."""
    return re.sub(r"([*`_\\])", r"\\\1", text)


def from_docstring(text: str) -> str:
    """Return a part of a docstring on one line, with its literals and references as code."""
    text = re.sub(r":\w+(?::\w+)?:`[~.]?([^`]+)`", r"`\1`", text)
    return " ".join(text.replace("``", "`").split())


def first_sentence(docstring: str | None) -> str:
    """Return the first sentence of a docstring; "" if there is none."""
    paragraph = (docstring or "").strip().partition("\n\n")[0]
    sentence = re.match(r".*?\.(?=\s+[A-Z`]|\s*$)|.*", from_docstring(paragraph))
    return sentence[0] if sentence else ""
