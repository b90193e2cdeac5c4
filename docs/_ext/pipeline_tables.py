"""The directive ``pipeline-table``: the columns of one table of the Spark pipeline."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

_FILE = Path(__file__).parents[2] / "kombu_binary_delay" / "spark" / "schema.py"


def _schema() -> Any:
    # By its path: the docs are built without Spark.
    spec = importlib.util.spec_from_file_location("pipeline_schema", _FILE)
    assert spec is not None  # noqa: S101 - the file is there
    assert spec.loader is not None  # noqa: S101 - and is Python
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class PipelineTable(SphinxDirective):
    """The columns and types of a table."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the table in place of the directive."""
        columns = getattr(_schema(), self.arguments[0]).split(", ")
        lines = [".. list-table::", "   :header-rows: 1", "", "   * - Column", "     - Type"]
        for column in columns:
            name, kind = column.split()
            lines += [f"   * - ``{name}``", f"     - ``{kind}``"]
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("pipeline-table", PipelineTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
