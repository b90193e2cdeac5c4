"""Errors of a broker other than the subcommand's own, such as the one to move messages to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kombu_binary_delay.celery_side.failures import BROKER_ERRORS, in_words, of_this_machine
from kombu_binary_delay.operate import UnreachableError

from .connect import Target


@contextmanager
def named(*targets: Target) -> Iterator[None]:
    """Name the broker in errors of a broker other than the subcommand's own.

    :raises UnreachableError: for any error of that broker.
    """
    try:
        yield
    except BROKER_ERRORS as exc:
        if of_this_machine(exc) is not None:
            raise
        raise UnreachableError(in_words(exc, *targets)) from exc
