"""A Mermaid flowchart, as Markdown renderers draw it. Pure."""

from __future__ import annotations

import re
from html import escape

from kombu_binary_delay.model.parts import Part

from .graph import Node, edges, human, nodes, outline
from .names import number, shown

_ARROWS = {"binding": "-->", "expiry": "-.->", "alternate": "-.->"}


def mermaid(part: Part) -> str:
    """Return a part as a flowchart: bindings as lines, expiry and alternate exchanges dotted."""
    part = outline(part)
    drawn = nodes(part)
    ids = number(node.key for node in drawn)
    lines = ["flowchart TD"]
    lines += [f"  {ids[node.key]}{_shape(node)}" for node in drawn]
    for edge in edges(part):
        label = "no binding" if edge.kind == "alternate" else edge.label
        text = f'|"{_escape(label)}"|' if label else ""
        lines.append(f"  {ids[edge.source.key]} {_ARROWS[edge.kind]}{text} {ids[edge.target.key]}")
    return "\n".join(lines) + "\n"


def _shape(node: Node) -> str:
    name = _escape(node.name)
    if node.kind == "exchange":
        return f'(["{name}"])'
    wait = "" if node.wait is None else f"<br/>{human(node.wait)}"
    return f'["{name}{wait}"]'


def _escape(text: str) -> str:
    """Return a text with HTML entities for characters that Mermaid or HTML would interpret."""
    # Mermaid has its own entities, which begin with a #.
    text = re.sub(r"#(?=\w+;)", "#\N{ZERO WIDTH SPACE}", shown(text))
    return escape(text, quote=False).replace('"', "&quot;")
