"""Purpose: the columns of a table of the Spark pipeline."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .markdown import table

_FILE = Path(__file__).parents[2] / "kombu_binary_delay" / "spark" / "schema.py"


def pipeline_table(arguments: list[str], _: str) -> str:
    """Return a row for each column of the table that the argument names."""
    # By its path, because its package needs Spark.
    spec = importlib.util.spec_from_file_location("pipeline_schema", _FILE)
    assert spec is not None  # noqa: S101 - the file is there
    assert spec.loader is not None  # noqa: S101 - and is Python
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    columns = [column.split() for column in getattr(module, arguments[0]).split(", ")]
    return table(("Column", "Type"), [(f"`{name}`", f"`{kind}`") for name, kind in columns])
