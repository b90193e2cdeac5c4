"""Export a topology as text: for infrastructure as code, as a drawing, and for monitoring. Pure.

One format per file. Most are functions of a :class:`~kombu_binary_delay.ladder.topology.Part`, so
all that can be declared can be exported. The SVG figure and the monitoring formats need the whole
:class:`~kombu_binary_delay.ladder.topology.Topology`. The broker's configuration needs only its
release. Nothing here may do
I/O, but to read its own templates, or import a module above the topology.
"""

from .broker_config import NEWEST, broker_config
from .definitions import definitions
from .kubernetes import kubernetes
from .monitoring import alerts, grafana
from .svg import svg
from .terraform import terraform

__all__ = [
    "NEWEST",
    "alerts",
    "broker_config",
    "definitions",
    "grafana",
    "kubernetes",
    "svg",
    "terraform",
]
