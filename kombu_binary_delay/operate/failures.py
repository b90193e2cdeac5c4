"""Errors of a broker, as errors of an operation: in words, with what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kombu_binary_delay.celery_side.failures import (
    BROKER_ERRORS,
    Target,
    in_words,
    of_this_machine,
)

from .errors import UnreachableError


@contextmanager
def named(*targets: Target) -> Iterator[None]:
    """Name the brokers in their errors.

    :raises UnreachableError: for any error of these brokers.
    """
    try:
        yield
    except BROKER_ERRORS as exc:
        if of_this_machine(exc) is not None:
            raise
        raise UnreachableError(in_words(exc, *targets)) from exc
