"""Purpose: a list of the names that a page documents, each with one sentence.

The comment before the list names them: a module, then names that it exports, with ``+`` if the site
is to show the methods of a class as well, or ``+METHOD`` for one of them. The site has directives
of autodoc in place of the list, which is for code hosts.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from .markdown import first_sentence

ROOT = Path(__file__).parents[2]
_LIST = re.compile(r"^<!-- generated: api([^>]*)-->$.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


def api(arguments: list[str], _: str) -> str:
    """Return a list of names."""
    return "\n".join(_line(module, name) for module, name, _ in _named(arguments))


def for_the_site(page: str) -> str:
    """Return a page with directives of autodoc in place of its lists."""

    def directives(part: re.Match[str]) -> str:
        named = _named([argument.strip() for argument in part[1].split(",")])
        text = "\n".join(_directive(module, name, members) for module, name, members in named)
        return f"```{{eval-rst}}\n{text}```"

    return _LIST.sub(directives, page)


def _named(arguments: list[str]) -> Iterator[tuple[Any, str, str | None]]:
    """Yield modules, names, and the methods to show: None for none, "" for all."""
    module: Any = None
    for argument in arguments:
        if argument.startswith("kombu_binary_delay"):
            module = importlib.import_module(argument)
        else:
            name, plus, members = argument.partition("+")
            yield module, name, members if plus else None


def _directive(module: Any, name: str, members: str | None) -> str:
    value = getattr(module, name)
    options: dict[str, str] = {}
    if not isinstance(value, type):
        kind = "autofunction" if callable(value) else "autodata"
    elif issubclass(value, Exception):
        kind, options = "autoexception", {"show-inheritance": ""}
    else:
        kind = "autoclass"
        if members is None:
            options = {"no-members": ""}
        else:
            options = {"members": members}
            if is_dataclass(value):
                # The docstring of the class describes them.
                options["exclude-members"] = ", ".join(field.name for field in fields(value))
    lines = "".join(f"   :{option}: {value}".rstrip() + "\n" for option, value in options.items())
    return f".. {kind}:: {module.__name__}.{name}\n{lines}"


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
