"""How Kombu and Celery are taught what they have no setting for: a function of theirs is replaced.

Each replacement calls the original for everything that is not ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace the attribute ``name`` by ``wrap(attribute)``, once; do nothing where there is none.

    :param owner: the module or class; None where it is not loaded.
    """
    original = getattr(owner, name, None)
    if original is not None and not hasattr(original, "of_binary_delay"):
        replacement = wrap(original)
        replacement.of_binary_delay = True
        setattr(owner, name, replacement)
