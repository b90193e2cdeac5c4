"""Import the Celery app that ``-A`` names; errors are one sentence."""

from __future__ import annotations

import traceback
from typing import Any

import click


def load_app(name: str) -> Any:
    """Import and return a Celery app, as Celery's ``-A`` does.

    :param name: ``package.module``, or ``package.module:attribute``.
    :raises click.UsageError: if there is no such app, or its module raises an error.
    """
    try:
        from celery.app.utils import find_app  # noqa: PLC0415 - Celery is no dependency
    except ImportError:
        raise click.UsageError("-A needs Celery, which is not installed here") from None
    module, _, attribute = name.partition(":")
    missing = _missing_modules(module)
    try:
        return find_app(name)
    # A module may raise any error when it is imported.
    except Exception as exc:
        reason = _why(exc, module, attribute, missing)
        raise click.UsageError(f"no Celery app can be loaded from {name!r}: {reason}") from exc


def _missing_modules(module: str) -> set[str]:
    """Return the names that Python may report for a missing module: its own, and its parents'."""
    words = module.split(".")
    return {".".join(words[:count]) for count in range(1, len(words) + 1)}


def _why(exc: Exception, module: str, attribute: str, missing: set[str]) -> str:
    if isinstance(exc, ModuleNotFoundError):
        # Last, Celery tries `module:attribute` as the name of a module.
        if attribute and exc.name == f"{module}:{attribute}":
            return f"the module {module} has no app named {attribute!r}"
        if exc.name in missing:
            return (
                f"there is no module {exc.name!r} in this folder or on PYTHONPATH; run this where "
                f"your worker starts, and name the app as the worker's -A does"
            )
    if isinstance(exc, AttributeError) and f"module '{module}'" in str(exc):
        return f"the module {module} has no Celery app"
    place = ""
    if not isinstance(exc, SyntaxError) and (frames := traceback.extract_tb(exc.__traceback__)):
        place = f", at {frames[-1].filename}:{frames[-1].lineno}"
    return f"{type(exc).__name__}: {exc}{place}"
