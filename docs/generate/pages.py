"""Purpose: replace the generated parts of a page, and nothing else.

Such a part is between ``<!-- generated: NAME ARGUMENT, ARGUMENT -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_PART = re.compile(
    r"(?P<begin><!-- generated: (?P<name>[\w-]+)(?P<arguments>[^>]*?) -->\n)"
    r".*?"
    r"(?P<end>^<!-- end -->$)",
    re.MULTILINE | re.DOTALL,
)

#: Returns Markdown from the arguments and the page's text before the part.
Maker = Callable[[list[str], str], str]


def fill(page: str, makers: Mapping[str, Maker]) -> str:
    """Return a page with all its generated parts replaced.

    :raises ValueError: if a part has no end, or an unknown name.
    """
    if page.count("<!-- generated: ") != len(_PART.findall(page)):
        raise ValueError("a generated part has no line `<!-- end -->`")

    def made(part: re.Match[str]) -> str:
        if part["name"] not in makers:
            raise ValueError(f"nothing makes {part['name']!r}; there are {', '.join(makers)}")
        arguments = [
            argument.strip() for argument in part["arguments"].split(",") if argument.strip()
        ]
        text = makers[part["name"]](arguments, page[: part.start()])
        return f"{part['begin']}\n{text.strip()}\n\n{part['end']}"

    return _PART.sub(made, page)
