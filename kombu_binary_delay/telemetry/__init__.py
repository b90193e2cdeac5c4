"""How late delayed messages are, for listeners; it costs next to nothing while there are none."""

from .watch import Delivered, Discarded, Published, on_delivered, on_discarded, on_published

__all__ = [
    "Delivered",
    "Discarded",
    "Published",
    "on_delivered",
    "on_discarded",
    "on_published",
]
