"""The directive ``settings-table``: the fields of a dataclass, from its own docstring."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from sphinx.util.docutils import SphinxDirective

from kombu_binary_delay import Settings

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

_PARAM = re.compile(r"^:param (\w+):(.*?)(?=^:|\Z)", re.MULTILINE | re.DOTALL)


def settings_table(settings: Any) -> str:
    """Write the settings as a table in reStructuredText."""
    meanings = dict(_PARAM.findall(inspect.getdoc(settings) or ""))
    rows = [("Setting", "Default", "Meaning")]
    for field in fields(settings):
        # A setting without a word about it is an error here, and so in the build.
        meaning = " ".join(meanings[field.name].split())
        default = json.dumps(field.default).replace("null", "None")
        rows.append((f"``{field.name}``", f"``{default}``", meaning[0].upper() + meaning[1:]))
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for name, default, meaning in rows:
        lines += [f"   * - {name}", f"     - {default}", f"     - {meaning}"]
    return "\n".join(lines)


class SettingsTable(SphinxDirective):
    """All settings with their defaults and meanings."""

    def run(self) -> list[nodes.Node]:
        """Return the table in place of the directive."""
        return self.parse_text_to_nodes(settings_table(Settings))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("settings-table", SettingsTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
