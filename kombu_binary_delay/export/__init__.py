"""A topology as text: for infrastructure as code, and for the eye. Pure.

One format a file. Most are functions of a :class:`~kombu_binary_delay.model.topology.Part`, so
whatever can be declared can be exported; a picture and what monitors a ladder take the whole
:class:`~kombu_binary_delay.model.topology.Topology`. Nothing here may do I/O, or know what
is above the topology.
"""

from .alerts import alerts
from .definitions import definitions
from .grafana import grafana
from .graphviz import graphviz
from .kubernetes import kubernetes
from .mermaid import mermaid
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
