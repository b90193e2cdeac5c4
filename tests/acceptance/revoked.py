"""What a revoked task looks like to the users of Celery."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
from celery.exceptions import TaskRevokedError

from tests.acceptance.journal import LATE, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery.result import AsyncResult

    from tests.acceptance.system import System


def assert_revoked(system: System, results: list[AsyncResult], log: Callable[[], str]) -> None:
    """Wait until each of these tasks was discarded, as Celery discards what is revoked."""
    for result in results:
        line = f"Discarding revoked task: note[{result.id}]"
        wait_until(partial(_contains, log, line), line)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=LATE)
        assert result.state == "REVOKED"
        # Celery sends its signal last.
        wait_until(partial(system.journal.revoked, result.id), f"the signal for {result.id}")
        assert len(system.journal.revoked(result.id)) == 1
        assert not system.journal.ran(result.id)


def _contains(log: Callable[[], str], line: str) -> bool:
    return line in log()
