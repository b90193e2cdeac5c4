"""What the id of a message is, by which it is cancelled, listed and followed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .delay import ID, TASK
from .envelope import HEADERS


def id_and_headers(properties: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the id of a message, or an empty string, and its headers.

    The ``correlation_id`` counts only with a ``reply_to``: a reply has that of its request.
    """
    headers = properties.get(HEADERS) or {}
    name = headers.get(ID) if TASK in headers else None
    name = name or properties.get("message_id")
    if name is None and properties.get("reply_to"):
        name = properties.get("correlation_id")
    return (name if isinstance(name, str) else ""), headers


def is_celery_task(headers: Mapping[str, Any]) -> bool:
    """Return whether a message with these headers is a task of Celery's protocol 2."""
    return isinstance(headers.get(ID), str) and isinstance(headers.get(TASK), str)
