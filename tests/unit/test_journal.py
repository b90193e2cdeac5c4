"""What the journal of one connection does beside those of other threads."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from kombu_binary_delay import Settings
from kombu_binary_delay.journal import Journal


class Emptied(deque[dict[str, Any]]):
    """Events that wait until somebody looks; then another thread has just written them."""

    def __bool__(self):
        return True


def test_a_publish_succeeds_though_another_thread_writes_the_last_event_that_waits(tmp_path):
    settings = Settings(journal=str(tmp_path))
    connection = SimpleNamespace(
        host="localhost", virtual_host="/", is_blocked=False, connected=True
    )
    executor: Any = SimpleNamespace(connection=connection)
    journal = Journal(settings, settings.topology(), executor, {})
    journal._later = Emptied()  # noqa: SLF001 - all of a process's connections share it

    journal.scheduled(({}, "", "q"))
