"""The DOT language of Graphviz. Pure."""

from __future__ import annotations

from kombu_binary_delay.model.parts import Part

from .graph import Node, edges, human, nodes, outline
from .names import number

_STYLES = {"binding": "solid", "expiry": "dashed", "alternate": "dotted"}


def graphviz(part: Part) -> str:
    """Return a part as DOT: bindings solid, expiry dashed, alternate exchanges dotted."""
    part = outline(part)
    drawn = nodes(part)
    ids = number(node.key for node in drawn)
    lines = [
        "digraph ladder {",
        '  node [fontname="sans-serif", fontsize=11];',
        '  edge [fontname="monospace", fontsize=10];',
    ]
    lines += [f"  {ids[node.key]} [{_look(node)}];" for node in drawn]
    for edge in edges(part):
        label = f'label="{_escape(edge.label)}", ' if edge.label else ""
        lines.append(
            f"  {ids[edge.source.key]} -> {ids[edge.target.key]} "
            f"[{label}style={_STYLES[edge.kind]}];"
        )
    return "\n".join([*lines, "}"]) + "\n"


def _look(node: Node) -> str:
    name = _escape(node.name)
    if node.kind == "exchange":
        return f'label="{name}", shape=box, style=rounded'
    wait = "" if node.wait is None else f"\\n{human(node.wait)}"
    return f'label="{name}{wait}", shape=box'


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
