"""How late delayed messages are, for listeners; it costs next to nothing while there are none."""

from .watch import Delivered, Dropped, Published, on_delivered, on_dropped, on_published

__all__ = [
    "Delivered",
    "Dropped",
    "Published",
    "on_delivered",
    "on_dropped",
    "on_published",
]
