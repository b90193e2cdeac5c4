"""Purpose: a table of the names that a page documents, each with one sentence.

A page lists the names for the site, as directives of autodoc in a comment `<!-- site`. On a code
host, which shows no directives, the table stands in their place.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import FunctionType
from typing import Any

from .markdown import first_sentence, table

ROOT = Path(__file__).parents[2]
_SITE = re.compile(r"^<!-- site\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(
    r"^\.\. (?P<kind>currentmodule|class|auto\w+):: (?P<name>[\w.]+)\n(?P<options>(?:\s+:.*\n)*)",
    re.MULTILINE,
)


def api(_: list[str], before: str) -> str:
    """Return a table with a row per name, and per method, of the last comment for the site.

    :raises ValueError: if there is no such comment.
    """
    comments = _SITE.findall(before)
    if not comments:
        raise ValueError("no comment `<!-- site` lists what this table is of")
    module: Any = None
    rows: list[tuple[str, str]] = []
    for entry in _ENTRY.finditer(comments[-1]):
        if entry["kind"] == "currentmodule":
            module = importlib.import_module(entry["name"])
        elif entry["kind"] != "automodule":
            rows += _rows(module, entry["name"], entry["options"])
    return table(("Name", "What it is"), rows)


def _rows(module: Any, name: str, options: str) -> list[tuple[str, str]]:
    value = getattr(module, name)
    said = _of_data(module, name) if not callable(value) else first_sentence(value.__doc__)
    if not said:
        raise ValueError(f"{name} has no docstring")
    source = value if callable(value) else module
    link = Path(str(inspect.getsourcefile(source))).relative_to(ROOT).as_posix()
    rows = [(f"[`{name}`](../../{link})", said)]
    if inspect.isclass(value) and not issubclass(value, Exception):
        rows += [
            (f"`{name}.{each}`", first_sentence(inspect.getdoc(getattr(value, each))))
            for each in _members(value, options)
        ]
    return rows


def _members(value: type, options: str) -> list[str]:
    if ":no-members:" in options or not value.__doc__:
        return []
    if named := re.search(r":members: (.+)", options):
        return [each.strip() for each in named[1].split(",")]
    methods = (classmethod, staticmethod, property, FunctionType)
    return [
        name
        for name, member in vars(value).items()
        if isinstance(member, methods) and not name.startswith("_")
    ]


def _of_data(module: Any, name: str) -> str:
    """Return the comment above a value, as autodoc reads it."""
    lines = inspect.getsource(module).splitlines()
    at = next(number for number, line in enumerate(lines) if re.match(rf"{name}\b", line))
    words: list[str] = []
    while lines[at - 1].startswith("#:"):
        at -= 1
        words.insert(0, lines[at].removeprefix("#:"))
    return first_sentence(" ".join(words))
