"""Replace functions of Kombu and Celery where they have no setting for what we need.

Each replacement calls the original for everything that does not concern our transports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace the attribute ``name`` by ``wrap(attribute)``, once; do nothing if it is missing.

    :param owner: the module or class; None if it is not loaded.
    """
    original = getattr(owner, name, None)
    if original is not None and not hasattr(original, "of_binary_delay"):
        replacement = wrap(original)
        replacement.of_binary_delay = True
        setattr(owner, name, replacement)
