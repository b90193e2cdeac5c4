"""The directive ``ladder-figure``: a ladder, and the way of one message down it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

from kombu_binary_delay import Ladder, Topology
from kombu_binary_delay.export import svg

if TYPE_CHECKING:
    from sphinx.application import Sphinx


class LadderFigure(SphinxDirective):
    """The directive, with its ``levels``, ``tick``, ``delay`` and ``queue``."""

    option_spec: ClassVar = {
        "levels": directives.positive_int,
        "tick": directives.positive_int,
        "delay": directives.positive_int,
        "queue": directives.unchanged_required,
    }

    def run(self) -> list[nodes.Node]:
        """Return the figure in place of the directive."""
        given = self.options
        topology = Topology(Ladder.uniform(levels=given["levels"], tick=given["tick"]))
        return [nodes.raw("", svg(topology, given["delay"], given["queue"]), format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("ladder-figure", LadderFigure)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
