"""Purpose: a list of the names that a page documents, each with one sentence.

A page lists the names for the site, as directives of autodoc in a comment `<!-- site`. On a code
host, which shows no directives, the list stands in their place.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from .markdown import first_sentence

ROOT = Path(__file__).parents[2]
_SITE = re.compile(r"^<!-- site\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(
    r"^\.\. (?P<kind>currentmodule|class|auto\w+):: (?P<name>[\w.]+)\n", re.MULTILINE
)


def api(_: list[str], before: str) -> str:
    """Return a list of the names in the last comment for the site.

    :raises ValueError: if there is no such comment.
    """
    comments = _SITE.findall(before)
    if not comments:
        raise ValueError("no comment `<!-- site` names what to list")
    module: Any = None
    lines: list[str] = []
    for entry in _ENTRY.finditer(comments[-1]):
        if entry["kind"] == "currentmodule":
            module = importlib.import_module(entry["name"])
        elif entry["kind"] != "automodule":
            lines.append(_line(module, entry["name"]))
    return "\n".join(lines)


def _line(module: Any, name: str) -> str:
    value = getattr(module, name)
    said = _of_data(module, name) if not callable(value) else first_sentence(value.__doc__)
    if not said:
        raise ValueError(f"{name} has no docstring")
    source = value if callable(value) else module
    link = Path(str(inspect.getsourcefile(source))).relative_to(ROOT).as_posix()
    return f"- [`{name}`](../../{link}): {said}"


def _of_data(module: Any, name: str) -> str:
    """Return the comment above a value, as autodoc reads it."""
    lines = inspect.getsource(module).splitlines()
    at = next(number for number, line in enumerate(lines) if re.match(rf"{name}\b", line))
    words: list[str] = []
    while lines[at - 1].startswith("#:"):
        at -= 1
        words.insert(0, lines[at].removeprefix("#:"))
    return first_sentence(" ".join(words))
