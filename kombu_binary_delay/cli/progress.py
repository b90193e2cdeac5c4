"""A progress bar: only on a terminal, and apart from the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn


@contextmanager
def bar(label: str, total: int) -> Iterator[Callable[[int], object]]:
    """Yield a function to which the caller passes how many of ``total`` messages are done."""
    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (console.is_terminal and total)) as shown:
        task = shown.add_task(label, total=total)
        yield lambda count: shown.update(task, completed=min(count, total))
