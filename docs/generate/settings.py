"""Purpose: the settings with their defaults and meanings, from the class's own docstring."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import fields

from kombu_binary_delay import Settings

from .markdown import from_docstring, table

_PARAM = re.compile(r"^:param (\w+):(.*?)(?=^:|\Z)", re.MULTILINE | re.DOTALL)


def settings(_: list[str], __: str) -> str:
    """Return a table with a row for each setting.

    :raises KeyError: if the docstring does not describe a setting.
    """
    meanings = dict(_PARAM.findall(inspect.getdoc(Settings) or ""))
    rows = []
    for field in fields(Settings):
        meaning = from_docstring(meanings[field.name])
        default = json.dumps(field.default).replace("null", "None")
        rows.append((f"`{field.name}`", f"`{default}`", meaning[0].upper() + meaning[1:]))
    return table(("Setting", "Default", "Meaning"), rows)
