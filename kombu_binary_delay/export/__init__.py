"""A topology as text: for infrastructure as code, and for the eye. Pure.

One format a file; each is a function of a :class:`~kombu_binary_delay.topology.Part`, so whatever
can be declared can be exported. Nothing here may do I/O, or know what stands above the topology.
"""

from .definitions import definitions
from .graphviz import graphviz
from .kubernetes import kubernetes
from .mermaid import mermaid
from .monitoring import alerts, grafana
from .svg import svg
from .terraform import terraform

__all__ = [
    "alerts",
    "definitions",
    "grafana",
    "graphviz",
    "kubernetes",
    "mermaid",
    "svg",
    "terraform",
]
