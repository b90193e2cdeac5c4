"""The directive ``faults-table``: what runs of the fault scenarios came to.

The figures are those that `python -m dev.faults --json docs/explanation/faults.json` wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

FIGURES = Path(__file__).parents[1] / "explanation" / "faults.json"
AMENDED = (
    *("What breaks", "RabbitMQ", "Confirmed", "Amended", "Ran yet", "Dropped wrongly"),
    *("Lost", "Twice"),
)
HEAD = ("Scenario", "RabbitMQ", "Confirmed", "Lost", "Early", "Twice", "Late, s: p50 / p99 / max")


def faults_table(scenarios: set[str]) -> str:
    """Write the rows of some scenarios as a table in reStructuredText."""
    rows = [row for row in json.loads(FIGURES.read_text()) if row["scenario"] in scenarios]
    missing = scenarios - {row["scenario"] for row in rows}
    if missing:
        raise ValueError(f"no figures of {sorted(missing)} in {FIGURES.name}")
    return _table(HEAD, [_row(row) for row in rows])


def bad_destination_table() -> str:
    """Write what bad destinations cost a good one."""
    rows = [row for row in json.loads(FIGURES.read_text()) if row["scenario"] == "bad destination"]
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        notes = row["notes"]
        stuck = notes["good not there in time"]
        cell = f"{stuck} of 150 stuck" if stuck else f"{notes['worst among bad']:.2f} s"
        found.setdefault(row["case"], {})[row["broker"]] = f"{notes['worst alone']:.2f} s → {cell}"
    brokers = sorted({row["broker"] for row in rows}, key=lambda each: [*map(int, each.split("."))])
    head = ("Bad destination", *(f"RabbitMQ {broker}" for broker in brokers))
    body = [[case, *(cells.get(each, "") for each in brokers)] for case, cells in found.items()]
    return _table(head, body)


def amended_table() -> str:
    """Write what became of messages that were amended."""
    names = ("broker", "confirmed", "amended", "ran", "dropped", "lost", "duplicates")
    rows = [row for row in json.loads(FIGURES.read_text()) if row["scenario"] == "amended"]
    return _table(AMENDED, [[row["case"], *(str(row[name]) for name in names)] for row in rows])


def _row(row: dict[str, Any]) -> list[str]:
    late = " / ".join(f"{each:.1f}" for each in row["late"])
    counts = [str(row[name]) for name in ("confirmed", "lost", "early", "duplicates")]
    return [f"{row['scenario']}: {row['case']}", row["broker"], *counts, late]


def _table(head: tuple[str, ...], body: list[list[str]]) -> str:
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in [list(head), *body]:
        lines += [f"   {'* -' if number == 0 else '  -'} {cell}" for number, cell in enumerate(row)]
    return "\n".join(lines)


class FaultsTable(SphinxDirective):
    """The figures of the scenarios that the argument names, separated by commas."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar = {"cost": directives.flag, "amended": directives.flag}

    def run(self) -> list[nodes.Node]:
        """Return the table in place of the directive."""
        self.env.note_dependency(str(FIGURES))
        if "cost" in self.options:
            return self.parse_text_to_nodes(bad_destination_table())
        if "amended" in self.options:
            return self.parse_text_to_nodes(amended_table())
        names = {name.strip() for name in self.arguments[0].split(",")}
        return self.parse_text_to_nodes(faults_table(names))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("faults-table", FaultsTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
