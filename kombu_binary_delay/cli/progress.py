"""A progress bar: only on a terminal, and apart from the result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click


@contextmanager
def bar(label: str, total: int) -> Iterator[Callable[[int], object]]:
    """Yield a function to which the caller passes how many of ``total`` messages are done."""
    if not sys.stderr.isatty() or not total:
        yield lambda count: None  # noqa: ARG005 - nobody looks
        return
    with click.progressbar(
        length=total, label=label, file=sys.stderr, show_pos=True, width=0
    ) as shown:

        def update(count: int) -> None:
            shown.update(max(min(count, total) - shown.pos, 0))

        yield update
